"""The frame step: which rows make a frame, what they choose, and that nothing else is written.

The talker is replaced by numbers that depend on a request's tag and the position alone, so a request can be run in any
slot, batch and order and must give the same frames.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qwen3tts_hw import graph_wrappers
from qwen3tts_hw.engine.frame_step import FrameStep, frame_step_inputs
from qwen3tts_hw.engine.state import Admission, SlotTable
from qwen3tts_hw.model.sampling import SamplingRows, frame_key
from qwen3tts_hw.prompt.layout import PromptLayout
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS, SamplingSpec
from tests.unit.tiny_model import BACKEND, load_model

SLOTS, POSITIONS, PROMPT = 6, 40, 7
GREEDY = SamplingSpec(temperature=0.0)
SAMPLED = SamplingSpec(seed=11, repetition_penalty=1.3)
END = 2150


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return load_model(tiny_checkpoint())


@pytest.fixture
def steps(model):
    return Steps(model)


class Steps:
    """A slot table, the frame step in a graph wrapper, and the requests in its slots."""

    def __init__(self, model, mode="off"):
        self.model = model
        self.table = SlotTable(SLOTS, POSITIONS, BACKEND)
        self.inputs = frame_step_inputs(
            model.config, self.table, hidden_dtype=torch.float32, logits_dtype=torch.float32
        )
        self.frame = graph_wrappers.create(mode, BACKEND)(
            FrameStep(model.config, self.table, model.predictor),
            buckets=(1, 2, 4),
            inputs=self.inputs,
            name="frame step",
        )
        self.frame.capture()
        self.tags = {self.table.scratch: 0}

    def admit(self, slot, sampling=GREEDY, *, tag=1, max_frames=20, prompt=PROMPT):
        layout = PromptLayout(tuple(range(prompt)), (-1,) * (prompt - 2) + (2148, 2149), (3, 4), 5)
        self.table.admit(slot, Admission(layout, sampling, max_frames))
        self.tags[slot] = tag

    def row(self, slot, position):
        """Hidden state and logits of a request's row."""
        place = position - int(self.table.prompt_rows[slot])
        rng = torch.Generator().manual_seed(1_000 * self.tags[slot] + place + 500)
        hidden = torch.randn(self.model.config.talker.hidden_size, generator=rng)
        return hidden, 3 * torch.randn(self.model.config.talker_vocab_size, generator=rng)

    def __call__(self, *rows, raised=None):
        """Run the rows ``(slot, position)``; ``raised`` maps tokens to logits that replace the usual ones."""
        hidden, logits = map(torch.stack, zip(*(self.row(*row) for row in rows), strict=True))
        for token, value in (raised or {}).items():
            logits[:, token] = value
        slots, positions = torch.tensor(rows, dtype=torch.int64).T
        (tokens,) = self.frame(hidden, logits, slots.contiguous(), positions.contiguous())
        assert tokens.dtype == torch.int64
        return tokens.tolist()

    def next_rows(self, *slots):
        """The row of each slot that is due a frame."""
        return [(slot, int(self.table.frontier[slot]) - 1) for slot in slots]

    def run(self, *slots, count, **options):
        """Make ``count`` frames in each slot; tokens per step."""
        return [self(*self.next_rows(*slots), **options) for _ in range(count)]

    def frames(self, slot):
        """Frames made so far, ``[T, 16]``."""
        start, end = int(self.table.prompt_rows[slot]), int(self.table.frontier[slot])
        return self.table.codes[slot, start:end].clone()

    def snapshot(self):
        """All device tables without the scratch row."""
        return {
            name: value[: self.table.scratch].clone()
            for name, value in vars(self.table).items()
            if torch.is_tensor(value)
        }


def assert_unchanged(steps, before):
    after = steps.snapshot()
    assert len(before) >= 8
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


