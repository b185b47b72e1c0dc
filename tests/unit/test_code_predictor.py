"""The code predictor against a second writing without a cache; embeddings and their sums against single look-ups."""

from __future__ import annotations

import pytest
import torch

from qwen3tts_hw.model.code_predictor import CodePredictor
from qwen3tts_hw.model.embeddings import ROWS_PER_GATHER
from qwen3tts_hw.model.sampling import frame_key
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS
from tests.unit.naive_stack import naive_stack
from tests.unit.tiny_model import MAX_ROWS, load_model, sampling_rows

PREFIX = "talker.code_predictor."
SIZES = ("tiny", "tiny-0.6B")


@pytest.fixture(scope="module", params=SIZES)
def model(request, tiny_checkpoint):
    return load_model(tiny_checkpoint(size=request.param))


@pytest.fixture
def step_logits(monkeypatch):
    """The logits of every step that a predictor makes, in order."""
    kept = []
    original = CodePredictor.logits

    def keep(self, x, group):
        kept.append(original(self, x, group))
        return kept[-1]

    monkeypatch.setattr(CodePredictor, "logits", keep)
    return kept


def inputs(model, count, seed=0):
    """Talker states of the usual size, and codes."""
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, model.config.talker.hidden_size, generator=rng)
    code0 = torch.randint(0, CODEBOOK_SIZE, (count,), generator=rng)
    key = frame_key(*torch.randint(0, 2**31 - 1, (3, count), generator=rng).to(torch.int32))
    return hidden, code0, key


