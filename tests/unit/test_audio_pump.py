"""The audio pump: when chunks are cut, who shares a decode, what is sent last, and what happens when sending fails.

The fake decoder plays each frame's code 0 as a constant, and counts per slot like the real one, so a packet's samples
say which frames it holds. The last tests use the real codec of a tiny checkpoint.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from qwen3tts_hw.checkpoint.reader import open_checkpoint
from qwen3tts_hw.codec.decoder import CodecDecoder
from qwen3tts_hw.codec.pcm import to_pcm16
from qwen3tts_hw.engine.audio import AudioPump
from qwen3tts_hw.engine.codec_steps import CodecSteps
from qwen3tts_hw.engine.state import SlotTable
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS, SAMPLES_PER_FRAME
from tests.unit.tiny_model import BACKEND

SLOTS, POSITIONS = 5, 90
DEADLINE_S = 20.0


class FakeDecoder:
    """A streaming decoder that remembers how many frames each slot has had, and a number of snapshots of that."""

    weights = 1

    def __init__(self, snapshots=0):
        self.snapshots = snapshots
        self.frames = {}
        self.kept = {}
        self.calls = []

    def keep(self, slot, snapshot):
        assert snapshot < self.snapshots
        self.kept[snapshot] = self.frames[slot]

    def restore(self, snapshot, slot):
        self.frames[slot] = self.kept[snapshot]

    def reset(self, slots):
        for slot in slots.tolist():
            self.frames[slot] = 0

    def decode(self, codes, slots):
        self.calls.append((slots.tolist(), codes.shape[2]))
        for slot in slots.tolist():
            self.frames[slot] += codes.shape[2]
        return codes[:, 0].to(torch.int16).repeat_interleave(SAMPLES_PER_FRAME, dim=1)


class Engine:
    """The pump's surroundings: a table whose frames appear step by step, and a list of packets."""

    def __init__(self, *, first=1, steady=8, decoder=None, sink=None):
        self.table = SlotTable(SLOTS, POSITIONS, BACKEND)
        self.table.codes.copy_(torch.randint(0, CODEBOOK_SIZE, self.table.codes.shape))
        self.decoder = FakeDecoder() if decoder is None else decoder
        self.packets = []
        self.pump = AudioPump(
            self.table,
            self.decoder,
            BACKEND,
            self.packets.append if sink is None else sink,
            first_frames=first,
            steady_frames=steady,
        )
        self.counted = {}

    def open(self, slot, *, prompt=6, name=None, with_codes=False, reference=0):
        self.table.frontier[slot] = self.table.prompt_rows[slot] = prompt
        self.counted[slot] = 0
        name = name or f"r{slot}"
        heard = self.table.codes[slot, prompt - reference : prompt].numpy().tobytes()
        self.pump.open(name, slot, prompt, with_codes=with_codes, reference=heard)

    def step(self, *slots, ended=()):
        """Every slot makes a frame, except that the device knows the ``ended`` ones are over."""
        for slot in slots:
            if slot not in ended:
                self.table.frontier[slot] += 1
        prompts = self.table.prompt_rows.tolist()
        positions = [prompts[slot] + self.counted[slot] - 1 for slot in slots]
        self.pump.advance(np.array(slots), np.array(positions))
        for slot in slots:
            self.counted[slot] += 1

    def finish(self):
        """Packets by request, once everything is sent."""
        self.pump.shut_down(DEADLINE_S)
        found = {}
        for packet in self.packets:
            found.setdefault(packet.request_id, []).append(packet)
        return found

    def codes(self, slot, frames):
        start = int(self.table.prompt_rows[slot])
        return self.table.codes[slot, start : start + frames]


@pytest.fixture
def engine():
    engines = []

    def build(**options):
        engines.append(Engine(**options))
        return engines[-1]

    yield build
    for made in engines:
        made.pump.shut_down(DEADLINE_S)


def assert_whole(packets, codes):
    """The packets of one request hold these frames, each once and in order, and only the final one is last."""
    sent = [packet.frames for packet in packets]
    assert [packet.frames_before for packet in packets] == [sum(sent[:index]) for index in range(len(sent))]
    assert [packet.last for packet in packets] == [False] * (len(packets) - 1) + [True]
    samples = np.frombuffer(b"".join(packet.pcm for packet in packets), np.int16)
    assert samples.tolist() == codes[:, 0].repeat_interleave(SAMPLES_PER_FRAME).tolist()


