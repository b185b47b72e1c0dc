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
from qwen3tts_hw.errors import CapacityError, RequestError
from qwen3tts_hw.prompt.layout import PromptLayout
from qwen3tts_hw.types import ClonedVoice, EncodedVoice, SamplingSpec

EXTRA_ARGS_KEY = "qwen3tts"
KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where a request's audio goes: the hub's address and the stream's secret key."""

    address: str
    key: bytes


def pack(admission: Admission, ticket: Ticket, *, codes: bool) -> dict[str, Any]:
    """The extra argument of one request; everything in it survives msgpack and pickle."""
    layout, voice = admission.layout, admission.voice
    cloned = {
        "speaker_row": layout.speaker_row,
        "reference_start": layout.reference_start,
        "embedding": b"" if voice is None else voice.embedding,
        "reference": b"" if voice is None else voice.reference_codes,
    }
    return {
        "text": np.asarray(layout.text_ids, dtype=np.int32).tobytes(),
        "codec": np.asarray(layout.codec_ids, dtype=np.int32).tobytes(),
        "trailing": np.asarray(layout.trailing_text_ids, dtype=np.int32).tobytes(),
        "pad": layout.pad_text_id,
        "voice": None if voice is None else cloned,
        "sampling": dataclasses.asdict(admission.sampling),
        "max_frames": admission.max_frames,
        "codes": codes,
        "key": ticket.key,
        "address": ticket.address,
    }


def unpack(extra_args: dict[str, Any] | None) -> tuple[Admission, Ticket, bool] | None:
    """The inverse of :func:`pack`; None for a request that carries no speech payload of ours."""
    value = (extra_args or {}).get(EXTRA_ARGS_KEY)
    if not isinstance(value, dict) or not isinstance(value.get("key"), bytes) or len(value["key"]) != KEY_BYTES:
        return None
    cloned = value["voice"] or {}
    # The worker has no use for the reference's text: its ids are part of the layout.
    voice = ClonedVoice(cloned["embedding"], "", cloned["reference"]) if cloned else None
    layout = PromptLayout(
        text_ids=_integers(value["text"]),
        codec_ids=_integers(value["codec"]),
        trailing_text_ids=_integers(value["trailing"]),
        pad_text_id=int(value["pad"]),
        speaker_row=cloned.get("speaker_row"),
        reference_start=cloned.get("reference_start"),
        reference_frames=0 if voice is None else voice.reference_frames,
    )
    admission = Admission(layout, SamplingSpec(**value["sampling"]), int(value["max_frames"]), voice)
    return admission, Ticket(str(value["address"]), value["key"]), bool(value["codes"])


def _integers(raw: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(raw, dtype=np.int32).tolist())


def pack_encoding(voice: EncodedVoice | RequestError | CapacityError | RuntimeError) -> bytes:
    """A worker's answer to a recording: what it heard, or why not. Never empty."""
    if isinstance(voice, CapacityError | RuntimeError):
        return (b"\x02" if isinstance(voice, CapacityError) else b"\x03") + str(voice).encode()
    if isinstance(voice, RequestError):
        return b"\x01" + f"{voice.field}\n{voice.message}".encode()
    return b"\x00" + len(voice.embedding).to_bytes(4, "little") + voice.embedding + voice.codes


def unpack_encoding(answer: bytes) -> EncodedVoice:
    """The inverse of :func:`pack_encoding`; raises the error that was packed."""
    if answer[:1] == b"\x01":
        field, _, message = answer[1:].decode().partition("\n")
        raise RequestError(field, message)
    if answer[:1] in (b"\x02", b"\x03"):
        raise (CapacityError if answer[:1] == b"\x02" else RuntimeError)(answer[1:].decode())
    end = 5 + int.from_bytes(answer[1:5], "little")
    return EncodedVoice(answer[5:end], answer[end:])
