"""Registered voices on disk, shared by all processes that serve from one folder.

``objects/<sha256>.safetensors`` holds one voice each, named by its content; ``index.json`` says which names exist and
is the only truth. Both are written beside their place, flushed and renamed, objects first, so that a crash at any
moment leaves the old or the new state. Writers take a file lock; readers take none and notice changes by the index's
time stamp. Knows no routes and no models.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qwen3tts_hw.errors import RequestError, StorageError, UnknownVoiceError, VoiceExistsError
from qwen3tts_hw.settings import Settings, voices_folder
from qwen3tts_hw.types import SAMPLE_RATE_HZ, ClonedVoice, EncodedVoice
from qwen3tts_hw.voice.voice_file import StoredVoice, check_name, from_bytes, to_bytes, to_pcm

INDEX, OBJECTS, LOCK = "index.json", "objects", ".lock"
INDEX_VERSION = 1
TEMPORARY = ".new"
VOICES_IN_MEMORY = 1_024
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class VoiceRecord:
    """What the index says of a voice; ``digest`` names its object."""

    name: str
    digest: str
    size_bytes: int
    created: str
    consent: bool
    reference_text: str
    reference_frames: int
    seconds: float
    width: int
    fingerprint: str
    has_audio: bool


class VoiceRegistry:
    """The voices of one folder, as a checkpoint with this embedding ``width`` and ``fingerprint`` may use them."""

    def __init__(self, folder: Path, settings: Settings, *, width: int, fingerprint: str, reserved: Collection[str]):
        self.folder, self.width, self.fingerprint = folder, width, fingerprint
        self._settings, self._reserved = settings, frozenset(reserved)
        self._known: dict[str, VoiceRecord] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._loaded: OrderedDict[str, ClonedVoice] = OrderedDict()

    @classmethod
    def from_settings(
        cls, settings: Settings, *, width: int, fingerprint: str, reserved: Collection[str] = ()
    ) -> VoiceRegistry:
        """The registry in the folder that the settings name."""
        return cls(Path(voices_folder(settings)), settings, width=width, fingerprint=fingerprint, reserved=reserved)

    def records(self) -> tuple[VoiceRecord, ...]:
        """Every registered voice by name, also those of other checkpoints."""
        voices = self._index()
        return tuple(voices[name] for name in sorted(voices))

    def usable(self, record: VoiceRecord) -> bool:
        """Whether a voice was made with this checkpoint's speaker encoder."""
        return (record.width, record.fingerprint) == (self.width, self.fingerprint)

    def get(self, name: str) -> VoiceRecord:
        """The record of a name; raise UnknownVoiceError."""
        wanted = name.strip().lower()
        voices = self._index()
        if wanted not in voices:
            raise UnknownVoiceError("voice", f"unknown voice {name[:64]!r}; registered: {_listed(voices)}")
        return voices[wanted]

    def load(self, name: str) -> ClonedVoice:
        """A voice to speak with. Raises UnknownVoiceError, RequestError for another checkpoint's, StorageError."""
        record = self.get(name)
        if not self.usable(record):
            raise RequestError(
                "voice",
                f"the voice {record.name!r} was registered with another checkpoint (embedding of {record.width}, this "
                f"one has {self.width}); register it again for this one",
            )
        voice = self._loaded.get(record.digest)
        if voice is None:
            voice = from_bytes(self._read(record)).voice
            self._loaded[record.digest] = voice
            while len(self._loaded) > VOICES_IN_MEMORY:
                self._loaded.popitem(last=False)
        return voice

    def export(self, name: str) -> bytes:
        """A voice as one file that :meth:`import_file` takes."""
        return self._read(self.get(name))

    def check_new(self, name: object, *, overwrite: bool = False) -> str:
        """Return the name in its stored form if a voice of that name could be added now; else raise as ``add`` does."""
        checked = check_name(name, self._reserved)
        voices = self._index()
        self._check_room(voices, checked, 0, overwrite=overwrite)
        return checked

    def add(
        self,
        name: object,
        encoded: EncodedVoice,
        *,
        consent: bool,
        reference_text: str = "",
        samples: NDArray[np.float32],
        overwrite: bool = False,
    ) -> VoiceRecord:
        """Register an encoded recording; ``samples`` are kept only if the settings say so.

        Raises RequestError without consent or for a bad name, VoiceExistsError, StorageError.
        """
        voice = ClonedVoice(encoded.embedding, reference_text, encoded.codes if reference_text else b"")
        stored = StoredVoice(
            name=check_name(name, self._reserved),
            voice=voice,
            consent=consent,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            fingerprint=self.fingerprint,
            seconds=len(samples) / SAMPLE_RATE_HZ,
            audio=to_pcm(samples) if self._settings.voices_keep_audio else None,
        )
        return self._store(stored, overwrite=overwrite)

    def import_file(self, data: bytes, *, name: object = None, overwrite: bool = False) -> VoiceRecord:
        """Register an exported voice under its own or another name; raises as :meth:`add` does."""
        found = from_bytes(data)
        checked = check_name(found.name if name is None else name, self._reserved)
        stored = StoredVoice(
            name=checked,
            voice=found.voice,
            consent=found.consent,
            created=found.created,
            fingerprint=found.fingerprint,
            seconds=found.seconds,
            audio=found.audio if self._settings.voices_keep_audio else None,
        )
        if (len(found.voice.embedding) // 4, found.fingerprint) != (self.width, self.fingerprint):
            raise RequestError("file", "the voice was registered with another checkpoint; register it again from audio")
        return self._store(stored, overwrite=overwrite)

    def delete(self, name: str) -> VoiceRecord:
        """Forget a voice; requests that have loaded it go on. Raises UnknownVoiceError, StorageError."""
        with self._writing() as voices:
            record = self.get(name)
            self._write_index({key: value for key, value in voices.items() if key != record.name})
            self._sweep()
        return record

    def _store(self, stored: StoredVoice, *, overwrite: bool) -> VoiceRecord:
        if not stored.consent:
            raise RequestError("consent", "consent must be true: the speaker has to agree to the use of their voice")
        data = to_bytes(stored)
        record = VoiceRecord(
            name=stored.name,
            digest=hashlib.sha256(data).hexdigest(),
            size_bytes=len(data),
            created=stored.created,
            consent=stored.consent,
            reference_text=stored.voice.reference_text,
            reference_frames=stored.voice.reference_frames,
            seconds=round(stored.seconds, 3),
            width=len(stored.voice.embedding) // 4,
            fingerprint=stored.fingerprint,
            has_audio=stored.audio is not None,
        )
        with self._writing() as voices:
            self._check_room(voices, record.name, record.size_bytes, overwrite=overwrite)
            try:
                self._write(self._object(record.digest), data)
                self._write_index({**voices, record.name: record})
            finally:
                self._sweep()
        return record

    def _check_room(self, voices: Mapping[str, VoiceRecord], name: str, size: int, *, overwrite: bool) -> None:
        settings, others = self._settings, [record for record in voices.values() if record.name != name]
        if name in voices and not overwrite:
            raise VoiceExistsError("name", f"a voice named {name!r} exists; delete it, or set overwrite to replace it")
        if len(others) >= settings.voices_max_count:
            raise StorageError(
                f"{len(others)} voices are registered, which is the limit (setting voices_max_count); delete one first"
            )
        total = sum(record.size_bytes for record in others) + size
        if total > settings.voices_max_bytes:
            raise StorageError(
                f"with this voice {total} bytes would be stored; the limit is {settings.voices_max_bytes} (setting "
                "voices_max_bytes); delete a voice first"
            )

    def _index(self) -> dict[str, VoiceRecord]:
        """What the index says now; read again only if it has changed."""
        path = self.folder / INDEX
        with _storing(self.folder):
            try:
                status = path.stat()
            except FileNotFoundError:
                self._known, self._stamp = {}, None
                return self._known
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp != self._stamp:
                self._known, self._stamp = _parse_index(path.read_bytes(), path), stamp
        return self._known

    def _read(self, record: VoiceRecord) -> bytes:
        with _storing(self.folder):
            try:
                return self._object(record.digest).read_bytes()
            except FileNotFoundError:  # deleted or replaced since the index was read
                raise UnknownVoiceError("voice", f"the voice {record.name!r} has just been deleted") from None

    @contextmanager
    def _writing(self) -> Iterator[dict[str, VoiceRecord]]:
        """Hold the folder's lock; gives the voices as they are now. OSError becomes StorageError."""
        with _storing(self.folder):
            (self.folder / OBJECTS).mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield self._index()
            finally:
                os.close(lock)

    def _write_index(self, voices: Mapping[str, VoiceRecord]) -> None:
        entries = {name: asdict(record) for name, record in voices.items()}
        text = json.dumps({"version": INDEX_VERSION, "voices": entries}, ensure_ascii=False, indent=1)
        self._write(self.folder / INDEX, text.encode())

    def _write(self, path: Path, data: bytes) -> None:
        """Replace a file so that it has its old or its new content, whatever happens."""
        temporary = path.with_name(path.name + TEMPORARY)
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
            os.fsync(file)
        finally:
            os.close(file)
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _sweep(self) -> None:
        """Remove what no name stands for: objects of deleted voices, and what a crash has left. Needs the lock."""
        wanted = {f"{record.digest}.safetensors" for record in self._index().values()}
        for path in (self.folder / OBJECTS).iterdir():
            if path.name not in wanted:
                path.unlink(missing_ok=True)
        (self.folder / (INDEX + TEMPORARY)).unlink(missing_ok=True)

    def _object(self, digest: str) -> Path:
        return self.folder / OBJECTS / f"{digest}.safetensors"


@contextmanager
def _storing(folder: Path) -> Iterator[None]:
    """Turn failures of the file system into StorageError."""
    try:
        yield
    except OSError as error:
        why = "no space is left" if error.errno in _FULL else (error.strerror or str(error))
        raise StorageError(f"the voices in {folder} cannot be read or written: {why}") from error


def _parse_index(raw: bytes, path: Path) -> dict[str, VoiceRecord]:
    try:
        content = json.loads(raw)
        if content["version"] != INDEX_VERSION:
            raise StorageError(f"{path} has version {content['version']}; this release reads {INDEX_VERSION}")
        return {name: VoiceRecord(**entry) for name, entry in content["voices"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(f"{path} is damaged ({error}); restore it, or move the folder away") from None


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - 20} more" if len(shown) > 20 else ""
    return (", ".join(shown[:20]) + more) or "none"