class TestChunks:
    @pytest.mark.parametrize(
        ("first", "steady", "expected"),
        [
            (1, 8, [1, 2, 4, 8, 8, 7]),
            (1, 1, [1] * 30),
            (2, 5, [2, 4, 5, 5, 5, 5, 4]),
            (3, 3, [3] * 10),
            (8, 20, [8, 16, 6]),
        ],
    )
    def test_sizes_double_from_first_to_steady(self, engine, first, steady, expected):
        made = engine(first=first, steady=steady)
        made.open(2)
        for _ in range(30):
            made.step(2)
        made.pump.close(2)
        packets = made.finish()["r2"]
        assert [packet.frames for packet in packets if packet.frames] == expected
        assert_whole(packets, made.codes(2, 30))

    def test_streams_that_are_due_together_are_decoded_together(self, engine):
        made = engine()
        for slot in (0, 2, 4):
            made.open(slot, prompt=5 + slot)
        for _ in range(7):
            made.step(4, 0, 2)
        assert made.decoder.calls == [([4, 0, 2], frames) for frames in (1, 2, 4)]

    def test_streams_with_different_amounts_are_decoded_apart(self, engine):
        made = engine()
        made.open(0)
        made.step(0)
        made.open(1)
        made.step(0, 1)
        made.step(0, 1)
        assert made.decoder.calls == [([0], 1), ([1], 1), ([0], 2)]
        made.step(0, 1)  # the second frame after the first of slot 1 is due together with nothing of slot 0
        made.step(0, 1)
        assert made.decoder.calls[3:] == [([1], 2)]

    def test_long_chunks_of_streams_that_began_in_different_steps_share_a_decode(self, engine):
        made = engine()
        running = []
        for slot in range(4):
            made.open(slot)
            running.append(slot)
            made.step(*running)
        for _ in range(22):
            made.step(*running)
        assert [slots for slots, frames in made.decoder.calls if frames == 8] == [[0], [1, 2], [3], [0], [1, 2]]
        made.pump.close(1)
        packets = made.finish()["r1"]
        assert [packet.frames for packet in packets] == [1, 2, 4, 8, 8, 2]  # those of a stream that never waits
        assert_whole(packets, made.codes(1, 25))

    def test_rows_that_make_no_frame_are_not_counted(self, engine):
        made = engine()
        made.open(0, prompt=6)
        for position in (0, 3, 4):  # prompt chunks
            made.pump.advance(np.array([0]), np.array([position]))
        made.step(0)
        for position in (2, 5):  # the prompt computed again after a preemption
            made.pump.advance(np.array([0]), np.array([position]))
        assert made.decoder.calls == [([0], 1)]
        made.step(0)
        made.step(0)
        assert made.decoder.calls == [([0], 1), ([0], 2)]

    def test_expected_rows(self, engine):
        made = engine()
        made.open(0, prompt=6)
        made.open(1, prompt=4)
        made.step(1)
        rows = np.array([0, 0, 1, 1]), np.array([5, 4, 3, 4])
        assert made.pump.expects(*rows).tolist() == [True, False, False, True]


class TestEnds:
    def test_streams_that_end_together_share_decodes(self, engine):
        made = engine()
        for slot in range(4):
            made.open(slot)
        for _ in range(10):
            made.step(0, 1, 2)
        made.open(4)
        for _ in range(8):
            made.step(0, 1, 2, 4)
        before = len(made.decoder.calls)
        made.pump.close(0, 4, 3, 1, 2)
        assert made.decoder.calls[before:] == [([4], 1), ([0, 1, 2], 4)]
        found = made.finish()
        for slot, frames in {0: 18, 1: 18, 2: 18, 3: 0, 4: 8}.items():
            assert_whole(found[f"r{slot}"], made.codes(slot, frames))

    @pytest.mark.parametrize("frames", [1, 2, 3, 7, 11, 15])
    @pytest.mark.parametrize("overcount", [0, 1, 3])
    def test_frames_counted_beyond_the_end_are_cut(self, engine, frames, overcount):
        made = engine()
        made.open(1)
        for _ in range(frames):
            made.step(1)
        for _ in range(overcount):
            made.step(1, ended=(1,))
        made.pump.close(1)
        assert_whole(made.finish()["r1"], made.codes(1, frames))

    def test_a_stream_without_a_frame_still_ends(self, engine):
        made = engine()
        made.open(1)
        made.pump.close(1)
        assert_whole(made.finish()["r1"], made.codes(1, 0))

    def test_closing_what_is_not_open_sends_nothing(self, engine):
        made = engine()
        made.open(1)
        made.pump.close(0)
        made.pump.close(1)
        made.pump.close(1)
        assert len(made.finish()["r1"]) == 1

    def test_a_dropped_stream_sends_no_more(self, engine):
        made = engine()
        made.open(0)
        made.open(1)
        for _ in range(2):
            made.step(0, 1)
        made.pump.close(0, send=False)
        for _ in range(6):
            made.step(0, 1)  # a step that was under way when the client left
        made.pump.close(1)
        assert made.pump.open_streams == 0
        found = made.finish()
        assert [packet.frames for packet in found["r0"]] == [1]
        assert not any(packet.last for packet in found["r0"])
        assert_whole(found["r1"], made.codes(1, 8))

    def test_a_slot_serves_the_next_request_from_its_start(self, engine):
        made = engine()
        made.open(3, name="first")
        for _ in range(5):
            made.step(3)
        made.pump.close(3)
        first = made.codes(3, 5).clone()
        made.open(3, prompt=20, name="second")
        for _ in range(4):
            made.step(3)
        assert made.decoder.frames[3] == 3  # reset: frames 0 to 2 of the second request
        made.pump.close(3)
        found = made.finish()
        assert_whole(found["first"], first)
        assert_whole(found["second"], made.codes(3, 4))

    def test_a_table_filled_to_its_last_position(self, engine):
        made = engine()
        made.open(1, prompt=POSITIONS - 3)
        for _ in range(3):
            made.step(1)
        made.step(1, ended=(1,))
        made.pump.close(1)
        assert_whole(made.finish()["r1"], made.codes(1, 3))


