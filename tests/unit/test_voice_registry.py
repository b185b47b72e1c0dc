"""The voice registry: what is kept, that a crash or a full disk leaves it consistent, and that processes share it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qwen3tts_hw.errors import RequestError, StorageError, UnknownVoiceError, VoiceExistsError
from qwen3tts_hw.settings import Settings
from qwen3tts_hw.types import EncodedVoice
from qwen3tts_hw.voice.registry import INDEX, OBJECTS, VoiceRegistry
from qwen3tts_hw.voice.voice_file import from_bytes

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 8
SAMPLES = np.linspace(-1, 1, 24_000, dtype=np.float32)


def encoded(number=1, frames=3):
    return EncodedVoice(np.full(WIDTH, number, "<f4").tobytes(), np.full((frames, 16), number, "<i2").tobytes())


def registry_in(folder, **changes):
    identity = {"width": WIDTH, "fingerprint": "f1", "reserved": ("ryan",)}
    identity.update({name: changes.pop(name) for name in ("width", "fingerprint") if name in changes})
    return VoiceRegistry(folder, Settings(**changes), **identity)


def add(registry, name="anna", number=1, text="Good morning.", **options):
    return registry.add(name, encoded(number), consent=True, reference_text=text, samples=SAMPLES, **options)


def names(registry):
    return [record.name for record in registry.records()]


def stored_files(folder):
    return sorted(path.name for path in (folder / OBJECTS).iterdir())


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "deep" / "voices"


@pytest.fixture
def registry(folder):
    return registry_in(folder)


class TestKeeping:
    def test_a_voice_is_what_was_added(self, registry, folder):
        record = add(registry)
        for reader in (registry, registry_in(folder)):
            voice = reader.load("anna")
            assert voice.embedding == encoded().embedding
            assert (voice.reference_text, voice.reference_codes) == ("Good morning.", encoded().codes)
            assert reader.records() == (record,)
        assert (record.width, record.fingerprint, record.reference_frames, record.seconds) == (WIDTH, "f1", 3, 1.0)
        assert record.consent
        assert not record.has_audio

    def test_without_text_the_embedding_alone_is_kept(self, registry):
        add(registry, text="")
        voice = registry.load("anna")
        assert (voice.reference_text, voice.reference_codes) == ("", b"")

    def test_names_are_one_in_any_case(self, registry):
        assert add(registry, " Anna_B-2 ").name == "anna_b-2"
        assert registry.load("ANNA_B-2")
        with pytest.raises(VoiceExistsError):
            add(registry, "anna_b-2")

    def test_audio_is_kept_if_the_operator_wants(self, folder):
        registry = registry_in(folder, voices_keep_audio=True)
        assert add(registry).has_audio
        audio = from_bytes(registry.export("anna")).audio
        assert np.abs(audio / 32_767 - SAMPLES).max() < 1e-4

    def test_files_are_named_by_content(self, registry, folder):
        record = add(registry)
        assert stored_files(folder) == [f"{record.digest}.safetensors"]
        assert record.size_bytes == (folder / OBJECTS / f"{record.digest}.safetensors").stat().st_size

    def test_only_the_owner_may_read(self, registry, folder):
        record = add(registry)
        assert (folder / OBJECTS / f"{record.digest}.safetensors").stat().st_mode & 0o077 == 0

    def test_deleting(self, registry, folder):
        add(registry)
        add(registry, "berta")
        voice = registry.load("anna")
        registry.delete("anna")
        assert names(registry) == ["berta"]
        assert len(stored_files(folder)) == 1
        assert voice.reference_frames == 3, "whoever speaks with it goes on"
        for unknown in ("anna", "carla"):
            with pytest.raises(UnknownVoiceError, match="registered: berta"):
                registry.load(unknown)
            with pytest.raises(UnknownVoiceError):
                registry.delete(unknown)

    def test_replacing(self, registry, folder):
        add(registry)
        with pytest.raises(VoiceExistsError):
            add(registry, number=2)
        assert registry.load("anna").embedding == encoded(1).embedding
        add(registry, number=2, overwrite=True)
        assert registry.load("anna").embedding == encoded(2).embedding
        assert len(stored_files(folder)) == 1

    def test_a_folder_that_is_not_there_is_empty(self, registry, folder):
        assert registry.records() == ()
        assert not folder.exists()


class TestRefusals:
    @pytest.mark.parametrize(
        "name",
        ["", " ", "../a", "a/b", "a b", "..", ".", "a.b", "\0", "ä", "a" * 65, None, 3, "Ryan", "default", "IMPORT"],
    )
    def test_names(self, registry, folder, name):
        for refused in (registry.check_new, lambda name: add(registry, name)):
            with pytest.raises(RequestError) as caught:
                refused(name)
            assert caught.value.field == "name"
        assert not folder.exists()

    def test_without_consent(self, registry, folder):
        with pytest.raises(RequestError) as caught:
            registry.add("anna", encoded(), consent=False, samples=SAMPLES)
        assert caught.value.field == "consent"
        assert not folder.exists()

    def test_too_many(self, folder):
        registry = registry_in(folder, voices_max_count=2)
        add(registry, "a")
        add(registry, "b")
        for refused in (registry.check_new, lambda name: add(registry, name)):
            with pytest.raises(StorageError, match="voices_max_count"):
                refused("c")
        add(registry, "a", overwrite=True)
        assert names(registry) == ["a", "b"]

    def test_too_large(self, folder):
        size = add(registry_in(folder), "a").size_bytes
        registry = registry_in(folder, voices_max_bytes=size * 2 - 1)
        with pytest.raises(StorageError, match="voices_max_bytes"):
            add(registry, "b")
        add(registry, "a", overwrite=True)
        assert names(registry) == ["a"]
        assert len(stored_files(folder)) == 1

    @pytest.mark.parametrize("other", [{"width": 2 * WIDTH}, {"fingerprint": "f2"}])
    def test_voices_of_other_checkpoints(self, registry, folder, other):
        record, stranger = add(registry), registry_in(folder, **other)
        assert names(stranger) == ["anna"]
        assert not stranger.usable(record)
        with pytest.raises(RequestError, match="another checkpoint"):
            stranger.load("anna")
        with pytest.raises(RequestError, match="another checkpoint"):
            stranger.import_file(registry.export("anna"), name="b")

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 1, "voices": {"a": {}}}', '{"version": 2}'])
    def test_a_damaged_index_is_not_overwritten(self, registry, folder, text):
        add(registry)
        (folder / INDEX).write_text(text)
        for refused in (registry.records, lambda: add(registry, "b"), lambda: registry.delete("anna")):
            with pytest.raises(StorageError, match=INDEX):
                refused()
        assert (folder / INDEX).read_text() == text

    def test_a_damaged_object(self, registry, folder):
        record = add(registry)
        (folder / OBJECTS / f"{record.digest}.safetensors").write_bytes(b"damaged")
        with pytest.raises(RequestError):
            registry_in(folder).load("anna")

    def test_a_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageError, match="cannot be read or written"):
            add(registry_in(tmp_path / "file" / "voices"))


class TestExchange:
    def test_export_and_import(self, registry, tmp_path):
        record = add(registry)
        other = registry_in(tmp_path / "other")
        assert other.import_file(registry.export("anna")) == record
        assert other.load("anna") == registry.load("anna")
        assert other.import_file(registry.export("anna"), name="Berta").name == "berta"

    def test_importing_over_a_voice(self, registry):
        add(registry)
        data = registry.export("anna")
        with pytest.raises(VoiceExistsError):
            registry.import_file(data)
        assert registry.import_file(data, overwrite=True).name == "anna"

    def test_audio_is_left_out_where_it_is_not_kept(self, registry, tmp_path):
        keeping = registry_in(tmp_path / "other", voices_keep_audio=True)
        add(keeping)
        assert not registry.import_file(keeping.export("anna")).has_audio


class Crash(BaseException):
    """The process ends here."""


OPEN = os.open
SYSTEM_CALLS = ("open", "write", "fsync", "close")


class TestCrashes:
    """The process ends at each system call of a change, in turn; afterwards the old or the new state is there."""

    def crash_at(self, monkeypatch, number):
        """Make the ``number``-th call and all that follow fail; return the files that the process has opened."""
        calls, opened = [0], []

        def counted(real):
            def call(*arguments, **options):
                calls[0] += 1
                if calls[0] >= number:
                    raise Crash
                result = real(*arguments, **options)
                if real is OPEN:
                    opened.append(result)
                return result

            return call

        for name in SYSTEM_CALLS:
            monkeypatch.setattr(os, name, counted(getattr(os, name)))
        monkeypatch.setattr(Path, "replace", counted(Path.replace))
        monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
        return opened

    @pytest.mark.parametrize("change", ["add", "overwrite", "delete"])
    def test_at_every_call(self, folder, monkeypatch, change):
        def apply(registry):
            if change == "add":
                add(registry, "berta", 2)
            elif change == "overwrite":
                add(registry, "anna", 2, overwrite=True)
            else:
                registry.delete("anna")

        allowed = {"add": [{"anna": 1}, {"anna": 1, "berta": 2}], "overwrite": [{"anna": 1}, {"anna": 2}]}.get(
            change, [{"anna": 1}, {}]
        )
        seen, number = [], 0
        while True:
            number += 1
            place = folder / str(number)
            add(registry_in(place), "anna", 1)
            with monkeypatch.context() as patched:
                opened = self.crash_at(patched, number)
                try:
                    apply(registry_in(place))
                    crashed = False
                except Crash:
                    crashed = True
            for file in opened:  # as the end of a process does, locks included
                with contextlib.suppress(OSError):
                    os.close(file)
            after = registry_in(place)
            state = {
                record.name: int(np.frombuffer(after.load(record.name).embedding, "<f4")[0])
                for record in after.records()
            }
            assert state in allowed, f"after a crash at call {number}"
            seen.append(state)
            add(after, "next", 3)
            assert len(stored_files(place)) == len(state) + 1, "the next change clears what the crash has left"
            assert sorted(path.name for path in place.iterdir()) == [".lock", INDEX, OBJECTS]
            if not crashed:
                break
        assert seen[0] == allowed[0]
        assert seen[-1] == allowed[1]
        assert number > len(SYSTEM_CALLS)


class TestFullDisk:
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    @pytest.mark.parametrize("part", ["write", "fsync"])
    @pytest.mark.parametrize("after", [0, 1])
    def test_nothing_changes(self, registry, folder, monkeypatch, code, part, after):
        add(registry)
        real, calls = getattr(os, part), []

        def full(*arguments):
            calls.append(arguments)
            if len(calls) > after:
                raise OSError(code, os.strerror(code))
            return real(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(os, part, full)
            with pytest.raises(StorageError, match="no space is left"):
                add(registry, "berta")
        assert names(registry) == names(registry_in(folder)) == ["anna"]
        assert len(stored_files(folder)) == 1
        add(registry, "berta")
        assert names(registry) == ["anna", "berta"]

    def test_half_a_write_is_continued(self, registry, monkeypatch):
        real = os.write
        monkeypatch.setattr(os, "write", lambda file, data: real(file, bytes(data[:7])))
        add(registry)
        monkeypatch.undo()
        assert registry.load("anna").embedding == encoded().embedding


class TestSharing:
    def test_changes_are_seen_without_a_restart(self, registry, folder):
        other = registry_in(folder)
        assert names(other) == []
        add(registry)
        assert names(other) == ["anna"]
        add(other, number=2, overwrite=True)
        assert registry.load("anna").embedding == encoded(2).embedding
        registry.delete("anna")
        assert names(other) == []

    def test_a_voice_deleted_between_index_and_object(self, registry, folder, monkeypatch):
        add(registry)
        record, other = registry.get("anna"), registry_in(folder)
        registry.delete("anna")
        monkeypatch.setattr(other, "get", lambda name: record)
        with pytest.raises(UnknownVoiceError, match="just been deleted"):
            other.load("anna")

    def test_one_of_many_threads_wins(self, registry):
        won, start = [], threading.Barrier(8)

        def upload(number):
            start.wait()
            with contextlib.suppress(VoiceExistsError):
                won.append(add(registry, "anna", number))

        threads = [threading.Thread(target=upload, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert registry.get("anna") == won[0]

    def test_processes_lose_nothing(self, registry, folder):
        """Four processes add and delete at once; each finds its own at the end."""
        script = (
            "import sys\n"
            "from pathlib import Path\n"
            "from tests.unit.test_voice_registry import add, registry_in\n"
            "registry, own = registry_in(Path(sys.argv[1])), sys.argv[2]\n"
            "for number in range(8):\n"
            "    add(registry, f'{own}-{number}', number)\n"
            "    if number % 2:\n"
            "        registry.delete(f'{own}-{number}')\n"
        )
        command = [sys.executable, "-c", script, str(folder)]
        running = [subprocess.Popen([*command, own], cwd=ROOT) for own in "abcd"]
        assert [process.wait(60) for process in running] == [0] * 4
        assert names(registry) == [f"{own}-{number}" for own in "abcd" for number in (0, 2, 4, 6)]
        assert len(stored_files(folder)) == 16
        assert json.loads((folder / INDEX).read_text())["version"] == 1


def test_memory_is_bounded(registry, monkeypatch):
    monkeypatch.setattr("qwen3tts_hw.voice.registry.VOICES_IN_MEMORY", 2)
    for name in ("a", "b", "c"):
        add(registry, name)
        registry.load(name)
    assert len(registry._loaded) == 2
    assert registry.load("a").reference_frames == 3


def test_records_are_plain_values(registry):
    record = add(registry)
    assert replace(record) == record
