"""What a client makes of an answer: codes, samples and outcome of one request, read from its events.

Shared by all plugin tests; knows the wire format only.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from qwen3tts_hw.types import NUM_CODEBOOKS


class SpeechFailedError(Exception):
    """The answer was an error, or broke off before its end."""


@dataclass(frozen=True)
class Speech:
    """A complete answer: ``codes [T, 16] int64``, ``pcm [T*1920] int16``, and how it ended."""

    request_id: str
    codes: NDArray[np.int64]
    pcm: NDArray[np.int16]
    finish_reason: str
    seed: int
    chunks: int


def read_events(response: httpx.Response) -> Speech:
    """Read an event stream to its end."""
    if response.status_code != 200:
        raise SpeechFailedError(f"status {response.status_code}: {response.read().decode(errors='replace')}")
    pcm: list[bytes] = []
    done: dict[str, Any] | None = None
    for line in response.iter_lines():
        if not line:
            continue
        event = json.loads(line.removeprefix("data: "))
        if event["type"] == "speech.audio.delta":
            pcm.append(base64.b64decode(event["audio"]))
        elif event["type"] == "speech.audio.done":
            done = event
        else:
            raise SpeechFailedError(f"event: {event}")
    if done is None:
        raise SpeechFailedError(f"no last event after {len(pcm)} chunks")
    codes = np.asarray(done.get("codes", []), dtype=np.int64).reshape(-1, NUM_CODEBOOKS)
    return Speech(
        request_id=done["id"],
        codes=codes,
        pcm=np.frombuffer(b"".join(pcm), dtype="<i2"),
        finish_reason=done["finish_reason"],
        seed=done["seed"],
        chunks=len(pcm),
    )


def assert_equal_codes(found: NDArray[np.int64], expected: NDArray[np.int64], name: str = "") -> None:
    """Fail naming the first frame and codebook that differ; everything after it differs as a consequence."""
    frames = min(len(found), len(expected))
    for frame, codebook in np.argwhere(found[:frames] != expected[:frames])[:1]:
        raise AssertionError(
            f"{name} codes differ first at frame {frame}, codebook {codebook}: "
            f"{found[frame, codebook]} instead of {expected[frame, codebook]}"
        )
    assert found.shape == expected.shape, name
