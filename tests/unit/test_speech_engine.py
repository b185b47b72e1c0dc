"""One worker's speech state: slots for requests, steps that make frames and audio, and what requests leave behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qwen3tts_hw import graph_wrappers
from qwen3tts_hw.engine.audio import AudioPump
from qwen3tts_hw.engine.frame_step import FrameStep, frame_step_inputs
from qwen3tts_hw.engine.speech_engine import SpeechEngine
from qwen3tts_hw.engine.state import Admission, SlotTable
from qwen3tts_hw.errors import CapacityError
from qwen3tts_hw.prompt.layout import PromptLayout
from qwen3tts_hw.types import SAMPLES_PER_FRAME, SamplingSpec
from tests.unit.tiny_model import BACKEND, load_model

PROMPT = 5
LAYOUT = PromptLayout((1, 2, 3, 4, 5), (-1, -1, 2155, 2148, 2149), (6,), 7)
END = 2150
DEADLINE_S = 20.0


class CountingDecoder:
    """A codec whose audio does not matter."""

    weights = snapshots = 0

    def reset(self, slots):
        pass

    def decode(self, codes, slots):
        return torch.zeros(codes.shape[0], codes.shape[2] * SAMPLES_PER_FRAME, dtype=torch.int16)


class Worker:
    """A speech engine of three slots and the packets it has sent."""

    def __init__(self, model, *, trace=False):
        table = SlotTable(3, 40, BACKEND)
        inputs = frame_step_inputs(model.config, table, hidden_dtype=torch.float32, logits_dtype=torch.float32)
        frame = graph_wrappers.create("off", BACKEND)(
            FrameStep(model.config, table, model.predictor), buckets=(4,), inputs=inputs, name="frame step"
        )
        self.packets = []
        pump = AudioPump(table, CountingDecoder(), BACKEND, self.packets.append, first_frames=1, steady_frames=4)
        self.engine = SpeechEngine(table, frame, pump, BACKEND, trace=trace)
        self.model = model
        self.made = {}

    def admit(self, name, **options):
        self.made[name] = 0
        return self.engine.admit(
            name, Admission(LAYOUT, SamplingSpec(seed=3), options.pop("max_frames", 20)), **options
        )

    def step(self, *names):
        """One frame for each request; returns the hidden states and the tokens."""
        slots = self.engine.slots_of(list(names))
        positions = np.array([PROMPT - 1 + self.made[name] for name in names])
        hidden = torch.randn(len(names), self.model.config.talker.hidden_size)
        logits = torch.randn(len(names), self.model.config.talker_vocab_size)
        tokens = self.engine.step(hidden, logits, self.engine.stage(slots, positions))
        for name in names:
            self.made[name] += 1
        return hidden, tokens.tolist()

    def frames_sent(self):
        self.engine.pump.shut_down(DEADLINE_S)
        sent = {}
        for packet in self.packets:
            sent[packet.request_id] = sent.get(packet.request_id, 0) + packet.frames
        return sent


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return load_model(tiny_checkpoint())


@pytest.fixture
def worker(model):
    made = Worker(model, trace=True)
    yield made
    made.engine.pump.shut_down(DEADLINE_S)


def test_slots_come_and_go(worker):
    for name in "abc":
        worker.admit(name)
    with pytest.raises(CapacityError):
        worker.admit("d")
    assert sorted(worker.engine.slots_of(["c", "a", "b"]).tolist()) == [0, 1, 2]
    assert worker.engine.open_requests == 3
    worker.engine.finish("b")
    worker.engine.finish("b")
    worker.engine.finish("never seen")
    assert (worker.engine.open_requests, worker.engine.admitted, worker.engine.finished) == (2, 3, 1)
    worker.admit("d")
    assert len(set(worker.engine.slots_of(["a", "c", "d"]).tolist())) == 3


def test_slots_follow_the_order_of_the_batch(worker):
    slots = {name: worker.admit(name) for name in "abc"}
    for order in (["a", "b", "c"], ["c", "a"], ["a", "b", "c"], ["b"], []):
        assert worker.engine.slots_of(order).tolist() == [slots[name] for name in order]
    worker.engine.finish("b")
    slots["d"] = worker.admit("d")
    assert worker.engine.slots_of(["d", "a"]).tolist() == [slots["d"], slots["a"]]


def test_every_frame_is_sent(worker):
    for name, count in (("a", 7), ("b", 3)):
        worker.admit(name)
        for _ in range(count):
            worker.step(name)
    for _ in range(2):
        worker.step("a", "b")
    worker.engine.finish("a")
    worker.engine.finish("b")
    assert worker.frames_sent() == {"a": 9, "b": 5}
    assert [packet.last for packet in worker.packets].count(True) == 2


def test_steps_past_the_end_send_nothing_more(worker):
    worker.admit("a", max_frames=3)
    tokens = [worker.step("a")[1][0] for _ in range(6)]
    assert [token == END for token in tokens] == [False] * 3 + [True] * 3
    worker.engine.finish("a")
    assert worker.frames_sent() == {"a": 3}


def test_a_request_without_speech_ends_at_once(worker):
    worker.admit("a")
    worker.engine.admit("text", None)
    worker.made["text"] = 0
    for _ in range(3):
        _, tokens = worker.step("text", "a")
        assert tokens[0] == END
        assert tokens[1] != END
    worker.engine.finish("text")
    worker.engine.finish("a")
    assert worker.frames_sent() == {"a": 3}


def test_traces_are_the_hidden_states_of_the_frames(worker):
    worker.admit("a-0")
    worker.admit("b")
    seen = [worker.step("b", "a-0")[0][1] for _ in range(3)]
    found = np.frombuffer(worker.engine.trace("a"), np.float32)  # an id that an engine has appended to
    assert found.tolist() == torch.stack(seen).flatten().tolist()
    worker.engine.finish("a-0")
    assert len(worker.engine.trace("a")) == len(found) * 4
    assert worker.engine.trace("unknown") == b""


def test_traces_are_kept_for_so_many_requests(worker):
    for number in range(65):
        worker.admit(f"r{number:02}")
        worker.step(f"r{number:02}")
        worker.engine.finish(f"r{number:02}")
    assert worker.engine.trace("r00") == b""
    assert worker.engine.trace("r64") != b""


def test_without_the_setting_nothing_is_traced(model):
    worker = Worker(model)
    worker.admit("a")
    worker.step("a")
    assert worker.engine.trace("a") == b""
    worker.engine.pump.shut_down(DEADLINE_S)
