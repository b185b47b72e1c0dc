"""Causal convolutions as matrix products on the matrix units, with their activation, bias and residual fused in.

Activations are channels-last rows of *words*: a float32 value is kept as one or two 16-bit floats whose sum it is, all
first words of a row before all second words, so that the kernel reads operands and nothing else. Two words each of
input and weight give three products (first by first, first by second, second by first) and about 16 bits; the fourth is
below rounding. Sums are float32. A tap that lies before the call's first step is read from the stream's history.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _multiply(a0, a1, weights, row, k, total, TAPS: tl.constexpr, C: tl.constexpr, A: tl.constexpr, W: tl.constexpr):
    """Add the products of an input tile ``[M, K]`` (words a0, a1) and a weight tile at ``row [N]``, ``k [K]``."""
    places = weights + row[None, :] * (TAPS * W * C) + k[:, None]
    w0 = tl.load(places)
    total = tl.dot(a0, w0, total)
    if W == 2:
        total = tl.dot(a0, tl.load(places + C), total)
    if A == 2:
        total = tl.dot(a1, w0, total)
    return total


@triton.jit
def snake(value, frequency, magnitude):
    """``x + sin(x * frequency)^2 * magnitude``: squared sines repeat after half a turn, a polynomial does the rest.

    The half turn is subtracted in two parts, so that phases up to some thousands keep 6 digits; the error of the
    polynomial is below 1e-8.
    """
    phase = value * frequency
    turns = tl.floor(phase * 0.3183098861837907 + 0.5)
    phase = (phase - turns * 3.140625) - turns * 0.0009676535897932
    square = phase * phase
    series = 2.7526e-6 - 2.39e-8 * square
    series = -1.98409e-4 + series * square
    series = 8.3333315e-3 + series * square
    series = -1.666666664e-1 + series * square
    sine = phase + phase * square * series
    return value + sine * sine * magnitude


@triton.jit
def store_words(out, places, value, inside, C: tl.constexpr, TERMS: tl.constexpr):
    """Write float32 values as one or two words; ``places`` point at the first."""
    if out.dtype.element_ty == tl.float16:
        value = tl.minimum(tl.maximum(value, -65504.0), 65504.0)  # a float16 word saturates rather than overflows
    first = value.to(out.dtype.element_ty)
    tl.store(out + places, first, mask=inside)
    if TERMS == 2:
        tl.store(out + places + C, (value - first.to(tl.float32)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _finish(
    total, scale, m, n, rows, bias, residual, out, activated, frequency, magnitude,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    STORE: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Bias, residual, activation and stores of a tile ``[M, N]`` of sums; column ``n`` is channel ``n % WIDTH``."""
    channel = n % WIDTH
    inside = (m < rows)[:, None] & (n < COLUMNS)[None, :]
    value = total * scale + tl.load(bias + n)[None, :]
    places = m.to(tl.int64)[:, None] * COLUMNS + n[None, :]
    if RESIDUAL:
        value += tl.load(residual + places, mask=inside, other=0.0)
    if STORE:
        tl.store(out + places, value, mask=inside)
    if TERMS > 0:
        if ACTIVATION == "snake":
            value = snake(value, tl.load(frequency + channel)[None, :], tl.load(magnitude + channel)[None, :])
        elif ACTIVATION == "gelu":
            value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
        position = (m.to(tl.int64) * (COLUMNS // WIDTH))[:, None] + (n // WIDTH)[None, :]
        store_words(activated, position * (TERMS * WIDTH) + channel[None, :], value, inside, WIDTH, TERMS)


@triton.jit
def _convolve(
    x, past, slots, weights, m, first, rows, length, dilation,
    C: tl.constexpr, TAPS: tl.constexpr, A: tl.constexpr, W: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums ``[BLOCK_M, BLOCK_N]`` and ``[BLOCK_M, TAIL_N]`` of steps ``m`` and the columns from ``first`` on."""
    taken = tl.minimum(m, rows - 1)
    step = taken % length
    here = x + taken.to(tl.int64) * (A * C)
    if TAPS > 1:
        history = (TAPS - 1) * dilation
        before = past + (tl.load(slots + taken // length) * history + history + step) * (A * C)
    chunks: tl.constexpr = C // BLOCK_K
    n0 = first + tl.arange(0, BLOCK_N)
    total0 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total1 = total0
    if TAIL_N > 0:
        n1 = first + BLOCK_N + tl.arange(0, TAIL_N)
        total1 = tl.zeros([BLOCK_M, TAIL_N], tl.float32)
    for index in range(TAPS * chunks):
        tap = index // chunks
        k = (index % chunks) * BLOCK_K + tl.arange(0, BLOCK_K)
        if TAPS > 1:
            back = (TAPS - 1 - tap) * dilation
            places = tl.where(step >= back, here, before) - back * (A * C)
        else:
            places = here
        a0 = tl.load(places[:, None] + k[None, :])
        a1 = a0
        if A == 2:
            a1 = tl.load(places[:, None] + (k + C)[None, :])
        total0 = _multiply(a0, a1, weights, n0, k + tap * (W * C), total0, TAPS, C, A, W)
        if TAIL_N > 0:
            total1 = _multiply(a0, a1, weights, n1, k + tap * (W * C), total1, TAPS, C, A, W)
    return total0, total1


@triton.jit(do_not_specialize=["rows", "length", "dilation"])
def conv(
    x, past, slots, weights, scale, bias, residual, out, activated, frequency, magnitude, rows, length, dilation,
    C: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TAPS: tl.constexpr, A: tl.constexpr, W: tl.constexpr,
    STORE: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, TERMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of a causal convolution over ``rows`` = streams * ``length`` steps of ``x [rows, A, C]``.

    ``past [slots, (TAPS - 1) * dilation, A, C]``; ``weights [COLUMNS, TAPS, W, C]``, times ``scale``; results of a step
    are ``COLUMNS`` = phases * ``WIDTH`` columns: raw in ``out [rows, COLUMNS]``, activated in ``activated [rows *
    phases, TERMS, WIDTH]``. Programs: ``[COLUMNS / (BLOCK_N + TAIL_N), rows / BLOCK_M]``; the tail is a second,
    narrower tile, because widths here are odd multiples of powers of two.
    """
    first = tl.program_id(0) * (BLOCK_N + TAIL_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    total0, total1 = _convolve(
        x, past, slots, weights, m, first, rows, length, dilation, C, TAPS, A, W, BLOCK_M, BLOCK_N, TAIL_N, BLOCK_K
    )
    _finish(
        total0, scale, m, first + tl.arange(0, BLOCK_N), rows, bias, residual, out, activated, frequency, magnitude,
        WIDTH, COLUMNS, STORE, RESIDUAL, ACTIVATION, TERMS,
    )  # fmt: skip
    if TAIL_N > 0:
        _finish(
            total1, scale, m, first + BLOCK_N + tl.arange(0, TAIL_N), rows, bias, residual, out, activated, frequency,
            magnitude, WIDTH, COLUMNS, STORE, RESIDUAL, ACTIVATION, TERMS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "length"])
def add_taps(
    x, past, slots, bias, out, rows, length, COLUMNS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """``out [rows]``: the products ``x [rows, COLUMNS]`` of tap j, from as many steps back as tap j looks, added up.

    ``past [slots, TAPS - 1, COLUMNS]``. Programs: ``[rows / BLOCK]``.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    taken = tl.minimum(row, rows - 1)
    step = taken % length
    here = x + taken * COLUMNS
    before = past + (tl.load(slots + taken // length) * (TAPS - 1) + TAPS - 1 + step) * COLUMNS
    value = tl.zeros([BLOCK], tl.float32) + tl.load(bias)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        value += tl.load(tl.where(step >= back, here, before) - back * COLUMNS + tap)
    tl.store(out + row, value, mask=row < rows)


@triton.jit(do_not_specialize=["length"])
def keep(x, past, slots, length, HISTORY: tl.constexpr, ROW: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr):
    """Move the last ``HISTORY`` steps of each stream, ``ROW`` words each, into its history.

    Programs: ``[R, ROW / BLOCK]``.

    Old steps move up if the call had fewer than ``HISTORY``; every program reads all it needs before it writes.
    """
    stream = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + stream)
    index = tl.arange(0, BLOCK_H)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = index + length - HISTORY  # in the call's steps; negative: in the history
    inside = (index < HISTORY)[:, None] & (column < ROW)[None, :]
    old = past + slot * (HISTORY * ROW)
    new = x + stream * length * ROW
    places = tl.where(source >= 0, new + source * ROW, old + (index + length) * ROW)
    value = tl.load(places[:, None] + column[None, :], mask=inside, other=0.0)
    tl.debug_barrier()
    tl.store(old + index[:, None] * ROW + column[None, :], value, mask=inside)