class TestCodes:
    def test_codes_come_for_those_who_asked(self, engine):
        made = engine()
        made.open(0, with_codes=True)
        made.open(1)
        for _ in range(6):
            made.step(0, 1)
        made.step(0, 1, ended=(0,))
        made.pump.close(0)
        made.pump.close(1)
        found = made.finish()
        codes = np.frombuffer(b"".join(packet.codes for packet in found["r0"]), np.int16)
        assert codes.reshape(-1, NUM_CODEBOOKS).tolist() == made.codes(0, 6).tolist()
        assert not any(packet.codes for packet in found["r1"])


class TestSender:
    def test_many_streams_stay_in_order(self, engine):
        made = engine(steady=3)
        rng = np.random.default_rng(0)
        lengths = {slot: int(rng.integers(1, 40)) for slot in range(SLOTS)}
        for slot in range(SLOTS):
            made.open(slot, prompt=3 + slot)
        while running := [slot for slot in range(SLOTS) if made.counted[slot] < lengths[slot]]:
            made.step(running[0], *(slot for slot in running[1:] if rng.random() < 0.7))
        for slot in range(SLOTS):
            made.pump.close(slot)
        found = made.finish()
        for slot in range(SLOTS):
            assert_whole(found[f"r{slot}"], made.codes(slot, lengths[slot]))

    def test_shutting_down_sends_what_is_queued(self, engine):
        gate, packets = threading.Event(), []

        def slow(packet):
            assert gate.wait(DEADLINE_S)
            packets.append(packet)

        made = engine(sink=slow)
        made.open(0)
        for _ in range(8):
            made.step(0)
        made.pump.close(0)
        assert packets == []
        assert made.pump.queued_jobs >= 2
        gate.set()
        made.pump.shut_down(DEADLINE_S)
        assert not made.pump._thread.is_alive()
        assert_whole(packets, made.codes(0, 8))

    def test_a_failure_is_raised_in_the_next_step_and_once(self, engine, caplog):
        failing, seen = threading.Event(), threading.Event()
        failing.set()
        packets = []

        def sink(packet):
            seen.set()
            if failing.is_set():
                raise OSError("no buffer space")
            packets.append(packet)

        made = engine(sink=sink)
        made.open(0)
        made.step(0)
        assert seen.wait(DEADLINE_S)
        with pytest.raises(RuntimeError, match="audio could not be sent") as raised:
            for _ in range(int(DEADLINE_S * 1_000)):  # until the sender has stored what it caught
                made.pump.advance(np.array([0]), np.array([0]))
                time.sleep(0.001)
        assert isinstance(raised.value.__cause__, OSError)
        assert "the audio sender failed" in caplog.text
        failing.clear()
        made.step(0)
        made.pump.close(0)
        made.pump.shut_down(DEADLINE_S)
        assert [packet.frames for packet in packets] == [1]


class TestRealCodec:
    @pytest.fixture(scope="class")
    @staticmethod
    def decoder(tiny_checkpoint):
        checkpoint = open_checkpoint(tiny_checkpoint())
        decoder = CodecDecoder(checkpoint.config.codec, "cpu", torch.float32)
        decoder.load_weights(checkpoint.iter_codec())
        return decoder

    def test_streams_equal_one_pass(self, engine, decoder):
        made = engine(steady=4, decoder=CodecSteps(decoder, SLOTS + 1))
        lengths = {0: 9, 3: 14, 1: 3}
        for slot in lengths:
            made.open(slot)
        for frame in range(max(lengths.values())):
            made.step(
                *(slot for slot in lengths if frame <= lengths[slot]), ended=[s for s in lengths if frame == lengths[s]]
            )
        for slot in lengths:
            made.pump.close(slot)
        found = made.finish()
        for slot, frames in lengths.items():
            samples = np.frombuffer(b"".join(packet.pcm for packet in found[f"r{slot}"]), np.int16)
            whole = to_pcm16(decoder.decode(made.codes(slot, frames).long().T[None]))[0].numpy()
            assert len(samples) == frames * SAMPLES_PER_FRAME
            assert np.abs(samples.astype(int) - whole.astype(int)).max() <= 1
            assert np.abs(whole.astype(int)).max() > 1_000