class TestFrames:
    def test_a_frame_is_written_and_the_frontier_moves(self, steps):
        steps.admit(2)
        before = steps.snapshot()
        tokens = steps.run(2, count=3)
        frames = steps.frames(2)
        assert frames.shape == (3, NUM_CODEBOOKS)
        assert [[code] for code in frames[:, 0].tolist()] == tokens
        assert ((frames >= 0) & (frames < CODEBOOK_SIZE)).all()
        assert len({tuple(frame) for frame in frames.tolist()}) == 3
        assert steps.table.frontier[2] == PROMPT + 3
        assert steps.table.seen[2].nonzero()[:, 0].tolist() == sorted({token for (token,) in tokens})
        after = steps.snapshot()
        others = [slot for slot in range(SLOTS) if slot != 2]
        assert all(torch.equal(before[name][others], after[name][others]) for name in before)
        assert torch.equal(before["codes"][2, :PROMPT], after["codes"][2, :PROMPT])

    def test_greedy_frames_are_the_best_code_and_the_predictors(self, steps):
        steps.admit(0, replace(GREEDY, repetition_penalty=1.0))
        (hidden, logits), key = steps.row(0, PROMPT - 1), torch.zeros(1, dtype=torch.int32)
        steps.run(0, count=1)
        code0 = logits[:CODEBOOK_SIZE].argmax()[None]
        residual = steps.model.predictor(hidden[None], code0, steps.table.residual_rows(torch.tensor([0])), key)
        assert steps.frames(0)[0].tolist() == [*code0.tolist(), *residual[0].tolist()]

    @pytest.mark.parametrize("residual", [0.0, 1.2])
    def test_each_stage_has_its_own_sampling(self, steps, residual):
        steps.admit(0, replace(SAMPLED, temperature=0.6, residual_temperature=residual, residual_top_k=9))
        steps.run(0, count=3)
        for frame, codes in enumerate(steps.frames(0).long()):
            hidden, _ = steps.row(0, PROMPT - 1 + frame)
            key = frame_key(*steps.table.seeds(torch.tensor([0])), torch.tensor([frame], dtype=torch.int32))
            rows = SamplingRows(torch.tensor([residual]), torch.tensor([9]), torch.ones(1))
            expected = steps.model.predictor(hidden[None], codes[:1], rows, key)
            assert codes[1:].tolist() == expected[0].tolist()

    def test_code_0_is_legal(self, steps):
        steps.admit(0)
        assert steps.run(0, count=1, raised={0: 99.0}) == [[0]]
        assert steps.frames(0)[0, 0] == 0
        assert steps.table.seen[0, 0]
        assert steps((0, PROMPT - 1)) == [0]  # a known 0, looked up again

    @pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_control_tokens_are_never_chosen(self, steps, sampling):
        steps.admit(0, sampling)
        raised = {token: 99.0 for token in range(CODEBOOK_SIZE, 3_072) if token != END}
        tokens = steps.run(0, count=4, raised=raised)
        assert all(0 <= token < CODEBOOK_SIZE for (token,) in tokens)

    def test_draws_depend_on_the_frame_not_on_the_position(self, steps):
        steps.admit(0, SAMPLED)
        steps.admit(1, SAMPLED, prompt=PROMPT + 5)
        steps.run(0, 1, count=4)
        assert torch.equal(steps.frames(0), steps.frames(1))
        steps.admit(2, replace(SAMPLED, seed=12))
        steps.run(2, count=4)
        assert not torch.equal(steps.frames(0), steps.frames(2))


class TestEnd:
    def test_end_of_speech_from_the_first_step_gives_two_frames(self, steps):
        steps.admit(0)
        tokens = steps.run(0, count=5, raised={END: 99.0})
        assert [token == END for (token,) in tokens] == [False, False, True, True, True]
        assert len(steps.frames(0)) == 2
        assert steps.table.ended[0]

    def test_forbidden_end_leaves_the_best_code(self, steps):
        steps.admit(0, replace(GREEDY, repetition_penalty=1.0))
        steps.admit(1, replace(GREEDY, repetition_penalty=1.0))
        steps.run(0, count=2, raised={END: 99.0})
        steps.run(1, count=2)
        assert torch.equal(steps.frames(0), steps.frames(1))

    @pytest.mark.parametrize("limit", [1, 2, 5])
    @pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_the_limit_counts_frames(self, steps, limit, sampling):
        steps.admit(0, sampling, max_frames=limit)
        tokens = steps.run(0, count=limit, raised={END: -99.0})
        assert all(token < CODEBOOK_SIZE for (token,) in tokens)
        assert len(steps.frames(0)) == limit
        assert steps.table.ended[0]
        before = steps.snapshot()
        assert steps((0, PROMPT + limit - 1), raised={END: -99.0}) == [END]
        assert_unchanged(steps, before)

    def test_the_last_position_can_be_filled(self, steps):
        steps.admit(0, max_frames=POSITIONS - PROMPT)
        steps.admit(1, tag=2)
        before = steps.table.codes[1].clone()
        steps.run(0, count=POSITIONS - PROMPT, raised={END: -99.0})
        assert len(steps.frames(0)) == POSITIONS - PROMPT
        assert steps((0, POSITIONS - 1)) == [END]
        assert torch.equal(steps.table.codes[1], before)


