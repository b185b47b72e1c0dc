"""The sampler against its definition: the hash in Python's integers, the filters in the official package's order."""

from __future__ import annotations

import math

import pytest
import torch

from qwen3tts_hw.model.sampling import SamplingRows, choose, frame_key, gumbel_noise, mix, penalise_repeats
from qwen3tts_hw.types import CODEBOOK_SIZE

MASK = 0xFFFFFFFF
GOLDEN, FRAME_STEP, CODEBOOK_STEP = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35


# The definition once more, in integers that do not wrap.


def unsigned_mix(x):
    x &= MASK
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ (x >> 16)


def unsigned_unmix(x):
    x ^= x >> 16
    x = x * pow(0x846CA68B, -1, 1 << 32) & MASK
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, 1 << 32) & MASK
    return x ^ (x >> 16)


def unsigned_key(seed, frame):
    key = unsigned_mix((seed & MASK) + GOLDEN)
    key = unsigned_mix(key ^ (seed >> 32))
    return unsigned_mix(key + frame * FRAME_STEP)


def exact_noise(key, codebook, candidate):
    row = unsigned_mix(key + codebook * CODEBOOK_STEP)
    bits = unsigned_mix(row + candidate * GOLDEN)
    return -math.log(-math.log(((bits >> 9) + 0.5) / 2**23))


def signed(value):
    return value - (1 << 32) if value >= 1 << 31 else value


def int32(*values):
    return torch.tensor([signed(value & MASK) for value in values], dtype=torch.int32)


def keys_of(seeds, frames):
    """Frame keys ``[B] int32`` of pairs of seed and frame."""
    return frame_key(int32(*seeds), int32(*(seed >> 32 for seed in seeds)), int32(*frames))


def frame_keys(count, seed=0):
    return keys_of([seed] * count, range(count))


def candidates(count):
    return torch.arange(count, dtype=torch.int32)


def rows(count, temperature=1.0, top_k=0, top_p=1.0):
    return SamplingRows(
        torch.full((count,), temperature), torch.full((count,), top_k), torch.full((count,), top_p, dtype=torch.float32)
    )


def draws(logits, count, *, codebook=0, seed=0, **parameters):
    """``count`` draws from one row of logits, one per frame."""
    batch = logits.expand(count, -1)
    return choose(batch, rows(count, **parameters), frame_keys(count, seed), codebook, candidates(logits.shape[-1]))


def official_scores(logits, temperature, top_k, top_p):
    """The official package's processing of one row, token by token: removed candidates are -inf."""
    scores = [float(value) / temperature for value in logits]
    if top_k:
        kth = sorted(scores, reverse=True)[min(top_k, len(scores)) - 1]
        scores = [value if value >= kth else -math.inf for value in scores]
    if top_p < 1.0:
        ascending = sorted(range(len(scores)), key=scores.__getitem__)
        weights = [math.exp(scores[index]) for index in ascending]
        total, cumulated = sum(weights), 0.0
        for index, weight in zip(ascending[:-1], weights[:-1], strict=True):  # the best one always stays
            cumulated += weight / total
            if cumulated <= 1.0 - top_p:
                scores[index] = -math.inf
    return torch.tensor(scores)


def assert_distributed(counts, probabilities):
    """Pearson's test at a level of 1 in 100,000; the draws are fixed, so a sampler that passes always does."""
    expected = probabilities * counts.sum()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    # Wilson and Hilferty's approximation of the chi-square quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


