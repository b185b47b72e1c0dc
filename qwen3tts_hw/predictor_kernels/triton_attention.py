"""Attention of the code predictor for new rows of each sequence, with everything that surrounds it, in one kernel.

Norms of queries and keys, rotary embedding, the write into the key/value cache, grouped-query attention over at most 16
cached rows. Statistics and softmax in float32; roundings as in the plain form. One program per sequence and key/value
head; it reads only what the queries and keys of that head need.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qwen3tts_hw.predictor_kernels.triton_linear import normalised, start_successor, wait_for_predecessor


@triton.jit
def _rotated(first, second, cos, sin):
    """Rotate the halves of a vector; each product and the sum are rounded to the model's dtype, all in float32."""
    dtype = first.dtype
    a, b, c, s = first.to(tl.float32), second.to(tl.float32), cos.to(tl.float32), sin.to(tl.float32)
    turned_first = ((a * c).to(dtype).to(tl.float32) + (-b * s).to(dtype).to(tl.float32)).to(dtype)
    turned_second = ((b * c).to(dtype).to(tl.float32) + (a * s).to(dtype).to(tl.float32)).to(dtype)
    return turned_first.to(tl.float32), turned_second.to(tl.float32)


@triton.jit
def _normed_halves(base, weight_first, weight_second, eps, HALF: tl.constexpr, HEADS: tl.constexpr):
    """Heads ``[HEADS, HALF]`` twice: the two halves of normalised vectors that start at ``base``."""
    places = base + tl.arange(0, HEADS)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    first, second = tl.load(places), tl.load(places + HALF)
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(wide_first * wide_first + wide_second * wide_second, axis=1)
    scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
    return normalised(first, scale, weight_first[None, :]), normalised(second, scale, weight_second[None, :])


@triton.jit
def _cached(keys, values, position, HALF: tl.constexpr, KEYS: tl.constexpr):
    """Halves of the keys ``[KEYS, HALF]`` and values ``[KEYS, 2 HALF]`` before ``position``, float32; zeros behind."""
    half, whole, slots = tl.arange(0, HALF), tl.arange(0, 2 * HALF), tl.arange(0, KEYS)
    earlier = (slots < position)[:, None]
    places = slots[:, None] * (2 * HALF)
    first = tl.load(keys + places + half[None, :], mask=earlier, other=0.0).to(tl.float32)
    second = tl.load(keys + places + HALF + half[None, :], mask=earlier, other=0.0).to(tl.float32)
    return first, second, tl.load(values + places + whole[None, :], mask=earlier, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["batch", "start"])
def attend(
    packed, query_norm, key_norm, cos, sin, keys, values, out, batch, start, eps, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, SLOTS: tl.constexpr, KEYS: tl.constexpr,
    NEW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows ``start .. start + NEW`` of every sequence; programs: ``[B, KV_HEADS]``.

    ``packed [NEW * B, (HEADS + 2 KV_HEADS) * D]`` queries, keys, values; ``keys``, ``values [B, KV_HEADS, SLOTS, D]``
    are written and read; ``out [NEW * B, HEADS * D]``. Row ``s * B + b`` is the s-th new row of sequence b.

    Rows before ``start`` are read before the wait: between the step that wrote them and this one a code was chosen, and
    the kernel that chooses lets nothing start before all of an earlier step has ended (:mod:`.triton_sampling`).
    """
    start_successor(EARLY)
    sequence, head = tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    D: tl.constexpr = 2 * HALF
    half, whole = tl.arange(0, HALF), tl.arange(0, D)
    query_first, query_second = tl.load(query_norm + half), tl.load(query_norm + HALF + half)
    key_first, key_second = tl.load(key_norm + half), tl.load(key_norm + HALF + half)
    own = (sequence * KV_HEADS + head) * SLOTS * D
    keys, values = keys + own, values + own
    cosine, sine = tl.load(cos + start * D + half), tl.load(sin + start * D + half)
    old_first, old_second, old_values = _cached(keys, values, start, HALF, KEYS)
    wait_for_predecessor(EARLY)
    for new in tl.static_range(NEW):
        row, position = new * batch + sequence, start + new
        if new > 0:
            cosine, sine = tl.load(cos + position * D + half), tl.load(sin + position * D + half)
            tl.debug_barrier()  # other threads of this program wrote the cache's newest row
            old_first, old_second, old_values = _cached(keys, values, position, HALF, KEYS)
        base = packed + row * ((HEADS + 2 * KV_HEADS) * D)
        own_first, own_second = _normed_halves(base + (HEADS + head) * D, key_first, key_second, eps, HALF, 1)
        own_first, own_second = _rotated(own_first, own_second, cosine[None, :], sine[None, :])
        value = tl.load(base + (HEADS + KV_HEADS + head) * D + whole)
        first, second = _normed_halves(base + head * GROUP * D, query_first, query_second, eps, HALF, GROUP)
        first, second = _rotated(first, second, cosine[None, :], sine[None, :])
        products = first[:, None, :] * old_first[None, :, :] + second[:, None, :] * old_second[None, :, :]
        earlier = (tl.arange(0, KEYS) < position)[None, :]
        scores = tl.where(earlier, tl.sum(products, axis=2) * scale, float("-inf"))
        own_score = tl.sum(first * own_first + second * own_second, axis=1) * scale
        highest = tl.maximum(tl.max(scores, axis=1), own_score)
        shares, own_share = tl.exp(scores - highest[:, None]), tl.exp(own_score - highest)
        mixed = tl.sum(shares[:, :, None] * old_values[None, :, :], axis=1)
        mixed = mixed + own_share[:, None] * value.to(tl.float32)[None, :]
        mixed = mixed / (tl.sum(shares, axis=1) + own_share)[:, None]
        places = out + row * (HEADS * D) + (head * GROUP + tl.arange(0, GROUP))[:, None] * D + whole[None, :]
        tl.store(places, mixed.to(out.dtype.element_ty))
        slot = keys + position * D + half[None, :]
        tl.store(slot, own_first.to(keys.dtype.element_ty))
        tl.store(slot + HALF, own_second.to(keys.dtype.element_ty))
        tl.store(values + position * D + whole, value)
