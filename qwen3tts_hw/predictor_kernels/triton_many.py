"""Matrix products for many rows: tiles on the matrix units, whose weights are on their way before the input is there.

All rows of a product, up to a block of them, are one program's, and the outputs are shared out over the programs, so
every weight is read once. Where outputs are too few to keep the device busy, the columns are shared out as well: each
program then leaves a part of the sum in float32, and :func:`.triton_rows.sum_and_norm`, which reads the rows next, adds
the parts in a fixed order. Before a program waits for its input, it asks for its weights to be fetched into the
device's cache. Roundings as in the plain form.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qwen3tts_hw.predictor_kernels.triton_linear import gate_and_up, start_successor, wait_for_predecessor

FETCH = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;")


@triton.jit
def _fetch(weights, first, N: tl.constexpr, STRIDE: tl.constexpr, BYTES: tl.constexpr, LANES: tl.constexpr,
           BLOCK_N: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Fetch BYTES of rows ``first .. first + BLOCK_N`` of a matrix into the cache, a piece of a row per lane."""
    if EARLY:
        PIECES: tl.constexpr = LANES // BLOCK_N if LANES > BLOCK_N else 1
        lane = tl.arange(0, PIECES * BLOCK_N)
        row = tl.minimum(first + lane // PIECES, N - 1)
        size: tl.constexpr = BYTES // PIECES
        if size % 16 == 0:
            width: tl.constexpr = weights.dtype.element_ty.primitive_bitwidth // 8
            places = weights + row * STRIDE + (lane % PIECES) * (size // width)
            tl.inline_asm_elementwise(FETCH, "=r,l,r", [places, size], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["rows"])
def linear_many(
    x, weights, out, rows,
    K: tl.constexpr, N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``x [R, K] · weights [N, K]ᵀ``; programs: ``[N / BLOCK_N, K / (CHUNKS * BLOCK_K), R / BLOCK_R]``.

    ``out [R, N]`` in the model's dtype, or ``[PARTS, R, N] float32`` where there are any.
    """
    start_successor(EARLY)
    begin = tl.program_id(1) * (CHUNKS * BLOCK_K)
    first = tl.program_id(0) * BLOCK_N
    WIDTH: tl.constexpr = weights.dtype.element_ty.primitive_bitwidth // 8
    EVEN: tl.constexpr = (PARTS if PARTS > 0 else 1) * CHUNKS * BLOCK_K == K
    _fetch(weights + begin, first, N, K, CHUNKS * BLOCK_K * WIDTH, LANES, BLOCK_N, EARLY and EVEN)
    outputs = first + tl.arange(0, BLOCK_N)
    taken = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    wait_for_predecessor(EARLY)
    total = _tile(
        x, weights, taken, rows, outputs, outputs < N, begin, K, BLOCK_R, BLOCK_N, BLOCK_K, CHUNKS, STAGES, EVEN
    )
    place = taken + tl.program_id(1) * rows
    inside = (taken < rows)[:, None] & (outputs < N)[None, :]
    tl.store(out + place[:, None] * N + outputs[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gated_many(
    x, weights, out, rows,
    K: tl.constexpr, N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr, STAGES: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``out [R, N] = silu(gate) * up`` of ``x · weights [2 N, K]ᵀ``; programs: ``[N / BLOCK_N, 1, R / BLOCK_R]``."""
    start_successor(EARLY)
    first = tl.program_id(0) * BLOCK_N
    WIDTH: tl.constexpr = weights.dtype.element_ty.primitive_bitwidth // 8
    EVEN: tl.constexpr = CHUNKS * BLOCK_K == K
    _fetch(weights, first, N, K, K * WIDTH, LANES, BLOCK_N, EARLY and EVEN)
    _fetch(weights + N * K, first, N, K, K * WIDTH, LANES, BLOCK_N, EARLY and EVEN)
    place = tl.arange(0, 2 * BLOCK_N)  # gate and up of one output are neighbours
    outputs = first + place // 2
    taken = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    wait_for_predecessor(EARLY)
    total = _tile(
        x, weights, taken, rows, outputs + (place % 2) * N, outputs < N, 0, K, BLOCK_R, 2 * BLOCK_N, BLOCK_K, CHUNKS,
        STAGES, EVEN,
    )  # fmt: skip
    paired = tl.reshape(total, [BLOCK_R, BLOCK_N, 2]).to(x.dtype.element_ty)
    gate, up = tl.split(paired)
    written = first + tl.arange(0, BLOCK_N)
    inside = (taken < rows)[:, None] & (written < N)[None, :]
    tl.store(out + taken[:, None] * N + written[None, :], gate_and_up(gate, up), mask=inside)


@triton.jit
def _tile(
    x, weights, taken, rows, outputs, inside, begin,
    K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_R, BLOCK_N] float32``: sums over the columns from ``begin``."""
    columns = begin + tl.arange(0, BLOCK_K)
    inputs = x + taken[:, None] * K + columns[None, :]
    slab = weights + outputs[:, None] * K + columns[None, :]
    live, kept = (taken < rows)[:, None], inside[:, None]
    total = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
        shift = chunk * BLOCK_K
        if EVEN:
            value = tl.load(inputs + shift, mask=live, other=0.0)
            weight = tl.load(slab + shift, mask=kept, other=0.0)
        else:
            within = (columns + shift < K)[None, :]
            value = tl.load(inputs + shift, mask=live & within, other=0.0)
            weight = tl.load(slab + shift, mask=kept & within, other=0.0)
        total = tl.dot(value, tl.trans(weight), total, input_precision="ieee")
    return total
