"""The fused form: a frame as a chain of Triton kernels, five per layer and two per codebook.

Built for graphs: launches cost nothing there, and on devices that can start a kernel before its predecessor has ended,
the next kernels' weights are on their way while the current one computes, so that memory never idles. Embeddings are
projected once, when the form is built: choosing a code is then followed by a look-up instead of a matrix product.
Products have three forms: for few rows (:mod:`.triton_linear`), for some (:mod:`.triton_slab`), and for many
(:mod:`.triton_many`), between which kernels of one program per row add and normalise (:mod:`.triton_rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from qwen3tts_hw.backends.kernels import launch
from qwen3tts_hw.errors import UnsupportedError
from qwen3tts_hw.predictor_kernels.base import BegunFrame, LayerWeights, PredictorWeights, SlotTensors
from qwen3tts_hw.predictor_kernels.triton_attention import attend
from qwen3tts_hw.predictor_kernels.triton_frame import begin_frame, finish_frame
from qwen3tts_hw.predictor_kernels.triton_linear import SQUARE_PARTS, gated_few, linear_few
from qwen3tts_hw.predictor_kernels.triton_many import gated_many, linear_many
from qwen3tts_hw.predictor_kernels.triton_rows import sum_and_norm
from qwen3tts_hw.predictor_kernels.triton_sampling import choose_residual, open_rows
from qwen3tts_hw.predictor_kernels.triton_slab import gated_some, linear_some
from qwen3tts_hw.types import CODEBOOK_SIZE, MIN_FRAMES, NUM_CODEBOOKS

STEPS = NUM_CODEBOOKS - 1
KEYS = 16  # rows of a frame's context, a power of two
MOST_FEW_ROWS = 1  # up to which the scalar units keep up with memory
MOST_SOME_ROWS = 8  # up to which a program's input fits beside its slab of weights
FEW_WARPS = 4
FEW_SLAB = 8_192  # 16-bit weights that one program of the few form holds in registers
SOME_WARPS = 4
SOME_OUTPUTS = 32  # of one program's slab
SOME_CHUNK = 1_024  # columns
CHOOSE_WARPS, ATTEND_WARPS = 8, 1


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product of many rows is shared out: outputs and columns of a program, warps, loads under way."""

    outputs: int
    parts: int  # into which the columns are cut
    columns: int  # at a time
    warps: int = 4
    stages: int = 4


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of all products, for up to ``rows`` rows or for blocks of that many, as measured best on an H200."""

    rows: int
    qkv: Tile
    out: Tile
    gate_up: Tile
    down: Tile
    head: Tile


LEAST_TILE_ROWS = 64  # of 16-bit values, which the widest matrix instructions take
TILES = Tiles(
    64, Tile(32, 1, 128, 4, 5), Tile(32, 4, 64), Tile(32, 1, 128, 8), Tile(64, 6, 128), Tile(32, 1, 128)
)  # fmt: skip
WIDE_TILES = Tiles(
    128, Tile(32, 1, 128, 8), Tile(32, 4, 64, 8), Tile(32, 1, 64, 8, 5), Tile(32, 4, 128), Tile(16, 1, 128)
)  # fmt: skip


def tiles_for(rows: int) -> Tiles:
    """The tiles for so many rows."""
    return TILES if rows <= TILES.rows else WIDE_TILES


class FusedForm:
    """Builds :class:`FusedPredictor`; ``early``: the device can start a kernel before its predecessor has ended."""

    name = "fused"

    def __init__(self, *, early: bool) -> None:
        self._early = early

    def build(self, weights: PredictorWeights, max_rows: int) -> FusedPredictor:
        return FusedPredictor(weights, max_rows, early=self._early)


class FusedPredictor:
    """Kernels over one predictor's weights, with the buffers between them. ``max_rows`` bounds the rows of one call."""

    def __init__(self, weights: PredictorWeights, max_rows: int, *, early: bool) -> None:
        self._weights = weights
        self.max_rows = max_rows
        layer, device, dtype = weights.layers[0], weights.norm.device, weights.norm.dtype
        self.width, self.inner = layer.down.shape
        self.head_dim = weights.cos.shape[-1]
        self._check(weights.num_heads // weights.num_kv_heads)
        self.exact = not triton.knobs.runtime.interpret  # the interpreter has no device library
        self._most_some_rows = MOST_SOME_ROWS if dtype.itemsize == 2 else MOST_FEW_ROWS  # wider slabs do not fit
        self._early = early
        self._launch: dict[str, Any] = {"launch_pdl": True} if self._early else {}
        new, rows = torch.empty, 2 * max_rows
        self._x = new(rows, self.width, device=device, dtype=dtype)
        self._packed = new(rows, layer.qkv.shape[0], device=device, dtype=dtype)
        self._attended = new(rows, layer.out.shape[1], device=device, dtype=dtype)
        self._gated = new(rows, self.inner, device=device, dtype=dtype)
        self._squares = torch.zeros(rows, SQUARE_PARTS.value, device=device, dtype=torch.float32)
        self._logits = new(max_rows, CODEBOOK_SIZE, device=device, dtype=dtype)
        most_parts = max(tile.parts for tiles in (TILES, WIDE_TILES) for tile in (tiles.out, tiles.down))
        self._parts = new(most_parts, rows, self.width, device=device, dtype=torch.float32)
        self._parts_left = 0  # that are still to be added to the rows
        self._normed = new(rows, self.width, device=device, dtype=dtype)
        cache = (len(weights.layers), 2, max_rows, weights.num_kv_heads, KEYS, self.head_dim)
        self._cache = torch.zeros(cache, device=device, dtype=dtype)

    def _check(self, group: int) -> None:
        """Raise UnsupportedError for sizes that the kernels are not written for; all published ones are fine."""
        whole = all(triton.next_power_of_2(size) == size for size in (self.head_dim, group))
        if not whole or self.width > 16 * SQUARE_PARTS.value or self.inner > 4 * SOME_CHUNK:
            raise UnsupportedError(
                f"the fused predictor takes head sizes and head groups that are powers of two, a width up to "
                f"{16 * SQUARE_PARTS.value} and an inner width up to {4 * SOME_CHUNK}; found {self.head_dim}, {group}, "
                f"{self.width} and {self.inner}; set predictor to plain"
            )

    def residual_codes(self, hidden: Tensor, code0: Tensor, begun: BegunFrame) -> Tensor:
        """Codes 1..15 ``[B, 15] int64``."""
        codes = torch.empty(len(hidden), STEPS, dtype=torch.int64, device=hidden.device)
        for step, _ in self._steps(hidden, code0):
            self._choose(begun, codes, step)
        return codes

    def given_logits(self, hidden: Tensor, code0: Tensor, given: Tensor) -> Tensor:
        """Logits ``[B, 15, 2048] float32`` of a frame whose codes ``given [B, 15] int64`` are, for comparisons."""
        rows = torch.zeros(len(hidden), device=hidden.device)
        greedy = BegunFrame(code0, code0.int(), rows, rows.long(), rows + 1)
        codes, kept = torch.empty_like(given), []
        for step, logits in self._steps(hidden, code0):
            kept.append(logits.to(torch.float32, copy=True))
            logits.fill_(float("-inf")).scatter_(1, given[:, step : step + 1], 0.0)
            self._choose(greedy, codes, step)
        return torch.stack(kept, dim=1)

    def _steps(self, hidden: Tensor, code0: Tensor) -> Iterator[tuple[int, Tensor]]:
        """A frame's steps and their logits; before the next one its code must be chosen, which writes its input."""
        batch = hidden.shape[0]
        assert batch <= self.max_rows
        self._open(hidden, code0, batch)
        for step in range(STEPS):
            new = 2 if step == 0 else 1
            self._layers(batch, new, 0 if step == 0 else step + 1)
            yield step, self.head(batch, new, step)

    def head(self, batch: int, new: int, step: int) -> Tensor:
        """Logits ``[B, 2048]`` of step 0 to 14 from the last of ``new`` rows of each sequence; a view of a buffer."""
        weights, logits, rows = self._weights, self._logits[:batch], slice((new - 1) * batch, new * batch)
        if new * batch > self._most_some_rows:
            self._sum_and_norm(rows, new * batch, weights.norm)
            self._linear_of_many(self._normed[rows], weights.heads[step], logits, tiles_for(batch).head)
        else:
            self._linear(self._x[rows], self._squares[rows], weights.heads[step], logits, norm=weights.norm)
        return logits

    def begin(self, table: SlotTensors, logits: Tensor, slots: Tensor, end_token: int) -> BegunFrame:
        batch, device = logits.shape[0], logits.device
        assert logits.stride(1) == 1
        choice, top_k = torch.empty(2, batch, dtype=torch.int64, device=device)
        temperature, top_p = torch.empty(2, batch, dtype=torch.float32, device=device)
        key = torch.empty(batch, dtype=torch.int32, device=device)
        launch(
            begin_frame, (batch,),
            logits, slots, table.frontier, table.prompt_rows, table.seen.view(torch.uint8), table.floats,
            table.integers, choice, key, temperature, top_k, top_p, end_token, logits.stride(0),
            WIDTH=CODEBOOK_SIZE, BLOCK=2 * CODEBOOK_SIZE, MIN_FRAMES=MIN_FRAMES, EXACT=self.exact,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
        return BegunFrame(choice, key, temperature, top_k, top_p)

    def finish(
        self, table: SlotTensors, begun: BegunFrame, residual: Tensor, slots: Tensor, positions: Tensor, end_token: int
    ) -> Tensor:
        tokens = torch.empty_like(begun.choice)
        launch(
            finish_frame, (len(tokens),),
            begun.choice, residual, slots, positions, table.codes, table.frontier, table.prompt_rows, table.max_frames,
            table.ended.view(torch.uint8), table.seen.view(torch.uint8), tokens, end_token, table.codes.shape[1],
            WIDTH=CODEBOOK_SIZE, CODEBOOKS=NUM_CODEBOOKS, EARLY=self._early, num_warps=1, **self._launch,
        )  # fmt: skip
        return tokens

    def _open(self, hidden: Tensor, code0: Tensor, batch: int) -> None:
        """Write the first two rows of every sequence: the talker's state, and code 0's embedding."""
        hidden = self._project(hidden)
        launch(
            open_rows, (batch,),
            hidden, code0, self._weights.tables, self._x, self._squares, batch,
            WIDTH=CODEBOOK_SIZE, C=self.width, BLOCK_C=triton.next_power_of_2(self.width), EARLY=self._early,
            **self._launch,
        )  # fmt: skip

    def _layers(self, batch: int, new: int, start: int) -> None:
        """Push the first ``new * batch`` rows of the buffer through all layers, in place."""
        rows = new * batch
        if rows > self._most_some_rows:
            self._layers_of_many(batch, new, start)
            return
        x, packed, attended, gated = (b[:rows] for b in (self._x, self._packed, self._attended, self._gated))
        squares = self._squares[:rows]
        for layer, cache in zip(self._weights.layers, self._cache, strict=True):
            self._linear(x, squares, layer.qkv, packed, norm=layer.input_norm)
            self._attend(layer, cache, batch, new, start)
            self._linear(attended, squares, layer.out, x, residual=True)
            self._gate(x, layer, gated)
            self._linear(gated, squares, layer.down, x, residual=True)

    def _layers_of_many(self, batch: int, new: int, start: int) -> None:
        """The same with products of many rows. The last product's parts are left to be added by the head."""
        rows = new * batch
        everyone = slice(0, rows)
        packed, attended, gated, normed = (
            buffer[:rows] for buffer in (self._packed, self._attended, self._gated, self._normed)
        )
        tiles = tiles_for(rows)
        self._parts_left = 0
        for layer, cache in zip(self._weights.layers, self._cache, strict=True):
            self._sum_and_norm(everyone, rows, layer.input_norm)
            self._linear_of_many(normed, layer.qkv, packed, tiles.qkv)
            self._attend(layer, cache, batch, new, start)
            self._linear_of_many(attended, layer.out, None, tiles.out)
            self._sum_and_norm(everyone, rows, layer.mlp_norm)
            self._gate_of_many(normed, layer.gate_up, gated, tiles.gate_up)
            self._linear_of_many(gated, layer.down, None, tiles.down)

    def _sum_and_norm(self, rows: slice, all_rows: int, norm: Tensor) -> None:
        """Add what the last product left to some rows of the buffer, of ``all_rows`` it had, and normalise them."""
        x, normed = self._x[rows], self._normed[rows]
        parts = self._parts.view(-1, self.width)[rows]
        launch(
            sum_and_norm, (len(x),),
            x, parts, norm, normed, all_rows, self._weights.eps, C=self.width,
            BLOCK_C=triton.next_power_of_2(self.width), PARTS=self._parts_left, EARLY=self._early, **self._launch,
        )  # fmt: skip

    def _linear_of_many(self, x: Tensor, weight: Tensor, out: Tensor | None, tile: Tile) -> None:
        """``out = x · weightᵀ``; without ``out`` the product is left in parts."""
        (rows, inputs), outputs = x.shape, weight.shape[0]
        parts = 0 if out is not None else tile.parts
        if out is None:
            out, self._parts_left = self._parts, parts
        columns = self._columns(tile, inputs // tile.parts)
        chunks = triton.cdiv(inputs, tile.parts * columns)
        block = self._row_block(rows)
        launch(
            linear_many, (triton.cdiv(outputs, tile.outputs), tile.parts, triton.cdiv(rows, block)),
            x, weight, out, rows, K=inputs, N=outputs, BLOCK_R=block, BLOCK_N=tile.outputs, BLOCK_K=columns,
            CHUNKS=chunks, PARTS=parts, STAGES=tile.stages, LANES=32 * tile.warps, EARLY=self._early,
            num_warps=tile.warps, **self._launch,
        )  # fmt: skip

    def _gate_of_many(self, x: Tensor, weight: Tensor, out: Tensor, tile: Tile) -> None:
        """``out = silu(gate) * up`` of ``x``."""
        (rows, inputs), block = x.shape, self._row_block(len(x))
        columns = self._columns(tile, inputs)
        launch(
            gated_many, (triton.cdiv(self.inner, tile.outputs), 1, triton.cdiv(rows, block)),
            x, weight, out, rows, K=inputs, N=self.inner, BLOCK_R=block, BLOCK_N=tile.outputs, BLOCK_K=columns,
            CHUNKS=triton.cdiv(inputs, columns), STAGES=tile.stages, LANES=32 * tile.warps, EARLY=self._early,
            num_warps=tile.warps, **self._launch,
        )  # fmt: skip

    def _columns(self, tile: Tile, inputs: int) -> int:
        """Columns at a time of a program that has ``inputs`` of them: wider values, fewer of them."""
        most = tile.columns * 2 // max(2, self._x.element_size())
        return int(max(16, min(most, triton.next_power_of_2(inputs))))

    def _row_block(self, rows: int) -> int:
        """Rows of one program."""
        least = LEAST_TILE_ROWS if self._x.element_size() == 2 else 16
        return int(max(least, min(WIDE_TILES.rows, triton.next_power_of_2(rows))))

    def _attend(self, layer: LayerWeights, cache: Tensor, batch: int, new: int, start: int) -> None:
        weights = self._weights
        launch(
            attend, (batch, weights.num_kv_heads),
            self._packed, layer.query_norm, layer.key_norm, weights.cos, weights.sin, cache[0], cache[1],
            self._attended, batch, start, weights.eps, self.head_dim**-0.5,
            HEADS=weights.num_heads, KV_HEADS=weights.num_kv_heads, HALF=self.head_dim // 2, SLOTS=KEYS, KEYS=KEYS,
            NEW=new, EARLY=self._early, num_warps=ATTEND_WARPS, enable_fp_fusion=False, **self._launch,
        )  # fmt: skip

    def _choose(self, begun: BegunFrame, codes: Tensor, step: int) -> None:
        launch(
            choose_residual, (codes.shape[0],),
            self._logits, begun.temperature, begun.top_k, begun.top_p, begun.key, self._weights.tables, self._x,
            self._squares, codes, step,
            WIDTH=CODEBOOK_SIZE, C=self.width, BLOCK_C=triton.next_power_of_2(self.width), STEPS=STEPS,
            EXACT=self.exact, EARLY=self._early, num_warps=CHOOSE_WARPS, enable_fp_fusion=False, **self._launch,
        )  # fmt: skip

    def _project(self, hidden: Tensor) -> Tensor:
        """The talker's state in the predictor's width."""
        weight, bias = self._weights.projection, self._weights.projection_bias
        if weight is None or bias is None:
            return hidden
        if hidden.shape[0] > MOST_FEW_ROWS:
            return torch.nn.functional.linear(hidden, weight, bias)
        projected = hidden.new_empty(hidden.shape[0], self.width)
        self._few(
            linear_few, (hidden, weight, weight, bias, projected), weight.shape, NORM=False, RESIDUAL=False, BIAS=True
        )
        return projected

    def _linear(
        self,
        x: Tensor,
        squares: Tensor,
        weight: Tensor,
        out: Tensor,
        *,
        norm: Tensor | None = None,
        residual: bool = False,
    ) -> None:
        """``out (+)= norm(x) · weightᵀ``; ``squares`` belong to ``x`` where it is normalised, else to ``out``."""
        ends = (weight if norm is None else norm, weight)
        modes = {"NORM": norm is not None, "RESIDUAL": residual}
        outputs, inputs = weight.shape
        if x.shape[0] <= MOST_FEW_ROWS:
            self._few(linear_few, (x, *ends, weight, out), weight.shape, BIAS=False, **modes)
        else:
            self._some(linear_some, (x, squares, *ends, out), (outputs, inputs), SOME_OUTPUTS, **modes)

    def _gate(self, x: Tensor, layer: LayerWeights, out: Tensor) -> None:
        """``out = silu(gate) * up`` of the normalised input."""
        shape, ends = (self.inner, x.shape[1]), (layer.mlp_norm, layer.gate_up, out)
        if x.shape[0] <= MOST_FEW_ROWS:
            self._few(gated_few, (x, *ends), shape)
        else:
            self._some(gated_some, (x, self._squares, *ends), shape, SOME_OUTPUTS // 2)

    def _few(self, kernel: Any, tensors: tuple[Tensor, ...], shape: Sequence[int], **modes: bool) -> None:
        outputs, inputs = shape
        columns = triton.next_power_of_2(inputs)
        slab = FEW_SLAB * 2 // tensors[0].dtype.itemsize
        block = max(2, min(32, slab // columns))
        launch(
            kernel, (triton.cdiv(outputs, block),),
            *tensors, self._weights.eps, K=inputs, N=outputs, BLOCK_K=columns, BLOCK_N=block, ROWS=len(tensors[0]),
            num_warps=FEW_WARPS, EARLY=self._early, **modes, **self._launch,
        )  # fmt: skip

    def _some(
        self, kernel: Any, tensors: tuple[Tensor, ...], shape: tuple[int, int], block: int, **modes: bool
    ) -> None:
        outputs, inputs = shape
        chunk = max(16 * SOME_WARPS, min(SOME_CHUNK, triton.next_power_of_2(inputs)))
        rows = len(tensors[0])
        launch(
            kernel, (triton.cdiv(outputs, block),),
            *tensors, self._weights.eps, rows,
            K=inputs, N=outputs, BLOCK_R=max(8, triton.next_power_of_2(rows)), BLOCK_N=block,
            PIECES=SOME_WARPS, DEPTH=chunk // SOME_WARPS, num_warps=SOME_WARPS, EARLY=self._early, **modes,
            **self._launch,
        )  # fmt: skip