class TestHash:
    def test_literal_values(self):
        """Written down once: a changed hash would silently change every seeded result."""
        assert (
            mix(int32(0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)).tolist()
            == int32(0, 0x688990C0, 0xD1132181, 0x8D29FFB8, 0xCC4B4124, 0x6768824A).tolist()
        )
        keys = keys_of([0, 0, 42, 42, 2**32 + 42, 2**63 - 1, 2**31], [0, 1, 0, 8191, 0, 7, 3])
        assert (
            keys.tolist()
            == int32(0x944FB554, 0x3A678045, 0x95A505D1, 0x6CB5321C, 0xA00078C4, 0xCFDF5818, 0xC6D0D45C).tolist()
        )
        key = int32(0x95A505D1)
        assert gumbel_noise(key, 0, candidates(2))[0].tolist() == pytest.approx([-0.4318397, 0.1562645], abs=1e-6)
        assert gumbel_noise(key, 15, int32(2047)).item() == pytest.approx(-0.3948995, abs=1e-6)

    def test_equals_unbounded_integers(self):
        values = [index * 2_654_435_761 & MASK for index in range(2_000)]
        assert mix(int32(*values)).tolist() == int32(*map(unsigned_mix, values)).tolist()
        assert [unsigned_unmix(unsigned_mix(value)) for value in values] == values
        seeds = [value * 40_503 & (2**63 - 1) for value in values]
        assert keys_of(seeds, range(2_000)).tolist() == int32(*map(unsigned_key, seeds, range(2_000))).tolist()

    @pytest.mark.parametrize("codebook", [0, 1, 15])
    def test_noise_equals_double_precision(self, codebook):
        seeds, frames, ids = [7, 2**62 + 1], [0, 8_191], [0, 1, 2_047, 2_048]
        found = gumbel_noise(keys_of(seeds, frames), codebook, int32(*ids))
        expected = [
            [exact_noise(unsigned_key(seed, frame), codebook, index) for index in ids]
            for seed, frame in zip(seeds, frames, strict=True)
        ]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-6)

    def test_noise_is_finite_at_both_ends(self):
        """The hash can be inverted, so the keys that lead to the smallest and the largest uniform number are known."""
        lowest, highest = (int32(unsigned_unmix(unsigned_unmix(bits))) for bits in (0, MASK))
        smallest, largest = (gumbel_noise(key, 0, candidates(1)).item() for key in (lowest, highest))
        assert smallest == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)
        assert largest == pytest.approx(24 * math.log(2), rel=1e-6)

    def test_noise_has_the_moments_of_its_distribution(self):
        noise = gumbel_noise(frame_keys(200, seed=3), 5, candidates(CODEBOOK_SIZE)).double()
        assert noise.isfinite().all()
        assert noise.mean().item() == pytest.approx(0.57722, abs=0.01)
        assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)


class TestDistribution:
    @pytest.mark.parametrize(
        ("temperature", "top_k", "top_p"),
        [(1.0, 0, 1.0), (0.9, 0, 1.0), (0.3, 0, 1.0), (3.0, 0, 1.0), (0.9, 5, 1.0), (1.0, 0, 0.8), (0.7, 6, 0.7)],
    )
    def test_few_candidates(self, temperature, top_k, top_p):
        logits = torch.randn(12)
        drawn = draws(logits, 20_000, temperature=temperature, top_k=top_k, top_p=top_p)
        probabilities = official_scores(logits, temperature, top_k, top_p).softmax(dim=-1)
        assert_distributed(drawn.bincount(minlength=12), probabilities)

    def test_a_whole_codebook_with_default_filters(self):
        logits = 3.0 * torch.randn(CODEBOOK_SIZE)
        drawn = torch.cat(
            [draws(logits, 500, codebook=3, seed=seed, temperature=0.9, top_k=50, top_p=1.0) for seed in range(8)]
        )
        probabilities = official_scores(logits, 0.9, 50, 1.0).softmax(dim=-1)
        # Rare candidates together, as the test wants some five expected counts each.
        order = probabilities.argsort(descending=True)
        counts = drawn.bincount(minlength=CODEBOOK_SIZE)[order]
        probabilities = probabilities[order]
        common = int((probabilities * len(drawn) > 5).sum())
        assert common > 10
        assert counts[50:].sum() == 0
        assert_distributed(
            torch.cat([counts[:common], counts[common:].sum()[None]]),
            torch.cat([probabilities[:common], probabilities[common:].sum()[None]]),
        )

    def test_neighbouring_frames_codebooks_and_seeds_are_independent(self):
        logits, count = torch.zeros(5), 20_000
        base = draws(logits, count)
        others = {
            "next frame": torch.cat([base[1:], base[:1]]),
            "next codebook": draws(logits, count, codebook=1),
            "next seed": draws(logits, count, seed=1),
            "seed above 32 bits": draws(logits, count, seed=1 << 32),
        }
        for other in others.values():
            assert_distributed((base * 5 + other).bincount(minlength=25), torch.full((25,), 1 / 25))


