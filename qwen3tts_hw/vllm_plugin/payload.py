"""How a request travels from the API server to the worker: plain integers and bytes in ``SamplingParams.extra_args``.

Stock routes let clients pass only scalars and flat lists as extra arguments, so this nested form with raw bytes can
come only from :func:`pack`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen3tts_hw.engine.state import Admission
from qwen3tts_hw.prompt.layout import PromptLayout
from qwen3tts_hw.types import SamplingSpec

EXTRA_ARGS_KEY = "qwen3tts"
KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where a request's audio goes: the hub's address and the stream's secret key."""

    address: str
    key: bytes


def pack(
    layout: PromptLayout, sampling: SamplingSpec, max_frames: int, ticket: Ticket, *, codes: bool
) -> dict[str, Any]:
    """The extra argument of one request; everything in it survives msgpack and pickle."""
    return {
        "text": np.asarray(layout.text_ids, dtype=np.int32).tobytes(),
        "codec": np.asarray(layout.codec_ids, dtype=np.int32).tobytes(),
        "trailing": np.asarray(layout.trailing_text_ids, dtype=np.int32).tobytes(),
        "pad": layout.pad_text_id,
        "sampling": dataclasses.asdict(sampling),
        "max_frames": max_frames,
        "codes": codes,
        "key": ticket.key,
        "address": ticket.address,
    }


def unpack(extra_args: dict[str, Any] | None) -> tuple[Admission, Ticket, bool] | None:
    """The inverse of :func:`pack`; None for a request that carries no speech payload of ours."""
    value = (extra_args or {}).get(EXTRA_ARGS_KEY)
    if not isinstance(value, dict) or not isinstance(value.get("key"), bytes) or len(value["key"]) != KEY_BYTES:
        return None
    layout = PromptLayout(
        text_ids=_integers(value["text"]),
        codec_ids=_integers(value["codec"]),
        trailing_text_ids=_integers(value["trailing"]),
        pad_text_id=int(value["pad"]),
    )
    admission = Admission(layout, SamplingSpec(**value["sampling"]), int(value["max_frames"]))
    return admission, Ticket(str(value["address"]), value["key"]), bool(value["codes"])


def _integers(raw: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(raw, dtype=np.int32).tolist())
