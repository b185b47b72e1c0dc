"""What travels with a request: the inverse of packing, in every form that an engine's processes pass it on."""

from __future__ import annotations

import dataclasses

import pytest

from qwen3tts_hw.engine.state import Admission
from qwen3tts_hw.errors import CapacityError, RequestError
from qwen3tts_hw.prompt.layout import PromptLayout
from qwen3tts_hw.types import ClonedVoice, EncodedVoice, SamplingSpec
from qwen3tts_hw.vllm_plugin.payload import (
    EXTRA_ARGS_KEY,
    KEY_BYTES,
    Ticket,
    pack,
    pack_encoding,
    unpack,
    unpack_encoding,
)

LAYOUT = PromptLayout((151_644, 5, 6, 9), (-1, -1, 2155, 2149), (7, 8, 151_673), 9)
SAMPLING = SamplingSpec(temperature=0.35, top_k=7, residual_top_p=0.123, repetition_penalty=1.07, seed=2**63 - 1)
TICKET = Ticket("tcp://127.0.0.1:5", bytes(range(KEY_BYTES)))


def packed(codes=False):
    return pack(Admission(LAYOUT, SAMPLING, 77), TICKET, codes=codes)


@pytest.mark.parametrize("codes", [False, True])
def test_unpacking_is_the_inverse(codes):
    assert unpack({EXTRA_ARGS_KEY: packed(codes)}) == (Admission(LAYOUT, SAMPLING, 77), TICKET, codes)


def test_it_survives_msgpack():
    msgpack = pytest.importorskip("msgspec.msgpack", reason="msgspec comes with vLLM, which is not installed")
    assert unpack({EXTRA_ARGS_KEY: msgpack.decode(msgpack.encode(packed()))}) == unpack({EXTRA_ARGS_KEY: packed()})


def test_empty_sides():
    layout = PromptLayout((1,), (-1,), (), 0)
    assert unpack({EXTRA_ARGS_KEY: pack(Admission(layout, SAMPLING, 1), TICKET, codes=False)})[0].layout == layout


@pytest.mark.parametrize(
    "foreign",
    [
        None,
        {},
        {"other": packed()},
        {EXTRA_ARGS_KEY: None},
        {EXTRA_ARGS_KEY: "text"},
        {EXTRA_ARGS_KEY: [1, 2]},
        {EXTRA_ARGS_KEY: {}},
        {EXTRA_ARGS_KEY: {**packed(), "key": "a string, as JSON would bring"}},
        {EXTRA_ARGS_KEY: {**packed(), "key": b"short"}},
        {EXTRA_ARGS_KEY: {**packed(), "key": list(TICKET.key)}},
    ],
)
def test_what_others_put_there_is_no_payload(foreign):
    assert unpack(foreign) is None


class TestClonedVoices:
    VOICE = ClonedVoice(bytes(range(16)), "", bytes(range(64)))
    CLONED = dataclasses.replace(LAYOUT, speaker_row=1, reference_start=2, reference_frames=2)

    @pytest.mark.parametrize(
        ("layout", "voice"),
        [(CLONED, VOICE), (dataclasses.replace(LAYOUT, speaker_row=1), ClonedVoice(bytes(16)))],
        ids=["reference", "embedding"],
    )
    def test_unpacking_is_the_inverse(self, layout, voice):
        admission = Admission(layout, SAMPLING, 77, voice)
        assert unpack({EXTRA_ARGS_KEY: pack(admission, TICKET, codes=False)}) == (admission, TICKET, False)

    @pytest.mark.parametrize("voice", [EncodedVoice(bytes(range(16)), bytes(range(64))), EncodedVoice(b"\x01" * 8)])
    def test_encodings(self, voice):
        assert unpack_encoding(pack_encoding(voice)) == voice

    @pytest.mark.parametrize("error", [CapacityError("later"), RuntimeError("out of memory:\n3 GiB")], ids=repr)
    def test_failures_of_encoding(self, error):
        with pytest.raises(type(error)) as caught:
            unpack_encoding(pack_encoding(error))
        assert str(caught.value) == str(error)

    def test_errors_of_encoding(self):
        with pytest.raises(RequestError) as caught:
            unpack_encoding(pack_encoding(RequestError("ref_audio", "Zu kurz:\n80 ms")))
        assert (caught.value.field, caught.value.message) == ("ref_audio", "Zu kurz:\n80 ms")
