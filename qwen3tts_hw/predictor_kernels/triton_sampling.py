"""The sampler as device code: the same filters, the same noise and the same ties as the plain sampler, without a sort.

A draw is the argmax of ``scaled logits + noise`` among the candidates that top-k and top-p let through. Instead of
finding the filters' threshold first, the best candidate of all is proposed, and accepted if the filters let it through:
that is told by how many candidates lie above it, and with how much probability. If they do not, nothing at or below its
logit passes either, so the next proposal is made among those above it. A few rounds suffice whatever the logits.

The noise is the same hash in wrapping 32-bit integers; its bits are equal on every device.

The kernels here let their successors start only after they have waited for their own predecessors. So whatever was
written before the previous kernel of this module is there from the start: a row's key may be read, and its noise made,
while the logits are still being computed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from qwen3tts_hw.predictor_kernels.triton_linear import SQUARE_PARTS, start_successor, wait_for_predecessor

# As the plain sampler's, as unsigned 32-bit values.
MIX_A = tl.constexpr(0x7FEB352D)
MIX_B = tl.constexpr(0x846CA68B)
GOLDEN = tl.constexpr(0x9E3779B9)
FRAME_STEP = tl.constexpr(0x85EBCA6B)
CODEBOOK_STEP = tl.constexpr(0xC2B2AE35)
BITS = tl.constexpr(32)  # of a logit's sortable form


@triton.jit
def _times(x, factor: tl.constexpr):
    """Wrapping product with a 32-bit constant."""
    return x * tl.full([], factor, tl.uint32)


@triton.jit
def mix(x):
    """Hash uint32 values bijectively."""
    x = x ^ (x >> 16)
    x = _times(x, MIX_A)
    x = x ^ (x >> 15)
    x = _times(x, MIX_B)
    return x ^ (x >> 16)


@triton.jit
def frame_key(seed_low, seed_high, frame):
    """Key of one frame from the seed's halves and the frame number, all uint32."""
    key = mix(seed_low + tl.full([], GOLDEN, tl.uint32))
    key = mix(key ^ seed_high)
    return mix(key + _times(frame, FRAME_STEP))


@triton.jit
def gumbel_noise(key, codebook, candidates, EXACT: tl.constexpr):
    """Standard Gumbel noise for candidates of one codebook; ``EXACT`` takes the device library's logarithm."""
    row = mix(key.to(tl.uint32) + _times(codebook.to(tl.uint32), CODEBOOK_STEP))
    bits = mix(row + _times(candidates.to(tl.uint32), GOLDEN))
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    if EXACT:
        return -libdevice.log(-libdevice.log(uniform))
    return -tl.log(-tl.log(uniform))


@triton.jit
def _sortable(x):
    """Integers in the order of float32 values."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _top_k_mass(scaled, shares, limit):
    """Sum of ``shares`` over the candidates that top-k lets through: bisection over the k-th value's bits."""
    order = _sortable(scaled)
    low, high = tl.min(order, axis=0).to(tl.int64), tl.max(order, axis=0).to(tl.int64)
    for _ in range(BITS):  # the largest threshold that at least ``limit`` candidates reach
        middle = low + (high - low + 1) // 2
        enough = tl.sum((order >= middle).to(tl.int32), axis=0) >= limit
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return tl.sum(tl.where(order >= low, shares, 0.0), axis=0)


@triton.jit
def choose(logits, columns, width, temperature, top_k, top_p, noise):
    """Pick one of ``columns < width``; logits beyond must be -inf. Greedy where the temperature is 0."""
    greedy = temperature <= 0.0
    scaled = tl.div_rn(logits, tl.full(logits.shape, 1.0, tl.float32) * tl.where(greedy, 1.0, temperature))
    noisy = tl.where(greedy, logits, scaled + noise)
    limit = tl.where(greedy | (top_k <= 0), width, tl.minimum(top_k, width).to(tl.int32))
    nucleus = tl.where(greedy | (top_p >= 1.0), float("inf"), top_p)  # probability above a candidate must be below it
    shares = tl.exp(scaled - tl.max(scaled, axis=0))
    total = 1.0
    if nucleus < 1.0:
        total = _top_k_mass(scaled, shares, limit)
    best = tl.argmax(noisy, axis=0)
    waiting = best >= 0
    while waiting:
        logit = tl.sum(tl.where(columns == best, scaled, 0.0), axis=0)
        above = scaled > logit
        waiting = tl.sum(above.to(tl.int32), axis=0) >= limit
        if nucleus < 1.0:
            waiting = waiting | (tl.sum(tl.where(above, shares, 0.0), axis=0) / total >= nucleus)
        if waiting:
            best = tl.argmax(tl.where(above, noisy, float("-inf")), axis=0)
    return best


@triton.jit(do_not_specialize=["step"])
def choose_residual(
    logits, temperature, top_k, top_p, keys, table, x, squares, codes, step,
    WIDTH: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, STEPS: tl.constexpr, EXACT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Choose a residual code per row and write the next input row; programs: ``[B]``.

    ``logits [B, WIDTH]``; ``codes [B, STEPS] int64`` gets column ``step``; ``x [B, C]`` gets the row of
    ``table [codebook, WIDTH, C]`` that belongs to the code, where another step follows, and ``squares`` its parts.
    """
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    noise = gumbel_noise(tl.load(keys + row), step + 1, columns, EXACT)
    kept, heat, share = tl.load(top_k + row).to(tl.int32), tl.load(temperature + row), tl.load(top_p + row)
    wait_for_predecessor(EARLY)
    start_successor(EARLY)
    values = tl.load(logits + row * WIDTH + columns).to(tl.float32)
    best = choose(values, columns, WIDTH, heat, kept, share, noise)
    tl.store(codes + row * STEPS + step, best.to(tl.int64))
    if step + 1 < STEPS:
        _write_row(x, squares, row, table + ((step + 1).to(tl.int64) * WIDTH + best) * C, C, BLOCK_C)


@triton.jit(do_not_specialize=["rows"])
def open_rows(
    hidden, code0, table, x, squares, rows,
    WIDTH: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write a frame's first two input rows ``x [2 B, C]``: ``hidden [B, C]``, then rows of ``code0``; programs: [B].

    ``table`` begins with codebook 0's WIDTH rows; a code beyond them (end of speech) reads the last one.
    """
    row = tl.program_id(0)
    wait_for_predecessor(EARLY)
    start_successor(EARLY)
    _write_row(x, squares, row, hidden + row * C, C, BLOCK_C)
    _write_row(x, squares, rows + row, table + tl.minimum(tl.load(code0 + row), WIDTH - 1) * C, C, BLOCK_C)


@triton.jit
def _write_row(x, squares, row, source, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Copy a row into the buffer, and its sum of squares into the first of its parts; the others become zero."""
    place, part = tl.arange(0, BLOCK_C), tl.arange(0, SQUARE_PARTS)
    value = tl.load(source + place, mask=place < C, other=0.0)
    tl.store(x + row * C + place, value, mask=place < C)
    wide = value.to(tl.float32)
    tl.store(squares + row * SQUARE_PARTS + part, tl.where(part == 0, tl.sum(wide * wide, axis=0), 0.0))
