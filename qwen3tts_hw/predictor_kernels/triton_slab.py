"""Matrix products for some rows (2 to 8): slabs of weights in registers, multiplied on the matrix units.

Every program holds its rows of the weight matrix whole, in up to four chunks of columns, loaded before it waits for its
input. A chunk is cut into as many pieces as the program has warps; each warp multiplies its piece, and the pieces' sums
are added in the end. Roundings and sums of squares as in :mod:`.triton_linear`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qwen3tts_hw.predictor_kernels.triton_linear import (
    gate_and_up,
    normalised,
    row_scales,
    start_successor,
    store_square_parts,
    wait_for_predecessor,
)


@triton.jit
def _columns(start, PIECES: tl.constexpr, DEPTH: tl.constexpr):
    """Column numbers ``[PIECES, DEPTH]`` of a chunk."""
    return start + tl.arange(0, PIECES)[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]


@triton.jit
def _chunk(weights, outputs, inside, start, K: tl.constexpr, PIECES: tl.constexpr, DEPTH: tl.constexpr):
    """Weights ``[PIECES, outputs, DEPTH]`` of the columns from ``start``; zeros outside."""
    columns = _columns(start, PIECES, DEPTH)[:, None, :]
    places = weights + outputs[None, :, None] * K + columns
    return tl.load(places, mask=inside[None, :, None] & (columns < K), other=0.0, eviction_policy="evict_first")


@triton.jit
def _multiplied(
    total, chunk, x, taken, rows, norm, scales, start,
    K: tl.constexpr, PIECES: tl.constexpr, DEPTH: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """``total [PIECES, outputs, rows]`` plus the products of one chunk with the input's columns."""
    columns = _columns(start, PIECES, DEPTH)
    inside = (columns < K)[:, :, None] & (taken < rows)[None, None, :]
    value = tl.load(x + taken[None, None, :] * K + columns[:, :, None], mask=inside, other=0.0)
    if NORM:
        weight = tl.load(norm + columns, mask=columns < K, other=0.0)
        value = normalised(value, scales[None, None, :], weight[:, :, None])
    return tl.dot(chunk, value, total, input_precision="ieee")


@triton.jit
def _product(
    x, squares, norm, weights, outputs, inside, taken, eps, rows,
    K: tl.constexpr, PIECES: tl.constexpr, DEPTH: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``norm(x) · weights[outputs]ᵀ`` as ``[outputs, rows]`` float32; waits for the predecessor on the way."""
    CHUNK: tl.constexpr = PIECES * DEPTH
    tl.static_assert(K <= 4 * CHUNK)
    first = _chunk(weights, outputs, inside, 0, K, PIECES, DEPTH)
    second, third, fourth = first, first, first
    if K > CHUNK:
        second = _chunk(weights, outputs, inside, CHUNK, K, PIECES, DEPTH)
    if K > 2 * CHUNK:
        third = _chunk(weights, outputs, inside, 2 * CHUNK, K, PIECES, DEPTH)
    if K > 3 * CHUNK:
        fourth = _chunk(weights, outputs, inside, 3 * CHUNK, K, PIECES, DEPTH)
    wait_for_predecessor(EARLY)
    scales = row_scales(squares, taken, rows, eps, K) if NORM else 0.0
    total = tl.zeros([PIECES, outputs.shape[0], taken.shape[0]], tl.float32)
    total = _multiplied(total, first, x, taken, rows, norm, scales, 0, K, PIECES, DEPTH, NORM)
    if K > CHUNK:
        total = _multiplied(total, second, x, taken, rows, norm, scales, CHUNK, K, PIECES, DEPTH, NORM)
    if K > 2 * CHUNK:
        total = _multiplied(total, third, x, taken, rows, norm, scales, 2 * CHUNK, K, PIECES, DEPTH, NORM)
    if K > 3 * CHUNK:
        total = _multiplied(total, fourth, x, taken, rows, norm, scales, 3 * CHUNK, K, PIECES, DEPTH, NORM)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["rows"])
def linear_some(
    x, squares, norm, weights, out, eps, rows,
    K: tl.constexpr, N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
    DEPTH: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``out [R, N] (+)= norm(x [R, K]) · weightsᵀ`` for R <= BLOCK_R; programs: ``[N / BLOCK_N]``."""
    start_successor(EARLY)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    taken = tl.arange(0, BLOCK_R)
    total = _product(x, squares, norm, weights, outputs, outputs < N, taken, eps, rows, K, PIECES, DEPTH, NORM, EARLY)
    result = tl.trans(total).to(x.dtype.element_ty)
    places = out + taken[:, None] * N + outputs[None, :]
    inside = (taken < rows)[:, None] & (outputs < N)[None, :]
    if RESIDUAL:
        result = (tl.load(places, mask=inside, other=0.0).to(tl.float32) + result.to(tl.float32)).to(result.dtype)
        store_square_parts(squares, taken, rows, result)
    tl.store(places, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def gated_some(
    x, squares, norm, weights, out, eps, rows,
    K: tl.constexpr, N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr,
    DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``out [R, N] = silu(gate) * up`` of ``norm(x) · weights [2 N, K]ᵀ``; programs: ``[N / BLOCK_N]``."""
    start_successor(EARLY)
    place = tl.arange(0, 2 * BLOCK_N)  # gate and up of one output are neighbours
    outputs = tl.program_id(0) * BLOCK_N + place // 2
    both = outputs + (place % 2) * N
    taken = tl.arange(0, BLOCK_R)
    total = _product(x, squares, norm, weights, both, outputs < N, taken, eps, rows, K, PIECES, DEPTH, True, EARLY)
    paired = tl.reshape(tl.trans(total), [BLOCK_R, BLOCK_N, 2]).to(x.dtype.element_ty)
    gate, up = tl.split(paired)
    written = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (taken < rows)[:, None] & (written < N)[None, :]
    tl.store(out + taken[:, None] * N + written[None, :], gate_and_up(gate, up), mask=inside)
