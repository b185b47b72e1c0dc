"""Matrix products for one row or a few: slabs of weights in registers, multiplied on the scalar units.

What stands before and behind a product is fused in. Rounding is where the plain form rounds: norm statistics in
float32, cast, then the norm's weight; products accumulate in float32 and are cast before anything is added to them.
Also the device functions that all kernels of the predictor share.

A norm needs the sum of squares of its whole input row. Whoever writes a row also writes that sum, in up to
``SQUARE_PARTS`` parts that are always added in the same order, so that readers need not read the row twice.

``EARLY`` lets a kernel start while its predecessor still runs (programmatic dependent launch): nothing but weights may
be read before ``wait_for_predecessor``, nothing may be written before it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SQUARE_PARTS = tl.constexpr(64)


@triton.jit
def start_successor(EARLY: tl.constexpr):
    """Let the next kernel start loading its weights."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_predecessor(EARLY: tl.constexpr):
    """Wait until everything before this kernel is done."""
    if EARLY:
        gdc_wait()


@triton.jit
def normalised(x, scale, weight):
    """Scale in float32, cast back, then apply the norm's weight in the model's dtype."""
    return ((x.to(tl.float32) * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def row_scales(squares, taken, rows, eps, K: tl.constexpr):
    """Reciprocal root mean squares of input rows, from the parts of their sums of squares."""
    places = squares + taken[:, None] * SQUARE_PARTS + tl.arange(0, SQUARE_PARTS)[None, :]
    parts = tl.load(places, mask=(taken < rows)[:, None], other=0.0)
    return tl.rsqrt(tl.sum(parts, axis=1) / K + eps)


@triton.jit
def store_square_parts(squares, taken, rows, values):
    """Write this program's part of the sums of squares of ``values [rows, outputs]``, as rounded when stored."""
    wide = values.to(tl.float32)
    tl.store(squares + taken * SQUARE_PARTS + tl.program_id(0), tl.sum(wide * wide, axis=1), mask=taken < rows)


@triton.jit
def gate_and_up(gate, up):
    """``silu(gate) * up``, each step rounded to the model's dtype."""
    wide = gate.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (opened.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _load_slab(weights, outputs, columns, K: tl.constexpr, N: tl.constexpr, EVEN: tl.constexpr):
    """Rows ``outputs`` of a weight matrix ``[N, K]``, whole; zeros outside."""
    places = weights + outputs[:, None] * K + columns[None, :]
    if EVEN:
        return tl.load(places, eviction_policy="evict_first")
    return tl.load(places, mask=(outputs < N)[:, None] & (columns < K)[None, :], other=0.0)


@triton.jit
def _input_row(x, row, columns, norm_weight, eps, K: tl.constexpr, NORM: tl.constexpr):
    """One input row in float32 holding values of the model's dtype, normalised if asked for."""
    value = tl.load(x + row * K + columns, mask=columns < K, other=0.0)
    if NORM:
        wide = value.to(tl.float32)
        value = normalised(value, tl.rsqrt(tl.sum(wide * wide, axis=0) / K + eps), norm_weight)
    return value.to(tl.float32)


@triton.jit
def linear_few(
    x, norm, weights, bias, out, eps,
    K: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``out [R, N] (+)= norm(x [R, K]) · weightsᵀ (+ bias)`` for R = ROWS; programs: ``[N / BLOCK_N]``."""
    start_successor(EARLY)
    columns = tl.arange(0, BLOCK_K)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = outputs < N
    slab = _load_slab(weights, outputs, columns, K, N, BLOCK_K == K and N % BLOCK_N == 0)
    norm_weight = tl.load(norm + columns, mask=columns < K, other=0.0) if NORM else 0.0
    added = tl.load(bias + outputs, mask=inside, other=0.0).to(tl.float32) if BIAS else 0.0
    wait_for_predecessor(EARLY)
    for row in tl.static_range(ROWS):
        value = _input_row(x, row, columns, norm_weight, eps, K, NORM)
        result = (tl.sum(slab.to(tl.float32) * value[None, :], axis=1) + added).to(slab.dtype)
        places = out + row * N + outputs
        if RESIDUAL:
            result = (tl.load(places, mask=inside).to(tl.float32) + result.to(tl.float32)).to(slab.dtype)
        tl.store(places, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_few(
    x, norm, weights, out, eps,
    K: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """``out [R, N] = silu(gate) * up`` of ``norm(x [R, K]) · weights [2 N, K]ᵀ``; programs: ``[N / BLOCK_N]``."""
    start_successor(EARLY)
    columns = tl.arange(0, BLOCK_K)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    even: tl.constexpr = BLOCK_K == K and N % BLOCK_N == 0
    gates = _load_slab(weights, outputs, columns, K, N, even)
    ups = _load_slab(weights + N * K, outputs, columns, K, N, even)
    norm_weight = tl.load(norm + columns, mask=columns < K, other=0.0)
    wait_for_predecessor(EARLY)
    for row in tl.static_range(ROWS):
        value = _input_row(x, row, columns, norm_weight, eps, K, True)
        gate = tl.sum(gates.to(tl.float32) * value[None, :], axis=1).to(gates.dtype)
        up = tl.sum(ups.to(tl.float32) * value[None, :], axis=1).to(gates.dtype)
        tl.store(out + row * N + outputs, gate_and_up(gate, up), mask=outputs < N)
