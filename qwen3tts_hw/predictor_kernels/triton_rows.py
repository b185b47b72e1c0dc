"""What stands between matrix products of many rows: one program per row.

Roundings as in the plain form.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qwen3tts_hw.predictor_kernels.triton_linear import normalised, start_successor, wait_for_predecessor


@triton.jit(do_not_specialize=["rows"])
def sum_and_norm(
    x, parts, norm, out, rows, eps, C: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr
):
    """``x [R, C] +=`` the sum of ``parts [PARTS, rows, C] float32``; ``out [R, C]`` becomes the normalised row.

    ``parts`` points at the first of the R rows; the sum is rounded before it is added.
    """
    start_successor(EARLY)
    columns = tl.arange(0, BLOCK_C)
    inside = columns < C
    row = tl.program_id(0)
    places = row * C + columns
    weight = tl.load(norm + columns, mask=inside, other=0.0)
    wait_for_predecessor(EARLY)
    value = tl.load(x + places, mask=inside, other=0.0)
    if PARTS > 0:
        more = tl.load(parts + places, mask=inside, other=0.0)
        for part in tl.static_range(1, PARTS):
            more += tl.load(parts + part * rows * C + places, mask=inside, other=0.0)
        value = (value.to(tl.float32) + more.to(value.dtype).to(tl.float32)).to(value.dtype)
        tl.store(x + places, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / C + eps)
    tl.store(out + places, normalised(value, scale, weight), mask=inside)
