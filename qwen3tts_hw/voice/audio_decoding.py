"""Opening audio files of any supported format as blocks of float samples, without decoding more than is asked for.

libsndfile (by soundfile) reads the usual formats; MP4, WebM and AAC need PyAV, which is optional. Which of them, and
which of FFmpeg's readers, is decided by the first bytes: FFmpeg's own guess could be led to playlists that name other
files or hosts. Limits are the caller's affair.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

from qwen3tts_hw.errors import RequestError

FIELD = "ref_audio"
BLOCK_FRAMES = 65_536
_SOUNDFILE_FORMATS = "WAV, FLAC, OGG, MP3, AIFF, AU, CAF"
_CONTAINER_FORMATS = "MP4/M4A, WebM, AAC"
# What files of common other kinds begin with, so that the answer can say what was sent.
_OTHER_KINDS = {b"PK\x03\x04": "a ZIP file", b"\x89PNG": "a PNG image", b"%PDF": "a PDF file", b"<": "HTML or XML"}
_UNKNOWN_LENGTH = 1 << 36  # FLAC cannot state more; libsndfile reports 2**63 - 1 where nothing is stated


@dataclass(frozen=True, slots=True)
class AudioStream:
    """An open audio file. ``frames`` is what it declares, None if nothing; ``blocks`` are ``[n, channels] float32``."""

    format_name: str
    rate_hz: int
    channels: int
    frames: int | None
    blocks: Iterator[NDArray[np.float32]]


@contextmanager
def open_audio(data: bytes) -> Iterator[AudioStream]:
    """Open the bytes of an audio file; raise RequestError if they are not one, also from its blocks."""
    reader = _container_reader(data)
    if reader is None and not _known_to_soundfile(data):
        kind = next((name for start, name in _OTHER_KINDS.items() if data.startswith(start)), None)
        found = f"looks like {kind}" if kind else f"begins with {data[:8]!r}"
        raise RequestError(
            FIELD,
            f"the reference audio {found}, which is no known audio format; supported: {_SOUNDFILE_FORMATS}, and "
            f"{_CONTAINER_FORMATS} where PyAV is installed",
        )
    with _open_soundfile(data) if reader is None else _open_container(data, reader) as stream:
        yield stream


def _known_to_soundfile(data: bytes) -> bool:
    mpeg_layers = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0 and data[1] & 0x06
    return bool(mpeg_layers) or data.startswith(
        (b"RIFF", b"RF64", b"riff", b"fLaC", b"OggS", b"ID3", b"FORM", b".snd", b"caff")
    )


def _container_reader(data: bytes) -> str | None:
    """FFmpeg's name of the reader for data that libsndfile does not know."""
    if data[4:8] == b"ftyp":
        return "mp4"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xF6 == 0xF0:  # ADTS: layer bits are zero
        return "aac"
    return None


@contextmanager
def _open_soundfile(data: bytes) -> Iterator[AudioStream]:
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            frames = None if file.frames >= _UNKNOWN_LENGTH - 1 else int(file.frames)
            if frames is None:
                # Its end could be found only by running into an error that a damaged file would give, too.
                raise RequestError(
                    FIELD,
                    f"the {file.format} header does not say how long the reference audio is; encode it again from a "
                    "file, or send WAV",
                )
            yield AudioStream(file.format, file.samplerate, file.channels, frames, _soundfile_blocks(file))
    except soundfile.SoundFileError as error:
        raise RequestError(FIELD, f"the reference audio is damaged or cut short: {_sentence(error)}") from error


def _soundfile_blocks(file: soundfile.SoundFile) -> Iterator[NDArray[np.float32]]:
    while len(block := file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)):
        yield block


def _sentence(error: Exception) -> str:
    """The library's words, without the address of the buffer that it names as the file."""
    return str(error).rpartition(">: ")[2].removeprefix("Error : ").rstrip(".")


@contextmanager
def _open_container(data: bytes, reader: str) -> Iterator[AudioStream]:
    try:
        import av
    except ImportError:
        raise RequestError(
            FIELD,
            f"the reference audio is {_CONTAINER_FORMATS}, for which this server lacks PyAV (pip install av); "
            f"supported without: {_SOUNDFILE_FORMATS}",
        ) from None
    try:
        options = {"protocol_whitelist": "pipe"}
        with av.open(io.BytesIO(data), format=reader, options=options, metadata_errors="ignore") as container:
            if not container.streams.audio:
                raise RequestError(FIELD, "the reference audio is a file without an audio track")
            track = container.streams.audio[0]
            # Bare AAC has no header to declare anything; what the library reports is a guess from the bit rate.
            declared = reader != "aac" and track.duration is not None and track.time_base is not None
            frames = int(track.duration * track.time_base * track.rate) if declared else None
            blocks = _container_blocks(av, container, track)
            yield AudioStream(container.format.name, track.rate, track.channels, frames, blocks)
    except av.FFmpegError as error:
        raise RequestError(FIELD, f"the reference audio is damaged or cut short: {error.strerror}") from error


def _container_blocks(av: Any, container: Any, track: Any) -> Iterator[NDArray[np.float32]]:
    planar = av.AudioResampler(format="fltp")  # changes the number format alone
    for frame in container.decode(track):
        try:
            converted = planar.resample(frame)
        except ValueError as error:
            raise RequestError(FIELD, f"the format of the reference audio changes on the way: {error}") from error
        yield from (np.ascontiguousarray(part.to_ndarray().T) for part in converted)