class TestPenalty:
    def test_codes_made_so_far_count_and_nothing_else(self, steps):
        steps.admit(0, replace(GREEDY, repetition_penalty=1.5), tag=3)
        steps.admit(1, replace(GREEDY, repetition_penalty=1.5), tag=3)
        best = {100: 90.0, 200: 80.0, 300: 50.0}
        assert steps.run(0, count=4, raised=best) == [[100], [200], [100], [100]]  # 90 / 1.5 = 60, 80 / 1.5 = 53
        assert steps.run(1, count=1, raised=best) == [[100]]  # the neighbour's history is not its own

    def test_each_code_counts_once(self, steps):
        steps.admit(0, replace(GREEDY, repetition_penalty=1.5), tag=3)
        assert steps.run(0, count=6, raised={100: 90.0, 200: 55.0}) == [[100]] * 6

    def test_prompt_placeholders_do_not_count(self, steps):
        """A first frame under the strongest penalty equals one without any: the prompt is no history."""
        for slot, penalty in ((0, 10.0), (1, 1.0)):
            steps.admit(slot, replace(SAMPLED, repetition_penalty=penalty))
            assert not steps.table.seen[slot].any()
        first, second = steps((0, PROMPT - 1), (1, PROMPT - 1))
        assert first == second
        assert torch.equal(steps.frames(0), steps.frames(1))


class TestRowsThatMakeNoFrame:
    def test_rows_behind_the_frontier_return_what_is_stored(self, steps):
        steps.admit(0, SAMPLED)
        tokens = steps.run(0, count=5)
        before = steps.snapshot()
        again = [steps((0, PROMPT - 1 + frame), raised={END: 99.0, 5: 98.0}) for frame in range(5 - 1)]
        assert again == tokens[:-1]
        assert_unchanged(steps, before)

    def test_a_request_goes_on_after_it_was_computed_again(self, steps):
        steps.admit(0, SAMPLED)
        steps.admit(1, SAMPLED)
        expected = steps.run(0, count=6)
        steps.run(1, count=3)
        for position in (2, PROMPT - 1, PROMPT, PROMPT + 1):
            steps((1, position))
        assert steps.run(1, count=3) == expected[3:]
        assert torch.equal(steps.frames(0), steps.frames(1))

    def test_prompt_chunks(self, steps):
        steps.admit(0)
        before = steps.snapshot()
        for position in range(PROMPT - 1):
            steps((0, position))
        assert_unchanged(steps, before)

    def test_rows_past_the_end(self, steps):
        steps.admit(0, max_frames=3)
        steps.run(0, count=3)
        before = steps.snapshot()
        for position in range(PROMPT + 2, PROMPT + 6):
            assert steps((0, position)) == [END]
        assert_unchanged(steps, before)

    def test_rows_ahead_of_the_frontier(self, steps):
        steps.admit(0)
        before = steps.snapshot()
        assert steps((0, PROMPT), (0, PROMPT + 3)) == [END, END]
        assert_unchanged(steps, before)

    def test_a_released_slot(self, steps):
        slot = steps.table.take()
        steps.admit(slot)
        steps.run(slot, count=2)
        steps.table.release(slot)
        before = steps.snapshot()
        assert steps(*steps.next_rows(slot)) == [END]
        assert_unchanged(steps, before)

    def test_a_slot_without_speech_ends_at_once(self, steps):
        steps.table.close(3)
        steps.tags[3] = 1
        before = steps.snapshot()
        assert [steps((3, position)) for position in (0, 5, 11)] == [[END]] * 3
        assert_unchanged(steps, before)


