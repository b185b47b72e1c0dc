"""One registered voice as one safetensors file: what is written, and the careful reading of what strangers send.

The same bytes are stored, exported and imported. Knows no folders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors import numpy as stored_arrays

from qwen3tts_hw.errors import RequestError
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS, ClonedVoice

FORMAT, VERSION = "qwen3tts-voice", "1"
MAX_EMBEDDING_VALUE = 1e4
RESERVED_NAMES = frozenset(("auto", "clone", "default", "design", "export", "import", "none", "null", "voices"))
_NAME = re.compile(r"[a-z0-9_-]{1,64}")
_EMBEDDING, _CODES, _AUDIO = "speaker_embedding", "reference_codes", "audio"
_FULL_SCALE = 32_767
_HEADER_BYTES = 1_000_000
_DESCRIPTION = "voice"
_FIELD = "file"


@dataclass(frozen=True, slots=True, eq=False)
class StoredVoice:
    """A voice with what must be known of it; ``audio`` is 16-bit mono at 24 kHz, if it was kept.

    ``seconds`` is the length of the recording, ``fingerprint`` names the speaker encoder that heard it.
    """

    name: str
    voice: ClonedVoice
    consent: bool
    created: str
    fingerprint: str
    seconds: float
    audio: NDArray[np.int16] | None = None


def check_name(value: object, reserved: Collection[str] = ()) -> str:
    """Return a name for a voice in lower case; raise RequestError for one that is malformed or taken by the package."""
    name = value.strip().lower() if isinstance(value, str) else ""
    if not _NAME.fullmatch(name):
        raise RequestError("name", "name must be 1 to 64 characters of a-z, 0-9, _ and -")
    if name in RESERVED_NAMES or name in reserved:
        raise RequestError("name", f"the name {name!r} is reserved; choose another one")
    return name


def check_embedding(values: object, width: int) -> bytes:
    """Return a speaker embedding given as numbers, as float32 bytes; raise RequestError unless it fits the width."""
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise RequestError("speaker_embedding", "speaker_embedding must be a list of numbers") from None
    if numbers.shape != (width,):
        found = f"{len(numbers)} numbers" if numbers.ndim == 1 else "another shape"
        raise RequestError("speaker_embedding", f"speaker_embedding has {found}; this checkpoint needs {width} numbers")
    if not (np.abs(numbers) <= MAX_EMBEDDING_VALUE).all():  # does not hold for NaN
        raise RequestError(
            "speaker_embedding", f"speaker_embedding has numbers beyond {MAX_EMBEDDING_VALUE:g}, or that are no numbers"
        )
    return numbers.astype("<f4").tobytes()


def to_pcm(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    """Samples of [-1, 1] as 16-bit ones, for keeping."""
    return np.round(np.clip(samples, -1.0, 1.0) * _FULL_SCALE).astype(np.int16)


def to_bytes(stored: StoredVoice) -> bytes:
    """The voice as a file."""
    voice = stored.voice
    arrays: dict[str, NDArray[Any]] = {_EMBEDDING: np.frombuffer(voice.embedding, "<f4")}
    if voice.reference_codes:
        arrays[_CODES] = np.frombuffer(voice.reference_codes, "<i2").reshape(-1, NUM_CODEBOOKS)
    if stored.audio is not None:
        arrays[_AUDIO] = stored.audio
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "name": stored.name,
        "consent": "true" if stored.consent else "false",
        "created": stored.created,
        "fingerprint": stored.fingerprint,
        "seconds": f"{stored.seconds:.3f}",
        "reference_text": voice.reference_text,
    }
    # One entry, because safetensors writes several in any order: the same voice is to be the same bytes.
    return bytes(stored_arrays.save(arrays, {_DESCRIPTION: json.dumps(metadata, sort_keys=True)}))


def from_bytes(data: bytes) -> StoredVoice:
    """Read what :func:`to_bytes` wrote; raise RequestError for anything else."""
    metadata = _metadata(data)
    try:
        arrays = stored_arrays.load(data)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise RequestError(_FIELD, f"the voice file is damaged: {error}") from None
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        raise RequestError(_FIELD, f"the file is no voice of this server (format {FORMAT}, version {VERSION})")
    audio = arrays.get(_AUDIO)
    if audio is not None and (audio.dtype != np.int16 or audio.ndim != 1):
        raise RequestError(_FIELD, "the voice file's audio has an unexpected form")
    return StoredVoice(
        name=metadata.get("name", ""),
        voice=ClonedVoice(*_voice_parts(arrays, metadata.get("reference_text", ""))),
        consent=metadata.get("consent") == "true",
        created=metadata.get("created", ""),
        fingerprint=metadata.get("fingerprint", ""),
        seconds=_seconds(metadata.get("seconds", "")),
        audio=audio,
    )


def _voice_parts(arrays: Mapping[str, NDArray[Any]], text: str) -> tuple[bytes, str, bytes]:
    """Embedding, reference text and codes, each checked."""
    if unknown := sorted(arrays.keys() - {_EMBEDDING, _CODES, _AUDIO}):
        raise RequestError(_FIELD, f"the voice file holds unknown parts: {', '.join(unknown)[:200]}")
    embedding, codes = arrays.get(_EMBEDDING), arrays.get(_CODES)
    if embedding is None or embedding.dtype != np.float32 or embedding.ndim != 1:
        raise RequestError(_FIELD, "the voice file has no speaker embedding")
    if bool(text.strip()) != (codes is not None):
        raise RequestError(_FIELD, "the voice file has reference text or reference codes, but not both")
    checked = check_embedding(embedding, len(embedding))
    if codes is None:
        return checked, "", b""
    if codes.dtype != np.int16 or codes.ndim != 2 or codes.shape[1] != NUM_CODEBOOKS or not len(codes):
        raise RequestError(_FIELD, "the voice file's reference codes have an unexpected form")
    if codes.min() < 0 or codes.max() >= CODEBOOK_SIZE:
        raise RequestError(_FIELD, f"the voice file has reference codes outside 0..{CODEBOOK_SIZE - 1}")
    return checked, text, codes.astype("<i2").tobytes()


def _metadata(data: bytes) -> dict[str, str]:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= length <= min(len(data) - 8, _HEADER_BYTES):
        raise RequestError(_FIELD, "the file is no voice file, or it is cut short")
    try:
        header = json.loads(data[8 : 8 + length])
        described = header["__metadata__"][_DESCRIPTION] if isinstance(header, dict) else None
        found = json.loads(described) if isinstance(described, str) else None
    except (KeyError, TypeError):
        raise RequestError(_FIELD, "the file is no voice file: it has no description") from None
    except (ValueError, RecursionError):
        raise RequestError(_FIELD, "the voice file has a damaged header") from None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise RequestError(_FIELD, "the file is no voice file: it has no description")
    return found


def _seconds(text: str) -> float:
    try:
        return min(max(float(text), 0.0), 1e6)
    except ValueError:
        return 0.0