def assert_close(found, expected):
    """Equal within 1e-5 of the largest logit, which float32 rounding in another order does not reach."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def naive_frame(model, hidden, code0):
    """Greedy codes 1..15 of one frame and the logits behind them: everything computed again in every step."""
    weights = model.weights

    def project(row):
        weight = weights.get(f"{PREFIX}small_to_mtp_projection.weight")
        return row if weight is None else weight @ row + weights[f"{PREFIX}small_to_mtp_projection.bias"]

    rows = [project(hidden), project(weights["talker.model.codec_embedding.weight"][code0])]
    codes, logits = [], []
    for group in range(NUM_CODEBOOKS - 1):
        last = naive_stack(weights, f"{PREFIX}model.", torch.stack(rows), model.config.predictor)[-1]
        logits.append(weights[f"{PREFIX}lm_head.{group}.weight"] @ last)
        codes.append(int(logits[-1].argmax()))
        rows.append(project(weights[f"{PREFIX}model.codec_embedding.{group}.weight"][codes[-1]]))
    return torch.tensor(codes), torch.stack(logits)


class TestCodePredictor:
    def test_only_unequal_widths_are_projected(self, model):
        talker, predictor = model.config.talker.hidden_size, model.config.predictor.hidden_size
        assert (model.predictor.projection is not None) == (talker != predictor)

    @pytest.mark.parametrize("seed", range(4))
    def test_equals_full_recomputation_over_the_growing_prefix(self, model, step_logits, seed):
        hidden, code0, key = inputs(model, 1, seed)
        codes = model.predictor(hidden, code0, sampling_rows(1), key)
        expected_codes, expected_logits = naive_frame(model, hidden[0], code0[0])
        assert codes.shape == (1, NUM_CODEBOOKS - 1)
        assert codes.dtype == torch.int64
        assert codes[0].tolist() == expected_codes.tolist()
        assert_close(torch.cat(step_logits), expected_logits)
        assert len(set(codes[0].tolist())) > 8  # not a constant that any cache would give

    @pytest.mark.parametrize("temperature", [0.0, 0.9])
    def test_rows_of_a_batch_equal_single_rows(self, model, step_logits, temperature):
        hidden, code0, key = inputs(model, MAX_ROWS)
        together = model.predictor(hidden, code0, sampling_rows(MAX_ROWS, temperature, 50), key)
        batch_logits = torch.stack(step_logits, dim=1)
        for row in range(MAX_ROWS):
            step_logits.clear()
            only = slice(row, row + 1)
            alone = model.predictor(hidden[only], code0[only], sampling_rows(1, temperature, 50), key[only])
            assert alone[0].tolist() == together[row].tolist()
            assert_close(torch.cat(step_logits), batch_logits[row])

    def test_nothing_remains_of_an_earlier_frame(self, model, step_logits):
        hidden, code0, key = inputs(model, 3)
        model.predictor._cache.zero_()
        first = model.predictor(hidden, code0, sampling_rows(3), key)
        model.predictor(*inputs(model, MAX_ROWS, seed=9)[:2], sampling_rows(MAX_ROWS), inputs(model, MAX_ROWS)[2])
        model.predictor._cache.fill_(float("nan"))  # whatever is read without having been written shows
        again = model.predictor(hidden, code0, sampling_rows(3), key)
        assert torch.equal(first, again)
        assert torch.equal(torch.cat(step_logits[:15]), torch.cat(step_logits[-15:]))

    def test_sampled_codes_depend_on_the_key_alone(self, model):
        hidden, code0, key = (value.expand(MAX_ROWS, *value.shape[1:]) for value in inputs(model, 1))
        same = model.predictor(hidden, code0, sampling_rows(MAX_ROWS, 0.9), key)
        assert (same == same[0]).all()
        keys = frame_key(key, key, torch.arange(MAX_ROWS, dtype=torch.int32))
        different = model.predictor(hidden, code0, sampling_rows(MAX_ROWS, 0.9), keys)
        assert len({tuple(codes) for codes in different.tolist()}) == MAX_ROWS

    def test_code_0_is_a_code_like_any_other(self, model):
        hidden, _, key = inputs(model, 1)
        codes = model.predictor(hidden, torch.zeros(1, dtype=torch.int64), sampling_rows(1), key)
        assert codes[0].tolist() == naive_frame(model, hidden[0], 0)[0].tolist()


class TestTextEmbedder:
    def test_ids_together_and_one_by_one(self, model):
        tokens = model.config.text_tokens
        ids = torch.tensor([tokens.tts_bos, tokens.tts_eos, tokens.tts_pad])
        one_by_one = torch.cat([model.text(ids[index : index + 1]) for index in range(3)])
        torch.testing.assert_close(model.text(ids), one_by_one, rtol=0, atol=1e-6)

    def test_equals_its_definition(self, model):
        ids = torch.arange(0, model.config.text_vocab_size, 37)
        w = {name.removeprefix("talker."): value for name, value in model.weights.items()}
        inner = w["model.text_embedding.weight"][ids] @ w["text_projection.linear_fc1.weight"].T
        inner = inner + w["text_projection.linear_fc1.bias"]
        expected = (inner * inner.sigmoid()) @ w["text_projection.linear_fc2.weight"].T
        expected = expected + w["text_projection.linear_fc2.bias"]
        torch.testing.assert_close(model.text(ids), expected, rtol=0, atol=1e-5)

    def test_absent_ids_give_zeros(self, model):
        rows = model.text(torch.tensor([5, -1, 6, -1]))
        assert not rows[1].any()
        assert not rows[3].any()
        torch.testing.assert_close(rows[[0, 2]], model.text(torch.tensor([5, 6])), rtol=0, atol=1e-6)


class TestCodeEmbedder:
    def tables(self, model):
        names = [
            "talker.model.codec_embedding.weight",
            *(f"{PREFIX}model.codec_embedding.{index}.weight" for index in range(NUM_CODEBOOKS - 1)),
        ]
        return [model.weights[name] for name in names]

    def naive_sum(self, model, codes):
        tables = self.tables(model)
        rows = torch.zeros(len(codes), model.config.talker.hidden_size, dtype=torch.float64)
        for row, frame in enumerate(codes.tolist()):
            for codebook, code in enumerate(frame):
                if code >= 0:
                    rows[row] += tables[codebook][code]
        return rows

    def test_sum_skips_what_is_absent(self, model):
        codes = torch.randint(0, CODEBOOK_SIZE, (40, NUM_CODEBOOKS))
        codes[torch.rand(codes.shape) < 0.4] = -1
        codes[3] = -1
        codes[4, 1:] = -1
        codes[4, 0] = model.config.codec_tokens.bos  # codebook 0's table has more than the codes
        codes[5] = 0
        summed = model.codes.sum(codes)
        torch.testing.assert_close(summed.double(), self.naive_sum(model, codes), rtol=0, atol=1e-5)
        assert not summed[3].any()

    def test_long_prompts_are_summed_in_parts(self, model):
        codes = torch.randint(-1, CODEBOOK_SIZE, (2 * ROWS_PER_GATHER + 3, NUM_CODEBOOKS))
        some = torch.tensor([0, ROWS_PER_GATHER - 1, ROWS_PER_GATHER, 2 * ROWS_PER_GATHER + 2])
        summed = model.codes.sum(codes)
        assert len(summed) == len(codes)
        assert torch.equal(summed[some], model.codes.sum(codes[some]))

    def test_rows_are_the_tables(self, model):
        codes = torch.tensor([0, 1, CODEBOOK_SIZE - 1])
        for codebook, table in enumerate(self.tables(model)):
            assert torch.equal(model.codes.rows(codebook, codes), table[codes])

    def test_bfloat16_sums_are_rounded_once(self, tiny_checkpoint):
        model = load_model(tiny_checkpoint(), torch.bfloat16)
        codes = torch.randint(0, CODEBOOK_SIZE, (50, NUM_CODEBOOKS))
        narrow = [table.to(torch.bfloat16).float() for table in self.tables(model)]
        exact = sum(narrow[codebook][codes[:, codebook]] for codebook in range(NUM_CODEBOOKS))
        error = (model.codes.sum(codes).float() - exact).abs()
        assert (error <= exact.abs() * 2**-8).all()  # half a unit of the last of 8 bits; 15 roundings would be more
