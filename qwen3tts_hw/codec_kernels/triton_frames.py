"""The codec's work at frame rate: look-up, norms, gating, windowed attention, depthwise convolution. Small and float32.

Whatever feeds a matrix product is stored as words; see :mod:`.triton_conv`. Widths may be padded: columns beyond the
true width hold zeros and are left out of means.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qwen3tts_hw.codec_kernels.triton_conv import store_words


@triton.jit(do_not_specialize=["frames"])
def look_up(
    codes, table, words, frames,
    CODEBOOKS: tl.constexpr, ENTRIES: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum a frame's code vectors: ``codes [R, 16, F] int64``, contiguous -> ``words [R * F, TERMS, C]``; programs:
    ``[R * F]``. Codes outside a table count as its nearest entry."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for book in range(CODEBOOKS):
        code = tl.load(codes + (row // frames * CODEBOOKS + book) * frames + row % frames)
        code = tl.minimum(tl.maximum(code, 0), ENTRIES - 1)
        total += tl.load(table + (book * ENTRIES + code) * WIDTH + column, mask=column < WIDTH, other=0.0)
    store_words(words, row * (TERMS * C) + column, total, column < C, C, TERMS)


@triton.jit
def rms_norm(
    x, weight, words, eps, WIDTH: tl.constexpr, C: tl.constexpr, TERMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Root-mean-square norm of ``x [rows, C]``; programs: ``[rows]``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * C + column, mask=column < C, other=0.0)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    value *= tl.load(weight + column, mask=column < WIDTH, other=0.0)
    store_words(words, row * (TERMS * C) + column, value, column < C, C, TERMS)


@triton.jit
def gate(
    packed, words, WIDTH: tl.constexpr, C: tl.constexpr, STRIDE: tl.constexpr, TERMS: tl.constexpr, BLOCK: tl.constexpr
):
    """``silu(gate) * up`` of ``packed [rows, STRIDE]``: gates, then ups; programs: ``[rows, C / BLOCK]``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    opened = tl.load(packed + row * STRIDE + column, mask=column < WIDTH, other=0.0)
    up = tl.load(packed + row * STRIDE + WIDTH + column, mask=column < WIDTH, other=0.0)
    value = opened / (1.0 + tl.exp(-opened)) * up
    store_words(words, row * (TERMS * C) + column, value, column < C, C, TERMS)


@triton.jit(do_not_specialize=["length"])
def depthwise(
    x, past, slots, weights, bias, norm_weight, norm_bias, words, length, eps,
    WIDTH: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, TERMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Causal depthwise convolution and LayerNorm of ``x [rows, C] float32``; programs: ``[rows]``.

    ``past [slots, TAPS - 1, C] float32``; ``weights [TAPS, WIDTH]``.
    """
    row = tl.program_id(0).to(tl.int64)
    step = row % length
    column = tl.arange(0, BLOCK)
    live = column < WIDTH
    before = past + (tl.load(slots + row // length) * (TAPS - 1) + TAPS - 1 + step) * C
    value = tl.load(bias + column, mask=live, other=0.0)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        place = tl.where(step >= back, x + row * C, before) - back * C
        weight = tl.load(weights + tap * WIDTH + column, mask=live, other=0.0)
        value += weight * tl.load(place + column, mask=live, other=0.0)
    value = tl.where(live, value - tl.sum(value, axis=0) / WIDTH, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    value = value * tl.load(norm_weight + column, mask=live, other=0.0)
    value += tl.load(norm_bias + column, mask=live, other=0.0)
    store_words(words, row * (TERMS * C) + column, value, column < C, C, TERMS)


@triton.jit
def _half(place, live, cosine, sine, HALF: tl.constexpr, column):
    """The two halves of a head, rotated."""
    a = tl.load(place, mask=live, other=0.0)
    b = tl.load(place + HALF, mask=live, other=0.0)
    return a * cosine - b * sine, b * cosine + a * sine


@triton.jit(do_not_specialize=["frames"])
def attend(
    packed, rates, ring, slots, starts, words, frames, scale,
    HEADS: tl.constexpr, HALF: tl.constexpr, STRIDE: tl.constexpr, C: tl.constexpr, WINDOW: tl.constexpr,
    RING: tl.constexpr, TERMS: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Attention over a sliding window for ``frames`` new frames per stream; programs: ``[R, HEADS]``.

    ``packed [R * F, STRIDE] float32``: queries, keys, values of all heads. ``ring [slots, HEADS, 2, RING, 2 * HALF]``
    holds the keys, rotated, and values of position p in entry p mod RING; it has room for the window and the call.
    ``starts [slots]`` counts the frames before; ``rates [HALF]`` are angles per frame.
    """
    stream = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + stream)
    start = tl.load(starts + slot)
    size: tl.constexpr = 2 * HALF
    frame = tl.arange(0, BLOCK_F)
    column = tl.arange(0, BLOCK_D)
    live = (frame < frames)[:, None] & (column < HALF)[None, :]
    angle = (start + frame).to(tl.float32)[:, None] * tl.load(rates + column, mask=column < HALF, other=0.0)[None, :]
    cosine, sine = tl.cos(angle), tl.sin(angle)
    place = packed + (stream * frames + frame)[:, None] * STRIDE + head * size + column[None, :]
    query_a, query_b = _half(place, live, cosine, sine, HALF, column)
    key_a, key_b = _half(place + HEADS * size, live, cosine, sine, HALF, column)
    value_place = place + 2 * HEADS * size
    entry = ring + (slot * HEADS + head) * (2 * RING * size)
    home = entry + ((start + frame) % RING)[:, None] * size + column[None, :]
    tl.store(home, key_a, mask=live)
    tl.store(home + HALF, key_b, mask=live)
    tl.store(home + RING * size, tl.load(value_place, mask=live, other=0.0), mask=live)
    tl.store(home + RING * size + HALF, tl.load(value_place + HALF, mask=live, other=0.0), mask=live)
    tl.debug_barrier()  # the ring is read by other threads than wrote it
    index = tl.arange(0, RING)
    newest = start + frames - 1
    position = newest - (newest - index + RING) % RING  # may be before the stream's start
    kept = entry + index[:, None] * size + column[None, :]
    known = (position >= 0)[:, None] & (column < HALF)[None, :]
    scores = tl.dot(query_a, tl.trans(tl.load(kept, mask=known, other=0.0)), input_precision="tf32x3")
    scores = tl.dot(query_b, tl.trans(tl.load(kept + HALF, mask=known, other=0.0)), scores, input_precision="tf32x3")
    age = (start + frame)[:, None] - position[None, :]
    seen = (age >= 0) & (age < WINDOW) & (position >= 0)[None, :]
    scores = tl.where(seen, scores * scale, -1.0e30)
    weight = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    weight = weight / tl.sum(weight, axis=1)[:, None]
    kept += RING * size
    mixed_a = tl.dot(weight, tl.load(kept, mask=known, other=0.0), input_precision="tf32x3")
    mixed_b = tl.dot(weight, tl.load(kept + HALF, mask=known, other=0.0), input_precision="tf32x3")
    goal = (stream * frames + frame)[:, None] * (TERMS * C) + head * size + column[None, :]
    store_words(words, goal, mixed_a, live, C, TERMS)
    store_words(words, goal + HALF, mixed_b, live, C, TERMS)
