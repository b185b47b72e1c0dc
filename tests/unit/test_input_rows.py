"""Input rows: each row finds its own sides, whatever the order and the company it is asked for in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qwen3tts_hw.engine.input_rows import input_rows
from qwen3tts_hw.engine.state import Admission, SlotTable
from qwen3tts_hw.prompt.layout import PromptLayout
from qwen3tts_hw.types import NUM_CODEBOOKS, ClonedVoice, SamplingSpec
from tests.unit.tiny_model import BACKEND, load_model

POSITIONS = 12
LAYOUT = PromptLayout((3, 4, 5, 6, 7), (-1, 2155, -1, 2149, -1), (8,), 6, speaker_row=2, reference_start=4)
PLAIN = PromptLayout((3, 4, 5), (-1, 2155, 2149), (8,), 6)


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return load_model(tiny_checkpoint("base"))


@pytest.fixture
def voice(model):
    width = model.config.talker.hidden_size
    codes = torch.arange(NUM_CODEBOOKS, dtype=torch.int16)
    return ClonedVoice(np.linspace(-1, 1, width, dtype="<f4").tobytes(), "Good.", codes.numpy().tobytes())


@pytest.fixture
def table(model, voice):
    made = SlotTable(2, POSITIONS, BACKEND, speaker_width=model.config.talker.hidden_size)
    made.admit(0, Admission(LAYOUT, SamplingSpec(), 5, voice))
    made.admit(1, Admission(PLAIN, SamplingSpec(), 5))
    return made


def rows(model, table, slots, positions):
    return input_rows(table, model.text, model.codes, torch.tensor(slots), torch.tensor(positions))


def test_a_row_is_the_sum_of_its_sides(model, table, voice):
    found = rows(model, table, [0] * 6, range(6))
    text = model.text(torch.tensor([3, 4, 5, 6, 7, 8]))
    embedding = torch.from_numpy(np.frombuffer(voice.embedding, "<f4").copy())
    frame = sum(model.codes.rows(group, torch.tensor([group]))[0] for group in range(NUM_CODEBOOKS))
    nothing = torch.zeros_like(embedding)
    sides = [nothing, model.codes.rows(0, torch.tensor([2155]))[0], embedding]
    sides += [model.codes.rows(0, torch.tensor([2149]))[0], frame, nothing]
    assert torch.allclose(found, text + torch.stack(sides), atol=1e-6)


def test_any_order_gives_the_same_rows(model, table):
    whole = rows(model, table, [0] * 5 + [1] * 3, [*range(5), *range(3)])
    mixed = rows(model, table, [1, 0, 0, 1, 0], [2, 2, 4, 0, 0])
    assert torch.equal(mixed, whole[[7, 2, 4, 5, 0]])


def test_only_the_slot_of_the_speaker_gets_it(model, table):
    found = rows(model, table, [1, 2], [2, 2])
    without = model.codes.rows(0, torch.tensor([2149]))[0] + model.text(torch.tensor([5]))[0]
    assert torch.allclose(found[0], without, atol=1e-6)
    assert not found[1].any()


def test_positions_beyond_the_table_read_its_last_row(model, table):
    assert torch.equal(rows(model, table, [0], [POSITIONS + 5]), rows(model, table, [0], [POSITIONS - 1]))