class TestFilters:
    @pytest.mark.parametrize("top_k", [0, 1, 3, 9, 10, 500])
    @pytest.mark.parametrize("top_p", [1e-6, 0.2, 0.5, 0.83, 0.999, 1.0])
    @pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
    def test_survivors_are_the_official_ones(self, temperature, top_k, top_p):
        logits = 0.7 * torch.randn(10)
        drawn = draws(logits, 3_000, temperature=temperature, top_k=top_k, top_p=top_p)
        kept = official_scores(logits, temperature, top_k, top_p).softmax(dim=-1)
        assert set(drawn.tolist()) <= set(kept.nonzero()[:, 0].tolist())
        assert set(drawn.tolist()) >= set((kept > 0.005).nonzero()[:, 0].tolist())

    def test_ties_with_the_last_of_top_k_survive(self):
        drawn = draws(torch.tensor([0.0, 1.0, 2.0, 1.0, 1.0, -1.0]), 2_000, top_k=2)
        assert set(drawn.tolist()) == {1, 2, 3, 4}

    def test_top_k_comes_before_top_p(self):
        # Among the best two, the best has 60 %: it alone reaches 0.55. Among all four it would not.
        logits = torch.tensor([0.42, 0.28, 0.15, 0.15]).log()
        assert set(draws(logits, 2_000, top_k=2, top_p=0.55).tolist()) == {0}
        assert set(draws(logits, 2_000, top_p=0.55).tolist()) == {0, 1}

    def test_barred_candidates_are_never_drawn(self):
        logits = torch.zeros(6)
        logits[2] = -math.inf
        for parameters in ({}, {"top_k": 6}, {"top_p": 0.99}, {"temperature": 0.01}):
            assert set(draws(logits, 1_000, **parameters).tolist()) <= {0, 1, 3, 4, 5}

    def test_greedy_ignores_filters_and_noise(self):
        logits = torch.randn(64, 100)
        keys = frame_keys(64)
        for top_k, top_p in ((0, 1.0), (1, 0.1), (50, 0.5)):
            chosen = choose(logits, rows(64, 0.0, top_k, top_p), keys, 0, candidates(100))
            assert torch.equal(chosen, logits.argmax(dim=-1))


class TestRows:
    PARAMETERS = ((0.0, 0, 1.0), (0.9, 50, 1.0), (0.9, 0, 0.8), (2.0, 3, 1.0), (0.01, 0, 1.0), (1.0, 7, 0.5))

    def batch(self):
        """Logits, sampling rows and keys of six requests that have nothing in common."""
        logits = torch.randn(6, 300)
        temperature, top_k, top_p = zip(*self.PARAMETERS, strict=True)
        parameters = (torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p))
        return logits, parameters, keys_of([1, 1, 2, 2**40, 5, 6], [0, 1, 2, 3, 4, 5])

    def test_a_row_draws_the_same_alone_and_in_any_batch(self):
        logits, parameters, keys = self.batch()
        together = choose(logits, SamplingRows(*parameters), keys, 4, candidates(300))
        for order in ([3], [0], [5, 2], [5, 4, 3, 2, 1, 0], [1, 1, 3, 1]):
            picked = torch.tensor(order)
            some = choose(
                logits[picked],
                SamplingRows(*(column[picked] for column in parameters)),
                keys[picked],
                4,
                candidates(300),
            )
            assert torch.equal(some, together[picked])

    @pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1])
    def test_frames_and_codebooks_draw_differently(self, seed):
        logits = torch.zeros(CODEBOOK_SIZE)
        by_codebook = torch.stack([draws(logits, 16, codebook=codebook, seed=seed) for codebook in range(16)])
        assert len(by_codebook.unique()) > 225  # 256 draws of 2,048 codes: 240.6 are expected

    def test_all_bits_of_the_seed_matter(self):
        logits = torch.zeros(CODEBOOK_SIZE)
        seeds = [0] + [1 << bit for bit in range(63)]
        drawn = {tuple(draws(logits, 4, seed=seed).tolist()) for seed in seeds}
        assert len(drawn) == len(seeds)


class TestPenalty:
    def test_rule(self):
        logits = torch.tensor([[2.0, -2.0, 0.0, 3.0, -math.inf]] * 3)
        seen = torch.tensor([[True, True, True, False, True]] * 3)
        found = penalise_repeats(logits, seen, torch.tensor([1.0, 2.0, 0.5]))
        assert found.tolist() == [
            [2.0, -2.0, 0.0, 3.0, -math.inf],
            [1.0, -4.0, 0.0, 3.0, -math.inf],
            [4.0, -1.0, 0.0, 3.0, -math.inf],
        ]

    def test_nothing_seen_changes_nothing(self):
        logits = torch.randn(4, 50)
        assert torch.equal(
            penalise_repeats(logits, torch.zeros(4, 50, dtype=torch.bool), torch.full((4,), 1.3)), logits
        )
