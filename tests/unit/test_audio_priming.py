"""A stream that continues reference audio: the codec hears it first, in bounded parts, and plays none of it.

What it has heard lately it need not hear again: the state behind it is copied.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qwen3tts_hw.checkpoint.reader import open_checkpoint
from qwen3tts_hw.codec.decoder import CodecDecoder
from qwen3tts_hw.codec.pcm import to_pcm16
from qwen3tts_hw.engine import audio
from qwen3tts_hw.engine.codec_steps import CodecSteps
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS, SAMPLES_PER_FRAME
from tests.unit.test_audio_pump import DEADLINE_S, POSITIONS, SLOTS, Engine, FakeDecoder, assert_whole


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


# Streams of a voice that the codec has heard before.


@pytest.fixture
def keeping():
    """Return a function to an engine whose decoder keeps so many states."""
    made = []

    def build(snapshots=2, decoder=None):
        made.append(Engine(steady=4, decoder=decoder or FakeDecoder(snapshots)))
        return made[-1]

    yield build
    for engine in made:
        engine.pump.shut_down(DEADLINE_S)


def voice(number, frames):
    """Codes ``[frames, 16]`` of a reference."""
    made = torch.randint(0, CODEBOOK_SIZE, (frames, NUM_CODEBOOKS), generator=torch.Generator().manual_seed(number))
    return made.to(torch.int16)


def open_with(engine, slot, codes, *, prompt=60, name=None):
    """Start a stream in the slot whose prompt ends with these codes."""
    engine.table.codes[slot, prompt - len(codes) : prompt] = codes
    engine.open(slot, prompt=prompt, reference=len(codes), name=name)


def close_all(engine, *slots):
    for slot in slots:
        engine.pump.close(slot)


def test_a_reference_is_heard_once(keeping):
    engine = keeping()
    open_with(engine, 1, voice(1, 21))
    open_with(engine, 3, voice(1, 21), prompt=40)  # in the same step
    for _ in range(3):
        engine.step(1, 3)
    close_all(engine, 1)
    open_with(engine, 1, voice(1, 21), name="again")  # where another stream has been
    assert engine.decoder.frames[1] == 21
    engine.step(1)
    close_all(engine, 1, 3)
    assert [frames for slots, frames in engine.decoder.calls if frames > 4 or slots == [3]] == [8, 8, 5]
    assert engine.pump.references == {"primed": 1, "restored": 2, "kept": 1}
    found = engine.finish()
    assert_whole(found["r3"], engine.codes(3, 3))
    assert_whole(found["again"], engine.codes(1, 1))


def test_the_least_recently_used_makes_room(keeping):
    engine = keeping(snapshots=2)
    for number, primed in ((1, 1), (2, 2), (1, 2), (3, 3), (1, 3), (2, 4), (1, 4), (3, 5)):
        open_with(engine, 0, voice(number, 16))
        assert engine.decoder.frames[0] == 16
        assert engine.pump.references["primed"] == primed, f"voice {number}"
        engine.pump.close(0, send=False)
    assert engine.pump.references["kept"] == 2


def test_without_room_every_stream_hears_its_own(keeping):
    engine = keeping(snapshots=0)
    for slot in (0, 1):
        open_with(engine, slot, voice(1, 8))
    assert engine.decoder.calls == [([0], 8), ([1], 8)]
    assert engine.pump.references == {"primed": 2, "restored": 0, "kept": 0}


def test_a_second_stream_of_a_voice_waits_for_the_first(keeping, monkeypatch):
    monkeypatch.setattr(audio, "PRIMED_FRAMES_PER_STEP", 16)
    engine = keeping()
    open_with(engine, 0, voice(1, 40))
    open_with(engine, 1, voice(1, 40))
    assert engine.decoder.frames == {0: 32, 1: 0}
    for _ in range(2):
        engine.step(0, 1)
    assert fed(engine, 0) == [8, 8, 8, 8, 8] and fed(engine, 1) == []
    close_all(engine, 0, 1)
    found = engine.finish()
    for slot in (0, 1):
        assert_whole(found[f"r{slot}"], engine.codes(slot, 2))


def test_a_known_voice_does_not_wait_for_an_unknown_one(keeping, monkeypatch):
    engine = keeping()
    open_with(engine, 0, voice(1, 40))
    engine.pump.close(0, send=False)
    monkeypatch.setattr(audio, "PRIMED_FRAMES_PER_STEP", 8)
    open_with(engine, 1, voice(2, 40))
    open_with(engine, 0, voice(1, 40))
    engine.step(0, 1)
    assert engine.decoder.frames == {0: 41, 1: 24}


def test_what_was_heard_in_part_is_not_kept(keeping, monkeypatch):
    monkeypatch.setattr(audio, "PRIMED_FRAMES_PER_STEP", 8)
    engine = keeping()
    open_with(engine, 0, voice(1, 24))
    open_with(engine, 1, voice(1, 24))
    engine.pump.close(0, send=False)
    assert engine.pump.references == {"primed": 0, "restored": 0, "kept": 0}
    for _ in range(3):
        engine.step(1)
    engine.pump.close(1)
    assert fed(engine, 1)[:3] == [8, 8, 8]
    assert_whole(engine.finish()["r1"], engine.codes(1, 3))


def test_other_weights_hear_anew(keeping):
    engine = keeping()
    open_with(engine, 0, voice(1, 8))
    engine.decoder.weights += 1
    open_with(engine, 1, voice(1, 8))
    assert engine.pump.references == {"primed": 2, "restored": 0, "kept": 2}


class Listener(FakeDecoder):
    """A decoder whose samples depend on all that a slot has heard and on how it was told: call by call."""

    def reset(self, slots):
        for slot in slots.tolist():
            self.frames[slot] = 1

    def decode(self, codes, slots):
        for row, slot in enumerate(slots.tolist()):
            self.frames[slot] = hash((self.frames[slot], codes[row].numpy().tobytes()))
        heard = torch.tensor([self.frames[slot] % 30_000 for slot in slots.tolist()], dtype=torch.int16)
        return heard[:, None].expand(-1, codes.shape[2] * SAMPLES_PER_FRAME)


def test_streams_that_come_and_go_at_random_are_as_if_primed(keeping, monkeypatch):
    monkeypatch.setattr(audio, "PRIMED_FRAMES_PER_STEP", 24)
    engines = [keeping(decoder=Listener(snapshots)) for snapshots in (2, 0)]
    engines[1].table.codes.copy_(engines[0].table.codes)
    rng = np.random.default_rng(3)
    voices = [voice(number, int(frames)) for number, frames in enumerate(rng.integers(5, 50, 4))]
    opened, left = 0, {}
    while opened < 60 or left:
        free = [slot for slot in range(SLOTS) if slot not in left]
        if free and opened < 60 and rng.random() < 0.7:
            choice, slot = int(rng.integers(len(voices))), free[0]
            for engine in engines:
                open_with(engine, slot, voices[choice], prompt=POSITIONS - 12, name=str(opened))
            left[slot] = int(rng.integers(0, 12))
            opened += 1
        for slot in [slot for slot, frames in left.items() if not frames or rng.random() < 0.02]:
            heard = bool(rng.random() < 0.9)
            for engine in engines:
                engine.pump.close(slot, send=heard)
            del left[slot]
        if left:
            for engine in engines:
                engine.step(*left)
        left = {slot: frames - 1 for slot, frames in left.items()}
    counts = engines[0].pump.references
    assert counts["restored"] > 10 and counts["primed"] > 10, counts
    found, expected = ({name: samples_of(packets) for name, packets in engine.finish().items()} for engine in engines)
    assert found == expected


def samples_of(packets):
    """What a stream says, without its cut into chunks."""
    return b"".join(packet.pcm for packet in packets)


@pytest.mark.parametrize("frames", [5, 16, 43])
def test_a_copied_state_says_exactly_the_same(tiny_checkpoint, keeping, frames):
    checkpoint = open_checkpoint(tiny_checkpoint())
    decoder = CodecDecoder(checkpoint.config.codec, "cpu", torch.float32)
    decoder.load_weights(checkpoint.iter_codec())
    engine = keeping(decoder=CodecSteps(decoder, SLOTS + 1, snapshots=1))
    engine.table.codes[:, 60:] = engine.table.codes[0, 60:].clone()
    open_with(engine, 4, voice(9, 30))  # something that the copy must take the place of
    engine.pump.close(4, send=False)
    for turn, slot in enumerate((0, 4, 0)):
        open_with(engine, slot, voice(1, frames), name=str(turn))
        for _ in range(7):
            engine.step(slot)
        engine.pump.close(slot)
    assert engine.pump.references == {"primed": 2, "restored": 2, "kept": 1}
    said = [samples_of(packets) for packets in engine.finish().values()]
    assert len(said) == 3 and len(said[0]) == 2 * 7 * SAMPLES_PER_FRAME
    assert said[0] == said[1] == said[2]