class TestSlotReuse:
    def test_nothing_remains_of_the_earlier_request(self, model):
        used, fresh = Steps(model), Steps(model)
        used.admit(0, replace(SAMPLED, repetition_penalty=2.0), tag=5, max_frames=30, prompt=9)
        used.run(0, count=12)
        for steps in (used, fresh):
            steps.admit(0, replace(GREEDY, repetition_penalty=1.4), tag=6)
        for steps in (used, fresh):
            steps.run(0, count=8)
        assert torch.equal(used.frames(0), fresh.frames(0))


SAMPLINGS = (
    GREEDY,
    SAMPLED,
    SamplingSpec(seed=2**40, top_k=0, top_p=0.8, residual_top_p=0.7),
    SamplingSpec(seed=3, temperature=1.5, residual_top_k=4),
    SamplingSpec(seed=3, temperature=0.3, repetition_penalty=1.0, residual_temperature=0.0),
    SamplingSpec(seed=4),
)


def admit_all(steps):
    """One request of each kind."""
    for slot, sampling in enumerate(SAMPLINGS):
        steps.admit(slot, sampling, tag=slot + 1, prompt=PROMPT + slot, max_frames=6 + slot % 2)


@pytest.fixture(scope="module")
def expected(model):
    """Frames of each request run alone."""
    alone = Steps(model)
    admit_all(alone)
    for slot in range(SLOTS):
        alone.run(slot, count=6)
    return [alone.frames(slot) for slot in range(SLOTS)]


class TestBatches:
    """Requests of all kinds give the same frames alone, together, padded, and through captured graphs."""

    @pytest.mark.parametrize("mode", ["off", "recording"])
    @pytest.mark.parametrize(
        "batches",
        [
            [(0, 1, 2, 3, 4, 5)] * 6,
            [(5, 3, 1), (4, 2, 0)] * 6,
            [(2, 1), (0, 3, 4), (5,)] * 6,
        ],
        ids=["all", "in other order", "of changing size"],
    )
    def test_rows_do_not_influence_each_other(self, model, expected, mode, batches):
        steps = Steps(model, mode)
        assert steps.frame.mode == ("graph" if mode == "recording" else "eager")
        admit_all(steps)
        for slots in batches:
            steps(*steps.next_rows(*slots))
        assert all(torch.equal(steps.frames(slot), expected[slot]) for slot in range(SLOTS))
        if mode == "recording":
            assert steps.frame.counters["padding_rows"] > 0 or (0, 1, 2, 3, 4, 5) in batches
            assert steps.frame.counters["replays"] >= len(batches)

    @pytest.mark.parametrize("mode", ["off", "recording"])
    def test_rows_of_every_kind_in_one_batch(self, model, expected, mode):
        steps = Steps(model, mode)
        admit_all(steps)
        steps.run(0, 1, count=3)
        steps.run(2, count=6, raised={END: -99.0})
        scratch, before = steps.table.scratch, steps.snapshot()
        known = steps.frames(1)[1, 0].item()
        tokens = steps(
            (scratch, 0),
            *steps.next_rows(0),  # makes a frame
            (1, PROMPT + 1),  # frame 0's row came before; this one is known
            (2, PROMPT + 2 + 6),  # past the end
            (scratch, 3),
            (3, 1),  # a prompt chunk
            (scratch, POSITIONS - 1),
        )
        assert tokens[2:4] == [known, END]
        assert torch.equal(steps.frames(0), expected[0][:4])
        after = steps.snapshot()
        others = slice(1, SLOTS)
        assert all(torch.equal(before[name][others], after[name][others]) for name in before)

    def test_scratch_stays_scratch(self, steps):
        steps.admit(0)
        steps.run(0, count=2)
        before = steps.snapshot()
        for _ in range(3):
            steps(*((steps.table.scratch, position) for position in (0, 1, POSITIONS - 1)))
        assert_unchanged(steps, before)
        assert steps.table.ended[steps.table.scratch]
