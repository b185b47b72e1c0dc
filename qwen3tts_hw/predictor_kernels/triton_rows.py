"""What stands between matrix products of many rows, which the vendor's library computes: one program per row.

Roundings as in the plain form.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qwen3tts_hw.predictor_kernels.triton_linear import (
    gate_and_up,
    normalised,
    start_successor,
    wait_for_predecessor,
)


@triton.jit
def add_and_norm(
    x, added, norm, out, eps, C: tl.constexpr, BLOCK_C: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr
):
    """``x [R, C] += added`` in place, where there is something to add; ``out [R, C]`` becomes the normalised row."""
    start_successor(EARLY)
    columns = tl.arange(0, BLOCK_C)
    inside = columns < C
    places = tl.program_id(0) * C + columns
    weight = tl.load(norm + columns, mask=inside, other=0.0)
    wait_for_predecessor(EARLY)
    value = tl.load(x + places, mask=inside, other=0.0)
    if ADD:
        more = tl.load(added + places, mask=inside, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
        tl.store(x + places, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / C + eps)
    tl.store(out + places, normalised(value, scale, weight), mask=inside)


@triton.jit
def gate_rows(wide, out, N: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr):
    """``out [R, N] = silu(gate) * up`` of ``wide [R, 2 N]``, gates first; programs: ``[R, N / BLOCK_N]``."""
    start_successor(EARLY)
    row, outputs = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = outputs < N
    wait_for_predecessor(EARLY)
    gate = tl.load(wide + row * 2 * N + outputs, mask=inside, other=0.0)
    up = tl.load(wide + row * 2 * N + N + outputs, mask=inside, other=0.0)
    tl.store(out + row * N + outputs, gate_and_up(gate, up), mask=inside)
