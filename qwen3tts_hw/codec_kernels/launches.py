"""Starting the kernels: block shapes, and arguments in the kernels' order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from qwen3tts_hw.backends.kernels import launch
from qwen3tts_hw.codec_kernels.packing import PackedConv
from qwen3tts_hw.codec_kernels.triton_conv import conv, keep

FULL = 120  # programs that fill a device well enough to stop making blocks smaller
SHARED_BYTES = 200_000  # of a multiprocessor's fast memory, for the tiles under way


@dataclass(frozen=True, slots=True)
class Tile:
    """Block shape of one convolution: steps, columns (a wide tile and a narrower tail), depth."""

    steps: int
    columns: int
    tail: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Result:
    """Where a convolution's results go: ``raw`` float32 rows, ``words`` of the activated values, or both.

    ``add``: raw holds what they are added to; without ``store`` the sum is not written back. ``activation``: "", "gelu"
    or "snake" with its two factors.
    """

    raw: Tensor | None = None
    add: bool = False
    store: bool = True
    words: Tensor | None = None
    activation: str = ""
    snake: tuple[Tensor, Tensor] | None = None


def tile_of(rows: int, packed: PackedConv) -> Tile:
    """The largest block shape that still gives the device enough programs."""
    columns, form = packed.columns, packed.format
    if rows <= 64:
        steps = 16 if rows <= 16 else 64
        shapes = [(steps, 32, 0), (steps, 16, 0)]
    else:
        shapes = [(128, 128, 64)] if form.input_words == 1 else []
        shapes += [(128, 128, 0), (128, 64, 32), (64, 64, 0), (64, 64, 32), (64, 32, 0)]
    shapes = [shape for shape in shapes if columns % (shape[1] + shape[2]) == 0]
    chosen = shapes[-1]
    for shape in shapes:
        if triton.cdiv(rows, shape[0]) * (columns // (shape[1] + shape[2])) >= FULL:
            chosen = shape
            break
    steps, main, tail = chosen
    depth = 64 if packed.channels % 64 == 0 and chosen != (128, 64, 32) else 32
    stage = 2 * depth * (steps * form.input_words + (main + tail) * form.weight_words)
    stages = max(2, min(5 - form.input_words, SHARED_BYTES // stage))
    warps = 8 if steps == 128 and (main == 128 or form.input_words == 1) else 4
    return Tile(steps, main, tail, depth, warps, stages)


def launch_conv(
    packed: PackedConv,
    x: Tensor,
    length: int,
    to: Result,
    *,
    slots: Tensor,
    past: Tensor | None = None,
) -> None:
    """Run ``packed`` over ``x [rows, input_words, C]``, rows of ``length`` steps per stream; see :func:`.conv`."""
    rows = x.shape[0]
    tile = tile_of(rows, packed)
    columns = packed.columns if to.raw is None else to.raw.shape[1]  # fewer than computed: the first ones are kept
    words = to.words if to.words is not None else x
    raw = to.raw if to.raw is not None else packed.bias
    frequency, magnitude = to.snake or (packed.bias, packed.bias)
    launch(
        conv, (packed.columns // (tile.columns + tile.tail), triton.cdiv(rows, tile.steps)),
        x, x if past is None else past, slots, packed.words, packed.scale, packed.bias, raw, raw, words, frequency,
        magnitude, rows, length, packed.dilation,
        C=packed.channels, WIDTH=columns // packed.phases, COLUMNS=columns, TAPS=packed.taps,
        A=packed.format.input_words, W=packed.format.weight_words,
        STORE=to.raw is not None and to.store, RESIDUAL=to.add, ACTIVATION=to.activation,
        TERMS=0 if to.words is None else words.shape[1],
        BLOCK_M=tile.steps, BLOCK_N=tile.columns, TAIL_N=tile.tail, BLOCK_K=tile.depth,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def launch_keep(x: Tensor, length: int, past: Tensor, slots: Tensor) -> None:
    """Keep the last steps of ``x [rows, ...]`` in ``past [slots, history, ...]`` for the next call."""
    history, row = past.shape[1], past[0, 0].numel()
    block_h = triton.next_power_of_2(history)
    block = max(32, min(triton.next_power_of_2(row), 4_096 // block_h))
    launch(
        keep, (len(slots), triton.cdiv(row, block)),
        x, past, slots, length, HISTORY=history, ROW=row, BLOCK_H=block_h, BLOCK=block, num_warps=4,
    )  # fmt: skip


class Workspace:
    """Three buffers that every call uses again: raw rows, and two of words between which layers alternate."""

    def __init__(self, raw_bytes: int, words_bytes: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._raw = torch.zeros(raw_bytes, dtype=torch.uint8, device=device)
            self._words = [torch.zeros(words_bytes, dtype=torch.uint8, device=device) for _ in range(2)]

    def raw(self, rows: int, columns: int) -> Tensor:
        """Float32 rows ``[rows, columns]``."""
        return _view(self._raw, (rows, columns), torch.float32)

    def side(self, index: int, rows: int, columns: int) -> Tensor:
        """Float32 rows in the memory of a words buffer that is not in use."""
        return _view(self._words[index], (rows, columns), torch.float32)

    def words(self, index: int, rows: int, packed: PackedConv) -> Tensor:
        """Input words of ``packed``: ``[rows, input_words, C]``."""
        form = packed.format
        return _view(self._words[index], (rows, form.input_words, packed.channels), form.dtype)


def _view(buffer: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = dtype.itemsize
    for size in shape:
        count *= size
    return buffer[:count].view(dtype).view(shape)
