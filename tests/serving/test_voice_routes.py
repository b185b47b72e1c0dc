"""The voice routes: register, list, use, export, import and delete voices, and everything that must be refused."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from qwen3tts_hw.types import ClonedVoice
from tests.serving.recordings import bad_recordings, data_url, recording
from tests.serving.speech_server import SpeechServer

BAD = bad_recordings()
GOOD = {"name": "anna", "consent": "true", "ref_text": "Good morning."}
ROUTE = "/v1/audio/voices"


def register(server: SpeechServer, audio: bytes | None = None, **fields: str | None) -> httpx.Response:
    """Send a form with a good recording, with fields changed; None removes one."""
    sent = {name: value for name, value in (GOOD | fields).items() if value is not None}
    return server.client.post(ROUTE, data=sent, files={"audio": ("a.wav", audio or recording())})


def registered(server: SpeechServer) -> list[str]:
    return [voice["id"] for voice in server.client.get(ROUTE).json()["voices"]]


def voice_spoken(server: SpeechServer, name: str, **fields) -> ClonedVoice:
    response = server.speak(voice=name, **fields)
    assert response.status_code == 200, response.text
    return server.service.streams[-1].request.voice


class TestRegistering:
    def test_a_form(self, base_server):
        response = register(base_server)
        assert response.status_code == 201, response.text
        told = response.json()
        assert (told["id"], told["ref_text"], told["reference_frames"]) == ("anna", "Good morning.", 7)
        assert told["advice"], "half a second is little"
        assert told["usable"] is True
        assert told["has_audio"] is False

    def test_json(self, base_server):
        body = {"name": "Anna", "consent": True, "audio": data_url(recording())}
        response = base_server.client.post(ROUTE, json=body)
        assert response.status_code == 201, response.text
        assert (response.json()["id"], response.json()["ref_text"]) == ("anna", None)
        assert base_server.service.encoded == [(12_000, False)]

    def test_it_is_spoken_without_encoding_again(self, base_server):
        register(base_server)
        voices = [voice_spoken(base_server, name) for name in ("anna", " ANNA ", "anna")]
        assert voices == [voices[0]] * 3
        assert (voices[0].reference_text, voices[0].reference_frames) == ("Good morning.", 7)
        assert voice_spoken(base_server, "anna", x_vector_only_mode=True).reference_codes == b""
        assert len(base_server.service.encoded) == 1

    def test_clean_up(self, base_server):
        assert register(base_server, trailing_silence_ms="500", trim_silence="off").status_code == 201
        assert base_server.service.encoded == [(24_000, True)]

    def test_keeping_the_audio(self, base_server):
        base_server.service.settings = replace(base_server.service.settings, voices_keep_audio=True)
        assert register(base_server).json()["has_audio"] is True

    def test_replacing(self, base_server):
        register(base_server)
        before = voice_spoken(base_server, "anna")
        base_server.assert_refused(register(base_server), 409, "name")
        assert register(base_server, recording(seed=3), overwrite="true").status_code == 201
        assert voice_spoken(base_server, "anna") != before
        assert registered(base_server) == ["anna"]

    def test_two_at_once(self, base_server):
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda seed: register(base_server, recording(seed=seed)), range(4)))
        assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409]
        assert registered(base_server) == ["anna"]
        base_server.assert_speaks()


class TestReading:
    def test_the_list(self, base_server):
        for name in ("b", "a"):
            register(base_server, name=name)
        told = base_server.client.get(ROUTE).json()
        assert [voice["id"] for voice in told["voices"]] == ["a", "b"]
        assert told["variant"] == "base"

    def test_one(self, base_server):
        told = register(base_server).json()
        found = base_server.client.get(f"{ROUTE}/Anna").json()
        assert found == {name: value for name, value in told.items() if name != "advice"}

    @pytest.mark.parametrize("path", ["nobody", "nobody/export", "%2e%2e", "..%5c..", "a%00b", "x" * 200])
    def test_unknown_names(self, base_server, path):
        response = base_server.client.get(f"{ROUTE}/{path}")
        base_server.assert_refused(response, 404, "name")

    @pytest.mark.parametrize("path", ["..%2F..%2Fetc%2Fpasswd", "../../etc/passwd"])
    def test_paths(self, base_server, path):
        assert base_server.client.get(f"{ROUTE}/{path}").status_code == 404
        base_server.assert_speaks()


class TestDeleting:
    def test_a_voice(self, base_server):
        register(base_server)
        assert base_server.client.delete(f"{ROUTE}/anna").json() == {"id": "anna", "deleted": True}
        assert registered(base_server) == []
        base_server.assert_refused(base_server.speak(voice="anna"), 400, "voice")
        base_server.assert_refused(base_server.client.delete(f"{ROUTE}/anna"), 404, "name")

    def test_while_it_is_spoken(self, base_server):
        register(base_server)
        base_server.service.script = replace(base_server.service.script, delay_s=0.05)
        with ThreadPoolExecutor(1) as threads:
            speech = threads.submit(base_server.speak, voice="anna", response_format="pcm")
            while not base_server.service.streams:
                assert not speech.done()
            assert base_server.client.delete(f"{ROUTE}/anna").status_code == 200
            assert len(speech.result().content) == 7 * 1_920 * 2
        base_server.assert_refused(base_server.speak(voice="anna"), 400, "voice")


class TestExchange:
    @pytest.mark.parametrize("form", [False, True])
    def test_export_and_import(self, base_server, form):
        register(base_server)
        before = voice_spoken(base_server, "anna")
        exported = base_server.client.get(f"{ROUTE}/anna/export")
        assert exported.status_code == 200
        assert 'filename="anna.safetensors"' in exported.headers["content-disposition"]
        base_server.client.delete(f"{ROUTE}/anna")
        if form:
            files = {"file": ("a", exported.content)}
            imported = base_server.client.post(f"{ROUTE}/import", files=files, data={"name": "berta"})
        else:
            imported = base_server.client.post(f"{ROUTE}/import?name=berta", content=exported.content)
        assert imported.status_code == 201, imported.text
        assert registered(base_server) == ["berta"]
        assert voice_spoken(base_server, "berta") == before

    def test_under_its_own_name(self, base_server):
        register(base_server)
        data = base_server.client.get(f"{ROUTE}/anna/export").content
        base_server.assert_refused(base_server.client.post(f"{ROUTE}/import", content=data), 409, "name")
        assert base_server.client.post(f"{ROUTE}/import?overwrite=true", content=data).status_code == 201

    @pytest.mark.parametrize("data", [b"hello", bytes(100), b"\xff" * 100, recording(600)])
    def test_what_is_no_voice(self, base_server, data):
        base_server.assert_refused(base_server.client.post(f"{ROUTE}/import", content=data), 400, "file")

    def test_another_checkpoints_voice(self, base_server):
        register(base_server)
        data = base_server.client.get(f"{ROUTE}/anna/export").content
        base_server.service.voice_fingerprint = "f2"
        base_server.service.settings = replace(base_server.service.settings)  # as after a restart
        response = base_server.client.post(f"{ROUTE}/import?name=b", content=data)
        base_server.assert_refused(response, 400, "file")
        assert [voice["usable"] for voice in base_server.client.get(ROUTE).json()["voices"]] == [False]
        base_server.assert_refused(base_server.speak(voice="anna"), 400, "voice")


class TestRefusals:
    @pytest.mark.parametrize("name", BAD)
    def test_bad_recordings(self, base_server, name):
        base_server.assert_refused(register(base_server, BAD[name]), 400, "ref_audio")
        assert registered(base_server) == []

    @pytest.mark.parametrize(
        ("param", "fields"),
        [
            ("name", {"name": None}),
            ("name", {"name": ""}),
            ("name", {"name": "../anna"}),
            ("name", {"name": "a/b"}),
            ("name", {"name": "a" * 65}),
            ("name", {"name": "Ännchen"}),
            ("name", {"name": "import"}),
            ("name", {"name": "default"}),
            ("consent", {"consent": None}),
            ("consent", {"consent": "false"}),
            ("consent", {"consent": "perhaps"}),
            ("ref_text", {"ref_text": "a" * 30_000}),
            ("overwrite", {"overwrite": "perhaps"}),
            ("trailing_silence_ms", {"trailing_silence_ms": "long"}),
            ("trailing_silence_ms", {"trailing_silence_ms": "99999"}),
            ("colour", {"colour": "red"}),
        ],
    )
    def test_fields(self, base_server, param, fields):
        base_server.assert_refused(register(base_server, **fields), 400, param)
        assert registered(base_server) == []

    def test_no_audio(self, base_server):
        base_server.assert_refused(base_server.client.post(ROUTE, json=GOOD | {"consent": True}), 400, "audio")

    @pytest.mark.parametrize("audio", [3, ["a"], {"a": 1}])
    def test_audio_of_another_type(self, base_server, audio):
        body = GOOD | {"consent": True, "audio": audio}
        base_server.assert_refused(base_server.client.post(ROUTE, json=body), 400, "audio")

    def test_other_media_types(self, base_server):
        response = base_server.client.post(ROUTE, content=b"a=b", headers={"content-type": "text/plain"})
        base_server.assert_refused(response, 415, None)

    @pytest.mark.parametrize("body", [b"", b"--x", b"--x\r\nnonsense\r\n--x--\r\n"])
    def test_malformed_forms(self, base_server, body):
        headers = {"content-type": "multipart/form-data; boundary=x"}
        response = base_server.client.post(ROUTE, content=body, headers=headers)
        assert response.status_code == 400, response.text
        base_server.assert_speaks()

    def test_a_form_without_a_boundary(self, base_server):
        response = base_server.client.post(ROUTE, content=b"--", headers={"content-type": "multipart/form-data"})
        base_server.assert_refused(response, 400, None)

    def test_too_many_voices(self, base_server):
        for name in ("a", "b", "c"):
            assert register(base_server, name=name).status_code == 201
        error = base_server.assert_refused(register(base_server, name="d"), 507, None)
        assert "voices_max_count" in error["message"]
        assert register(base_server, name="c", overwrite="true").status_code == 201

    def test_a_full_disk(self, base_server, monkeypatch):
        register(base_server, name="before")
        write = os.write

        def full(file: int, data: bytes) -> int:
            if "voices" in str(Path(f"/proc/self/fd/{file}").readlink()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(file, data)

        monkeypatch.setattr(os, "write", full)
        base_server.assert_refused(register(base_server), 507, None)
        monkeypatch.undo()
        assert registered(base_server) == ["before"]
        assert register(base_server).status_code == 201

    @pytest.mark.parametrize("method", ["GET", "DELETE"])
    def test_other_checkpoints_have_no_registry(self, server, method):
        error = server.assert_refused(server.client.request(method, f"{ROUTE}/anna"), 400, "voice")
        assert "1.7B-Base" in error["message"]

    def test_other_checkpoints_register_nothing(self, server):
        error = server.assert_refused(register(server), 400, "audio")
        assert "1.7B-Base" in error["message"]
        assert "anna" not in registered(server)
