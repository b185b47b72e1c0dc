"""The slot table: what admission uploads, what is left of an earlier request, and who owns which slot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from qwen3tts_hw import backends
from qwen3tts_hw.engine.state import Admission, SlotTable
from qwen3tts_hw.errors import CapacityError
from qwen3tts_hw.model.sampling import frame_key
from qwen3tts_hw.prompt.layout import PromptLayout
from qwen3tts_hw.types import NUM_CODEBOOKS, ClonedVoice, SamplingSpec

POSITIONS = 24
LAYOUT = PromptLayout(
    text_ids=(4, 5, 6, 9, 9, 9), codec_ids=(-1, -1, -1, 2155, 2148, 2149), trailing_text_ids=(7, 8), pad_text_id=9
)
SAMPLING = SamplingSpec(
    temperature=0.8,
    top_k=40,
    top_p=0.95,
    repetition_penalty=1.1,
    residual_temperature=0.7,
    residual_top_k=30,
    residual_top_p=0.9,
    seed=5,
)
SLOT = torch.tensor([1])
BACKEND = backends.resolve("cpu")


@pytest.fixture
def table():
    return SlotTable(3, POSITIONS, BACKEND)


class TestSlots:
    def test_each_slot_is_given_once(self, table):
        assert sorted(table.take() for _ in range(3)) == [0, 1, 2]
        assert table.free_slots == 0

    def test_no_slot_left(self, table):
        for _ in range(3):
            table.take()
        with pytest.raises(CapacityError, match="all 3 request slots are in use"):
            table.take()

    def test_a_released_slot_is_given_again(self, table):
        slots = [table.take() for _ in range(3)]
        table.release(slots[1])
        assert table.free_slots == 1
        assert table.take() == slots[1]

    def test_scratch_is_never_given_and_has_ended(self, table):
        assert table.scratch not in {table.take() for _ in range(3)}
        assert table.ended[table.scratch]

    def test_only_admitted_slots_run(self, table):
        slot = table.take()
        assert table.ended.all()
        table.admit(slot, Admission(LAYOUT, SAMPLING, 10))
        assert table.ended.tolist() == [index != slot for index in range(4)]
        table.release(slot)
        assert table.ended.all()


class TestAdmission:
    def test_prompt(self, table):
        table.admit(1, Admission(LAYOUT, SAMPLING, 10))
        assert table.text[1].tolist() == [4, 5, 6, 9, 9, 9, 7, 8] + [9] * (POSITIONS - 8)
        assert table.codes[1, :6, 0].tolist() == [-1, -1, -1, 2155, 2148, 2149]
        assert (table.codes[1, :, 1:] == -1).all()
        assert (table.frontier[1], table.prompt_rows[1], table.max_frames[1]) == (6, 6, 10)

    def test_text_that_outruns_the_table_is_cut(self, table):
        long = replace(LAYOUT, trailing_text_ids=tuple(range(100, 150)))
        table.admit(1, Admission(long, SAMPLING, 10))
        assert table.text[1].tolist() == [*LAYOUT.text_ids, *range(100, 100 + POSITIONS - 6)]

    def test_sampling(self, table):
        table.admit(1, Admission(LAYOUT, SAMPLING, 10))
        first, residual = table.talker_rows(SLOT), table.residual_rows(SLOT)
        found = [value.item() for rows in (first, residual) for value in (rows.temperature, rows.top_k, rows.top_p)]
        assert found == pytest.approx([0.8, 40, 0.95, 0.7, 30, 0.9])
        assert table.penalty(SLOT).item() == pytest.approx(1.1)
        assert (first.temperature.dtype, first.top_k.dtype, first.top_p.dtype) == (
            torch.float32,
            torch.int64,
            torch.float32,
        )

    def test_greedy_is_greedy_for_all_codebooks(self, table):
        table.admit(1, Admission(LAYOUT, replace(SAMPLING, temperature=0.0), 10))
        assert table.talker_rows(SLOT).temperature.item() == 0.0
        assert table.residual_rows(SLOT).temperature.item() == 0.0

    @pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 2**31, 2**63 - 1])
    def test_seed_survives_in_two_halves(self, table, seed):
        table.admit(1, Admission(LAYOUT, replace(SAMPLING, seed=seed), 10))
        low, high = table.seeds(SLOT)
        assert low.dtype == high.dtype == torch.int32
        assert (low.item() & 0xFFFFFFFF) + ((high.item() & 0xFFFFFFFF) << 32) == seed
        assert frame_key(low, high, torch.zeros(1, dtype=torch.int32)).dtype == torch.int32

    def test_rows_of_several_slots(self, table):
        for slot, seed in ((0, 7), (2, 2**40)):
            table.admit(slot, Admission(LAYOUT, replace(SAMPLING, seed=seed, top_k=seed % 97), 10))
        slots = torch.tensor([2, 0, 2])
        assert table.talker_rows(slots).top_k.tolist() == [2**40 % 97, 7, 2**40 % 97]
        assert table.seeds(slots)[1].tolist() == [2**8, 0, 2**8]

    def test_an_earlier_request_is_gone(self, table):
        table.admit(1, Admission(LAYOUT, SAMPLING, 10))
        table.codes[1] = 77
        table.seen[1] = True
        table.frontier[1] = 20
        table.ended[1] = True
        shorter = PromptLayout((1, 2, 3), (-1, 2155, 2149), (), 3)
        table.admit(1, Admission(shorter, SamplingSpec(seed=3), 4))
        assert table.text[1].tolist() == [1, 2, 3] + [3] * (POSITIONS - 3)
        assert table.codes[1, :3].tolist() == [[code] + [-1] * (NUM_CODEBOOKS - 1) for code in (-1, 2155, 2149)]
        assert not table.seen[1].any()
        assert (table.frontier[1], table.prompt_rows[1], table.max_frames[1], table.ended[1]) == (3, 3, 4, False)

    def test_neighbours_are_left_alone(self, table):
        table.admit(0, Admission(LAYOUT, SAMPLING, 10))
        before = [value[0].clone() for value in vars(table).values() if torch.is_tensor(value)]
        table.admit(1, Admission(replace(LAYOUT, pad_text_id=3), SamplingSpec(seed=9), 4))
        table.close(2)
        after = [value[0] for value in vars(table).values() if torch.is_tensor(value)]
        assert len(before) > 5
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


class TestClonedVoices:
    WIDTH = 6
    CODES = torch.arange(3 * NUM_CODEBOOKS, dtype=torch.int16).reshape(3, NUM_CODEBOOKS)
    VOICE = ClonedVoice(np.arange(WIDTH, dtype="<f4").tobytes(), "Good morning.", CODES.numpy().tobytes())
    CLONED = PromptLayout(
        text_ids=(4, 5, 6, 9, 9, 9, 9),
        codec_ids=(-1, 2155, -1, 2149, -1, -1, -1),
        trailing_text_ids=(7, 8),
        pad_text_id=9,
        speaker_row=2,
        reference_start=4,
        reference_frames=3,
    )

    @pytest.fixture
    def table(self):
        return SlotTable(3, POSITIONS, BACKEND, speaker_width=self.WIDTH)

    def test_speaker_and_reference_have_their_rows(self, table):
        table.admit(1, Admission(self.CLONED, SAMPLING, 8, self.VOICE))
        assert table.speaker[1].tolist() == list(range(self.WIDTH))
        assert table.speaker_rows.tolist() == [-1, 2, -1, -1]
        assert torch.equal(table.codes[1, 4:7], self.CODES)
        assert table.codes[1, :4, 0].tolist() == [-1, 2155, -1, 2149]
        assert (table.codes[1, :4, 1:] == -1).all()
        assert (table.codes[[0, 2, 3]] == -1).all()

    def test_the_penalty_does_not_count_the_reference(self, table):
        table.admit(1, Admission(self.CLONED, SAMPLING, 8, self.VOICE))
        assert not table.seen[1].any()

    def test_the_next_request_has_no_speaker(self, table):
        table.admit(1, Admission(self.CLONED, SAMPLING, 8, self.VOICE))
        table.admit(1, Admission(LAYOUT, SAMPLING, 8))
        assert table.speaker_rows.tolist() == [-1] * 4

    def test_the_speaker_keeps_the_models_dtype(self):
        table = SlotTable(1, POSITIONS, BACKEND, speaker_width=self.WIDTH, speaker_dtype=torch.bfloat16)
        table.admit(0, Admission(self.CLONED, SAMPLING, 8, self.VOICE))
        assert table.speaker.dtype == torch.bfloat16
        assert table.speaker[0].tolist() == list(range(self.WIDTH))

    def test_no_table_of_speakers_where_none_is_cloned(self):
        assert SlotTable(3, POSITIONS, BACKEND).speaker is None
