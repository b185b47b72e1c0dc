"""The talker against a second writing without a cache: prefill, single rows, and a cache that has to grow."""

from __future__ import annotations

import pytest
import torch

from qwen3tts_hw.model.layers import RMSNorm, rotary_table
from tests.unit.naive_stack import naive_stack
from tests.unit.tiny_model import load_model


@pytest.fixture(scope="module", params=["tiny", "tiny-0.6B"])
def directory(request, tiny_checkpoint):
    return tiny_checkpoint(size=request.param)


@pytest.fixture
def model(directory):
    return load_model(directory)


def random_rows(model, count, seed=0):
    return torch.randn(count, model.config.talker.hidden_size, generator=torch.Generator().manual_seed(seed))


def row_by_row(talker, rows, start=0):
    return torch.cat([talker(rows[index : index + 1], index) for index in range(start, len(rows))])


def assert_close(found, expected):
    """Equal within 1e-5; the states are of size 1 to 5."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_prefill_equals_the_definition(model):
    rows = random_rows(model, 20)
    hidden = model.talker(rows, 0)
    expected = naive_stack(model.weights, "talker.model.", rows, model.config.talker)
    assert_close(hidden, expected)
    logits = model.talker.logits(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected @ model.weights["talker.codec_head.weight"].T, rtol=0, atol=1e-4)


def test_prefill_equals_row_by_row(model):
    rows = random_rows(model, 24)
    assert_close(row_by_row(model.talker, rows), model.talker(rows, 0))


def test_rows_after_a_prefill_equal_one_prefill(model):
    rows = random_rows(model, 24)
    whole = model.talker(rows, 0)
    first = model.talker(rows[:10], 0)
    assert_close(torch.cat([first, row_by_row(model.talker, rows, 10)]), whole)


@pytest.mark.parametrize(("prompt", "total"), [(250, 262), (3, 258), (300, 302), (256, 520)])
def test_the_cache_grows(directory, prompt, total):
    model, other = load_model(directory), load_model(directory)
    rows = random_rows(model, total)
    grown = torch.cat([model.talker(rows[:prompt], 0), row_by_row(model.talker, rows, prompt)])
    assert_close(grown, other.talker(rows, 0))


def test_nothing_remains_of_an_earlier_sequence(model):
    rows = random_rows(model, 12)
    first = row_by_row(model.talker, rows)
    row_by_row(model.talker, random_rows(model, 40, seed=1))
    assert torch.equal(row_by_row(model.talker, rows), first)


def test_norm_casts_before_the_weight():
    """The official order of roundings: multiplying in float32 and casting last gives other values."""
    norm = RMSNorm(512, 1e-6, device=torch.device("cpu"), dtype=torch.bfloat16)
    norm.weight.copy_(torch.randn(512))
    x = (3 * torch.randn(20, 512)).to(torch.bfloat16)
    wide = x.double() / (x.double().pow(2).mean(dim=-1, keepdim=True) + 1e-6).sqrt()
    expected = wide.to(torch.bfloat16) * norm.weight
    late = (wide * norm.weight.double()).to(torch.bfloat16)
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), expected)
    assert not torch.equal(expected, late)


def test_rotary_angles_are_float32_in_any_dtype():
    """At position 30,000 an angle in bfloat16 would be off by whole turns."""
    position, size, theta = 30_000, 128, 1e6
    cos, sin = rotary_table(position + 1, size, theta, device=torch.device("cpu"), dtype=torch.bfloat16)
    angles = position * theta ** (-2 * torch.arange(size // 2, dtype=torch.float64) / size)
    for table, exact in ((cos, angles.cos()), (sin, angles.sin())):
        assert table.dtype == torch.bfloat16
        torch.testing.assert_close(table[-1, : size // 2].double(), exact, rtol=0, atol=0.01)
        assert torch.equal(table[:, : size // 2], table[:, size // 2 :])
