"""What a listener would hear of a streamed answer: samples counted as they arrive, and play-out simulated over them.

Play-out starts at first audio and consumes samples in real time; when the next ones come after the buffer ran dry,
there is a gap, and everything after it is late by as much.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

FIRST_AUDIO_S = 0.02
_BYTES_PER_SAMPLE = 2
_LONGEST_HEADER_BYTES = 65_536


class AudioMeter:
    """Counts 16-bit mono samples in a body fed in arbitrary pieces; a WAV header is taken off and its rate believed."""

    def __init__(self, audio_format: str, sample_rate_hz: int) -> None:
        self.sample_rate_hz = sample_rate_hz
        self._header: bytearray | None = bytearray() if audio_format == "wav" else None
        self._audio_bytes = 0

    @property
    def samples(self) -> int:
        """Whole samples so far."""
        return self._audio_bytes // _BYTES_PER_SAMPLE

    def feed(self, part: bytes) -> None:
        """Count the next bytes; raise ValueError if they are no WAV file of 16-bit mono PCM."""
        if self._header is None:
            self._audio_bytes += len(part)
            return
        self._header += part
        start = self._data_start(self._header)
        if start is not None:
            self._audio_bytes = len(self._header) - start
            self._header = None
        elif len(self._header) > _LONGEST_HEADER_BYTES:
            raise ValueError(f"no WAV data chunk in the first {_LONGEST_HEADER_BYTES} bytes")

    def _data_start(self, head: bytearray) -> int | None:
        """Return where the samples begin, None while the header is not complete."""
        if len(head) < 12:
            return None
        if head[:4] != b"RIFF" or head[8:12] != b"WAVE":
            raise ValueError(f"not a WAV file: it begins with {bytes(head[:12])!r}")
        at = 12
        while at + 8 <= len(head):
            name, size = struct.unpack_from("<4sI", head, at)
            if name == b"data":
                return at + 8
            if name == b"fmt " and at + 24 <= len(head):
                self._read_format(head, at + 8)
            at += 8 + size + size % 2
        return None

    def _read_format(self, head: bytearray, at: int) -> None:
        _, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", head, at)
        if (channels, bits) != (1, 16):
            raise ValueError(f"{channels} channels of {bits} bits; 1 of 16 was expected")
        self.sample_rate_hz = rate


def time_to_first_audio(arrivals: Sequence[tuple[float, int]], sample_rate_hz: int) -> float:
    """Return when 20 ms of audio were there, or all of it if it is shorter.

    ``arrivals`` are (seconds, samples so far), in order and not empty.
    """
    return arrivals[_first_audio_index(arrivals, sample_rate_hz)][0]


def gaps_s(arrivals: Sequence[tuple[float, int]], sample_rate_hz: int) -> list[float]:
    """Return the gaps of a play-out that starts at first audio, in seconds, in order."""
    first = _first_audio_index(arrivals, sample_rate_hz)
    start_s, played = arrivals[first]
    dry_at_s = start_s + played / sample_rate_hz
    gaps = []
    for now_s, samples in arrivals[first + 1 :]:
        if samples == played:
            continue
        if now_s > dry_at_s:
            gaps.append(now_s - dry_at_s)
            dry_at_s = now_s
        dry_at_s += (samples - played) / sample_rate_hz
        played = samples
    return gaps


def largest_gap_s(arrivals: Sequence[tuple[float, int]], sample_rate_hz: int) -> float:
    """Return the longest gap of the play-out in seconds, 0.0 if there is none."""
    return max(gaps_s(arrivals, sample_rate_hz), default=0.0)


def _first_audio_index(arrivals: Sequence[tuple[float, int]], sample_rate_hz: int) -> int:
    wanted = round(FIRST_AUDIO_S * sample_rate_hz)
    return next((index for index, (_, samples) in enumerate(arrivals) if samples >= wanted), len(arrivals) - 1)
