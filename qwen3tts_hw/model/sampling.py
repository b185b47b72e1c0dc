"""The one sampler: temperature, top-k, top-p or greedy, with counter-based randomness.

A draw is ``argmax(logits / T + Gumbel noise)``; the noise is a hash of (seed, frame, codebook, candidate) and of
nothing else, so a request draws the same codes alone or in any batch. The hash uses wrapping 32-bit integer arithmetic
only, which every device computes with the same bits. No generator objects, no host reads, no data-dependent shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK_32 = 0xFFFFFFFF


def signed(value: int) -> int:
    """What is left of an integer in 32 bits of two's complement."""
    value &= _MASK_32
    return value - (1 << 32) if value >= 1 << 31 else value


# Multipliers of the "lowbias32" integer hash (Chris Wellons, hash-prospector, public domain).
_MIX_A, _MIX_B = signed(0x7FEB352D), signed(0x846CA68B)
_GOLDEN = signed(0x9E3779B9)  # 2**32 / golden ratio: spreads consecutive counters
_FRAME_STEP, _CODEBOOK_STEP = signed(0x85EBCA6B), signed(0xC2B2AE35)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of one stage, one entry per batch row.

    ``temperature [B] float32`` (0 = greedy), ``top_k [B] int64`` (0 = off), ``top_p [B] float32`` (1 = off).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor


def mix(x: Tensor) -> Tensor:
    """Hash int32 values bijectively."""
    x = x ^ upper_bits(x, 16)
    x = x * _MIX_A
    x = x ^ upper_bits(x, 15)
    x = x * _MIX_B
    return x ^ upper_bits(x, 16)


def upper_bits(x: Tensor, drop: int) -> Tensor:
    """Shift int32 values right by ``drop`` bits, filling with zeros, without a shift operator.

    Some devices run shifts on a slow control processor and copy their operand from the host, which no graph can hold.
    The bits to be dropped are cleared first, so the division is exact even where it is made in float32 or truncates.
    """
    return ((x & -(1 << drop)) // (1 << drop)) & (_MASK_32 >> drop)


def frame_key(seed_low: Tensor, seed_high: Tensor, frame: Tensor) -> Tensor:
    """Key ``[B] int32`` of one frame from the seed's two 32-bit halves and the frame number, all ``[B] int32``."""
    key = mix(seed_low + _GOLDEN)
    key = mix(key ^ seed_high)
    return mix(key + frame * _FRAME_STEP)


def gumbel_noise(key: Tensor, codebook: int, candidates: Tensor) -> Tensor:
    """Standard Gumbel noise ``[B, V] float32`` for one codebook; ``key [B] int32``, ``candidates [V] int32``."""
    row = mix(key + signed(codebook * _CODEBOOK_STEP))
    bits = mix(row[:, None] + candidates[None, :] * _GOLDEN)
    return -torch.log(-torch.log(uniform(bits)))


def uniform(bits: Tensor) -> Tensor:
    """Numbers between 0 and 1 from int32 bits: odd multiples of 2**-24, so exact in float32 and never 0 or 1."""
    return (upper_bits(bits, 9).float() + 0.5) * (2.0**-23)


def choose(logits: Tensor, rows: SamplingRows, key: Tensor, codebook: int, candidates: Tensor) -> Tensor:
    """Pick one candidate per row: ``logits [B, V] float32`` → ``[B] int64``.

    Order as in the official package: temperature, top-k (ties with the k-th value survive), top-p, draw. Rows whose
    temperature is 0 take the argmax of the logits as they are.
    """
    greedy = rows.temperature <= 0.0
    scaled = logits / torch.where(greedy, 1.0, rows.temperature)[:, None]
    kept = scaled.masked_fill(scaled < _threshold(scaled, rows)[:, None], float("-inf"))
    noisy = kept + gumbel_noise(key, codebook, candidates)
    return torch.where(greedy[:, None], logits, noisy).argmax(dim=-1)


def _threshold(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Smallest logit ``[B]`` that top-k and then top-p let through."""
    width = logits.shape[-1]
    ordered = logits.sort(dim=-1, descending=True).values
    limit = torch.where(rows.top_k > 0, rows.top_k, width).clamp(max=width)
    kth = ordered.gather(1, limit[:, None] - 1)
    probabilities = ordered.masked_fill(ordered < kth, float("-inf")).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    inside = (before < rows.top_p[:, None]) | (rows.top_p >= 1.0)[:, None]
    nucleus = ordered.gather(1, inside.sum(dim=-1, keepdim=True) - 1)
    return torch.maximum(kth, nucleus)[:, 0]


def penalise_repeats(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Repetition penalty: ``logits [B, V]``, ``seen [B, V] bool``, ``penalty [B]``; each seen code counts once."""
    scaled = torch.where(logits < 0, logits * penalty[:, None], logits / penalty[:, None])
    return torch.where(seen, scaled, logits)
