"""The two ends of a frame step over the slot table: choosing code 0, and writing the finished frame.

The same rules as the plain frame step, one program per row. A row that must not make a frame writes nothing at all, so
no scratch slot is touched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qwen3tts_hw.predictor_kernels.triton_linear import start_successor, wait_for_predecessor
from qwen3tts_hw.predictor_kernels.triton_sampling import choose, frame_key, gumbel_noise


@triton.jit
def begin_frame(
    logits, slots, frontier, prompt_rows, seen, floats, integers, choice, key, temperature, top_k, top_p,
    end_token, logits_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, MIN_FRAMES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Choose codebook 0's code per row: ``choice [B] int64``, WIDTH = end of speech; programs: ``[B]``.

    Also writes the frame's noise ``key [B] int32`` and the residual codes' sampling parameters, ``[B]`` each. ``floats
    [S, 5]`` and ``integers [S, 4]`` are the slot table's packed parameters, ``seen [S, WIDTH + 1]`` the codes so far.
    """
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    values, counts = floats + slot * 5, integers + slot * 4
    frame = (tl.load(frontier + slot) - tl.load(prompt_rows + slot)).to(tl.int32)
    seed_low, seed_high = tl.load(counts + 2).to(tl.uint32), tl.load(counts + 3).to(tl.uint32)
    frame_hash = frame_key(seed_low, seed_high, frame.to(tl.uint32))
    token = tl.where(columns < WIDTH, columns, end_token)
    legal = (columns < WIDTH) | ((columns == WIDTH) & (frame >= MIN_FRAMES))
    logit = tl.load(logits + row * logits_stride + token, mask=columns <= WIDTH, other=0.0).to(tl.float32)
    repeated = tl.load(seen + slot * (WIDTH + 1) + columns, mask=columns <= WIDTH, other=0) != 0
    penalty = tl.full([BLOCK], 1.0, tl.float32) * tl.load(values + 4)
    logit = tl.where(repeated, tl.where(logit < 0.0, logit * penalty, tl.div_rn(logit, penalty)), logit)
    logit = tl.where(legal, logit, float("-inf"))
    noise = gumbel_noise(frame_hash, tl.full([], 0, tl.int32), columns, EXACT)
    kept = tl.load(counts).to(tl.int32)
    best = choose(logit, columns, WIDTH + 1, tl.load(values), kept, tl.load(values + 1), noise)
    tl.store(choice + row, best.to(tl.int64))
    tl.store(key + row, frame_hash.to(tl.int32, bitcast=True))
    tl.store(temperature + row, tl.load(values + 2))
    tl.store(top_k + row, tl.load(counts + 1))
    tl.store(top_p + row, tl.load(values + 3))


@triton.jit
def finish_frame(
    choice, residual, slots, positions, codes, frontier, prompt_rows, max_frames, ended, seen, tokens,
    end_token, max_positions,
    WIDTH: tl.constexpr, CODEBOOKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the frames that are due and return codebook 0's ``tokens [B] int64``; programs: ``[B]``."""
    row = tl.program_id(0)
    books = tl.arange(0, CODEBOOKS)
    wait_for_predecessor(EARLY)
    start_successor(EARLY)
    slot, target, chosen = tl.load(slots + row), tl.load(positions + row) + 1, tl.load(choice + row)
    front, start = tl.load(frontier + slot), tl.load(prompt_rows + slot)
    due = (target == front) & (tl.load(ended + slot) == 0)
    is_end = chosen == WIDTH
    makes = due & (chosen != WIDTH)
    code0 = tl.minimum(chosen, WIDTH - 1)
    place = codes + (slot * max_positions + tl.minimum(target, max_positions - 1)) * CODEBOOKS
    known = tl.where(makes, code0, tl.load(place).to(tl.int64))
    later = tl.load(residual + row * (CODEBOOKS - 1) + books - 1, mask=books > 0, other=0)
    is_last = front + 1 - start >= tl.load(max_frames + slot)
    written = tl.where(makes, CODEBOOKS, 0)
    tl.debug_barrier()  # every thread has read what is written from here on
    tl.store(place + books, tl.where(books == 0, code0, later).to(tl.int16), mask=books < written)
    tl.store(seen + slot * (WIDTH + 1) + code0, 1, mask=makes)
    tl.store(frontier + slot, target + 1, mask=makes)
    tl.store(ended + slot, 1, mask=due & (is_end | is_last))
    reached = tl.where(makes, target + 1, front)
    tl.store(tokens + row, tl.where((target < reached) & (known >= 0), known, end_token))
