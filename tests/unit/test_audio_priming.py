"""A stream that continues reference audio: the codec hears it first, in bounded parts, and plays none of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qwen3tts_hw.checkpoint.reader import open_checkpoint
from qwen3tts_hw.codec.decoder import CodecDecoder
from qwen3tts_hw.codec.pcm import to_pcm16
from qwen3tts_hw.engine import audio
from qwen3tts_hw.engine.codec_steps import CodecSteps
from qwen3tts_hw.types import SAMPLES_PER_FRAME
from tests.unit.test_audio_pump import DEADLINE_S, SLOTS, Engine, assert_whole


@pytest.fixture
def engine():
    made = Engine(steady=4)
    yield made
    made.pump.shut_down(DEADLINE_S)


def fed(engine, slot):
    """Frames that the decoder was given for a slot, call by call."""
    return [frames for slots, frames in engine.decoder.calls if slots == [slot]]


def test_the_reference_is_heard_before_the_first_frame_and_not_played(engine):
    engine.open(1, prompt=30, reference=21)
    assert fed(engine, 1) == [8, 8, 5]
    for _ in range(3):
        engine.step(1)
    engine.pump.close(1)
    assert fed(engine, 1) == [8, 8, 5, 1, 2]
    assert_whole(engine.finish()["r1"], engine.codes(1, 3))


def test_a_stream_without_reference_is_not_primed(engine):
    engine.open(0)
    assert engine.decoder.calls == []


def test_a_long_reference_is_spread_over_steps(engine, monkeypatch):
    monkeypatch.setattr(audio, "PRIMED_FRAMES_PER_STEP", 16)
    engine.open(0)
    engine.open(1, prompt=60, reference=40)
    assert fed(engine, 1) == [8, 8]
    engine.step(0, 1)
    engine.step(0, 1)
    assert fed(engine, 1)[:5] == [8, 8, 8, 8, 8]
    assert sum(fed(engine, 0)) >= 1, "the other stream's audio must not wait for it"
    for _ in range(4):
        engine.step(0, 1)
    for slot in (0, 1):
        engine.pump.close(slot)
    found = engine.finish()
    for slot in (0, 1):
        assert_whole(found[f"r{slot}"], engine.codes(slot, 6))


def test_the_end_waits_for_the_reference(engine, monkeypatch):
    monkeypatch.setattr(audio, "PRIMED_FRAMES_PER_STEP", 8)
    engine.open(2, prompt=60, reference=40)
    engine.step(2)
    engine.pump.close(2)
    assert fed(engine, 2) == [8, 8, 8, 8, 8, 1]
    assert_whole(engine.finish()["r2"], engine.codes(2, 1))


def test_a_stream_that_nobody_hears_is_primed_no_further(engine, monkeypatch):
    monkeypatch.setattr(audio, "PRIMED_FRAMES_PER_STEP", 8)
    engine.open(2, prompt=60, reference=40)
    engine.pump.close(2, send=False)
    engine.open(3)
    engine.step(3)
    assert fed(engine, 2) == [8]


def test_streams_with_references_share_the_steps_budget(engine, monkeypatch):
    monkeypatch.setattr(audio, "PRIMED_FRAMES_PER_STEP", 8)
    for slot in range(3):
        engine.open(slot, prompt=40, reference=16)
    lengths = (0, 1, 2)
    for _ in range(12):
        engine.step(*lengths)
    for slot in lengths:
        engine.pump.close(slot)
    found = engine.finish()
    for slot in lengths:
        assert_whole(found[f"r{slot}"], engine.codes(slot, 12))


def test_the_speech_continues_the_reference_exactly(tiny_checkpoint):
    checkpoint = open_checkpoint(tiny_checkpoint())
    decoder = CodecDecoder(checkpoint.config.codec, "cpu", torch.float32)
    decoder.load_weights(checkpoint.iter_codec())
    engine = Engine(steady=4, decoder=CodecSteps(decoder, SLOTS + 1))
    engine.open(0, prompt=25, reference=19)
    engine.open(1)
    for _ in range(7):
        engine.step(0, 1)
    for slot in (0, 1):
        engine.pump.close(slot)
    found = engine.finish()
    for slot, first, frames in ((0, 6, 26), (1, 6, 7)):
        whole = to_pcm16(decoder.decode(engine.table.codes[slot, first : first + frames].long().T[None]))[0].numpy()
        samples = np.frombuffer(b"".join(packet.pcm for packet in found[f"r{slot}"]), np.int16)
        assert len(samples) == 7 * SAMPLES_PER_FRAME
        assert np.abs(samples.astype(int) - whole[-len(samples) :].astype(int)).max() <= 1
