"""The fused form: the decoder as about a hundred Triton kernels, one per convolution and a few small ones.

Built for graphs. Activations are channels-last; a convolution's kernel reads the stream's history where it lies, adds
bias and residual and writes the next layer's input already activated, so nothing is padded, concatenated or passed over
twice. Histories and the window's keys are updated in place by kernels of their own. Rows are worked off in groups of
bounded size within a call, so that the buffers do not grow with the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from qwen3tts_hw.backends.kernels import launch
from qwen3tts_hw.codec_kernels import triton_frames
from qwen3tts_hw.codec_kernels.base import CodecWeights, StreamState
from qwen3tts_hw.codec_kernels.launches import Result, Workspace, launch_conv, launch_keep
from qwen3tts_hw.codec_kernels.packed import (
    EXIT_COLUMNS,
    Factors,
    PackedBlock,
    PackedDecoder,
    PackedLayer,
    PackedUnit,
    PackedUpsample,
)
from qwen3tts_hw.codec_kernels.packing import PackedConv
from qwen3tts_hw.codec_kernels.state import FusedState
from qwen3tts_hw.codec_kernels.triton_conv import add_taps
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS

MOST_FRAMES = 32  # of one stream at a time
MOST_FRAME_ROWS = 256  # streams times frames at a time


class FusedForm:
    """Builds :class:`FusedDecoder` with one of the precisions of :mod:`.packing`."""

    name = "fused"

    def __init__(self, precision: str) -> None:
        self.precision = precision

    def build(self, weights: CodecWeights) -> FusedDecoder:
        return FusedDecoder(weights, self.precision)


@dataclass(slots=True)
class _Call:
    """One group of rows on its way through the layers; ``words`` is the index of the buffer that holds the input."""

    state: FusedState
    slots: Tensor
    frames: int
    length: int  # steps per stream at the present layer
    table: int = 0  # next table of the state
    words: int = 0

    @property
    def rows(self) -> int:
        return len(self.slots) * self.length

    def next_table(self) -> Tensor:
        self.table += 1
        return self.state.tables[self.table - 1]


class FusedDecoder:
    """Kernels over one decoder's weights, with the buffers between them."""

    def __init__(self, weights: CodecWeights, precision: str, *, frame_rows: int = MOST_FRAME_ROWS) -> None:
        self._weights, self._frame_rows = weights, frame_rows
        self._packed = PackedDecoder(weights, precision)
        self._device = weights.table.device
        pairs = torch.arange(0, weights.head_dim, 2, device=self._device, dtype=torch.float32)
        self._rates = 1.0 / weights.rope_theta ** (pairs / weights.head_dim)
        self._ring = triton.next_power_of_2(weights.window - 1 + MOST_FRAMES)
        most = max(frame_rows, MOST_FRAMES)
        raw_bytes, words_bytes = self._packed.buffer_bytes()
        self._workspace = Workspace(most * raw_bytes, most * words_bytes, self._device)

    def new_state(self, slots: int) -> FusedState:
        """State of ``slots`` streams, all at their start."""
        ring = (self._weights.num_heads, 2, self._ring, self._weights.head_dim)
        return FusedState(self._packed.table_shapes(ring), slots, self._device)

    @torch.no_grad()
    def step(self, codes: Tensor, state: StreamState, slots: Tensor) -> Tensor:
        """Samples ``[R, F * samples] float32`` of the next ``codes [R, 16, F] int64``."""
        assert isinstance(state, FusedState)
        frames, parts = codes.shape[2], []
        for first in range(0, frames, MOST_FRAMES):
            chunk = codes[:, :, first : first + MOST_FRAMES]
            group = max(1, self._frame_rows // chunk.shape[2])
            pieces = [
                self._group(chunk[at : at + group].contiguous(), state, slots[at : at + group])
                for at in range(0, len(codes), group)
            ]
            parts.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _group(self, codes: Tensor, state: FusedState, slots: Tensor) -> Tensor:
        """Decode a group of rows that fits the buffers."""
        frames, packed = codes.shape[2], self._packed
        call = _Call(state, slots, frames, frames)
        self._open(codes, call)
        for layer in packed.layers:
            self._run_layer(layer, call)
        self._close_transformer(call)
        followers = [*(block.upsample for block in packed.upsamples[1:]), packed.entry]
        for upsample, follower in zip(packed.upsamples, followers, strict=True):
            self._run_upsample(upsample, call, follower)
        self._history_conv(packed.entry, call, packed.blocks[0].upsample, packed.blocks[0].activation)
        after = [(block.upsample, block.activation) for block in packed.blocks[1:]]
        after.append((packed.exit, packed.exit_activation))
        for block, (follower, activation) in zip(packed.blocks, after, strict=True):
            self._run_block(block, call, follower, activation)
        samples = self._close(call)
        state.frames.index_add_(0, slots, torch.full_like(slots, frames))
        return samples

    def _open(self, codes: Tensor, call: _Call) -> None:
        """Codes to the transformer's rows."""
        table, pre_conv = self._weights.table, self._packed.pre_conv
        words = self._workspace.words(call.words, call.rows, pre_conv)
        launch(
            triton_frames.look_up, (call.rows,),
            codes, table, words, call.frames, CODEBOOKS=NUM_CODEBOOKS, ENTRIES=CODEBOOK_SIZE, WIDTH=table.shape[1],
            C=pre_conv.channels, TERMS=words.shape[1], BLOCK=triton.next_power_of_2(pre_conv.channels),
        )  # fmt: skip
        self._history_conv(pre_conv, call, self._packed.input)
        source = self._workspace.words(call.words, call.rows, self._packed.input)
        raw = self._workspace.raw(call.rows, self._packed.input.columns)
        launch_conv(self._packed.input, source, call.length, Result(raw=raw), slots=call.slots)

    def _run_layer(self, layer: PackedLayer, call: _Call) -> None:
        """Attention and gated network over the raw rows, in place; the words buffers are free."""
        weights, space, rows = self._weights, self._workspace, call.rows
        raw = space.raw(rows, self._packed.input.columns)
        packed, mixed = space.side(1, rows, layer.qkv.columns), space.words(0, rows, layer.out)
        self._norm(raw, layer.attention_norm, space.words(0, rows, layer.qkv))
        launch_conv(layer.qkv, space.words(0, rows, layer.qkv), call.length, Result(raw=packed), slots=call.slots)
        half = weights.head_dim // 2
        launch(
            triton_frames.attend, (len(call.slots), weights.num_heads),
            packed, self._rates, call.next_table(), call.slots, call.state.frames, mixed, call.frames,
            weights.head_dim**-0.5, HEADS=weights.num_heads, HALF=half, STRIDE=packed.shape[1],
            C=layer.out.channels, WINDOW=weights.window, RING=self._ring, TERMS=mixed.shape[1],
            BLOCK_F=max(16, triton.next_power_of_2(call.frames)), BLOCK_D=max(16, triton.next_power_of_2(half)),
        )  # fmt: skip
        launch_conv(layer.out, mixed, call.length, Result(raw=raw, add=True), slots=call.slots)

        self._norm(raw, layer.mlp_norm, space.words(0, rows, layer.gate_up))
        packed, gated = space.side(1, rows, layer.gate_up.columns), space.words(0, rows, layer.down)
        launch_conv(
            layer.gate_up, space.words(0, rows, layer.gate_up), call.length, Result(raw=packed), slots=call.slots
        )
        width, block = weights.layers[0].down.shape[1], 1_024
        launch(
            triton_frames.gate, (rows, triton.cdiv(layer.down.channels, block)),
            packed, gated,
            WIDTH=width, C=layer.down.channels, STRIDE=packed.shape[1], TERMS=gated.shape[1], BLOCK=block,
        )  # fmt: skip
        launch_conv(layer.down, gated, call.length, Result(raw=raw, add=True), slots=call.slots)

    def _close_transformer(self, call: _Call) -> None:
        """The final norm, and the projection to the upsampling stages' input."""
        space, rows = self._workspace, call.rows
        source = space.words(0, rows, self._packed.output)
        self._norm(space.raw(rows, self._packed.input.columns), self._weights.norm, source)
        first = self._packed.upsamples[0].upsample
        call.words = 1
        launch_conv(
            self._packed.output, source, call.length, Result(words=space.words(1, rows, first)), slots=call.slots
        )

    def _run_upsample(self, block: PackedUpsample, call: _Call, follower: PackedConv) -> None:
        """Upsample and run the ConvNeXt block; its result becomes the words that ``follower`` reads."""
        space = self._workspace
        raw = space.raw(call.rows, block.upsample.columns)
        launch_conv(
            block.upsample, space.words(call.words, call.rows, block.upsample), call.length, Result(raw=raw),
            slots=call.slots,
        )  # fmt: skip
        call.length *= block.upsample.phases
        rows, past = call.rows, call.next_table()
        raw = space.raw(rows, block.upsample.width)
        normed, opened = space.words(0, rows, block.expand), space.words(1, rows, block.contract)
        launch(
            triton_frames.depthwise, (rows,),
            raw, past, call.slots, block.depthwise, block.depthwise_bias, block.norm, block.norm_bias, normed,
            call.length, self._weights.norm_eps, WIDTH=len(block.norm), C=raw.shape[1], TAPS=len(block.depthwise),
            TERMS=normed.shape[1], BLOCK=triton.next_power_of_2(raw.shape[1]),
        )  # fmt: skip
        launch_keep(raw, call.length, past, call.slots)
        launch_conv(block.expand, normed, call.length, Result(words=opened, activation="gelu"), slots=call.slots)
        call.words = 0
        result = Result(raw=raw, add=True, words=space.words(0, rows, follower))
        launch_conv(block.contract, opened, call.length, result, slots=call.slots)

    def _history_conv(
        self, packed: PackedConv, call: _Call, follower: PackedConv, snake: Factors | None = None, *, raw: bool = False
    ) -> None:
        """Run a convolution with history from one words buffer to the other, activated for ``follower``."""
        space, past = self._workspace, call.next_table()
        x = space.words(call.words, call.rows, packed)
        result = Result(
            raw=space.raw(call.rows, packed.columns) if raw else None,
            words=space.words(1 - call.words, call.rows * packed.phases, follower),
            activation="snake" if snake else "",
            snake=snake,
        )
        launch_conv(packed, x, call.length, result, past=past, slots=call.slots)
        launch_keep(x, call.length, past, call.slots)
        call.words, call.length = 1 - call.words, call.length * packed.phases

    def _run_block(self, block: PackedBlock, call: _Call, after: PackedConv, activation: Factors) -> None:
        """Upsample and run the residual units; the result is activated for the layer ``after``."""
        units = block.units
        self._history_conv(block.upsample, call, units[0].dilated, units[0].first, raw=True)
        followers = [(unit.dilated, unit.first) for unit in units[1:]] + [(after, activation)]
        for unit, (follower, snake) in zip(units, followers, strict=True):
            self._run_unit(unit, call, follower, snake, store=unit is not units[-1])

    def _run_unit(self, unit: PackedUnit, call: _Call, follower: PackedConv, snake: Factors, *, store: bool) -> None:
        """Run a residual unit over the raw rows; the result is activated for ``follower``, and stored if needed."""
        self._history_conv(unit.dilated, call, unit.pointwise, unit.second)
        space, rows = self._workspace, call.rows
        source, raw = space.words(call.words, rows, unit.pointwise), space.raw(rows, unit.pointwise.columns)
        call.words = 1 - call.words
        result = Result(raw, True, store, space.words(call.words, rows, follower), "snake", snake)
        launch_conv(unit.pointwise, source, call.length, result, slots=call.slots)

    def _close(self, call: _Call) -> Tensor:
        """The last convolution, to one channel: products of every step and tap, then their sums."""
        packed, rows, past = self._packed, call.rows, call.next_table()
        x, products = self._workspace.words(call.words, rows, packed.exit), self._workspace.raw(rows, EXIT_COLUMNS)
        launch_conv(packed.exit, x, call.length, Result(raw=products), slots=call.slots)
        samples = torch.empty(len(call.slots), call.length, device=self._device)
        block = 256
        launch(
            add_taps, (triton.cdiv(rows, block),),
            products, past, call.slots, packed.exit_bias, samples, rows, call.length,
            COLUMNS=EXIT_COLUMNS, TAPS=packed.exit_taps, BLOCK=block,
        )  # fmt: skip
        launch_keep(products, call.length, past, call.slots)
        return samples.clamp_(-1.0, 1.0)

    def _norm(self, raw: Tensor, weight: Tensor, words: Tensor) -> None:
        launch(
            triton_frames.rms_norm, (len(raw),),
            raw, weight, words, self._weights.rms_eps, WIDTH=len(weight), C=raw.shape[1], TERMS=words.shape[1],
            BLOCK=triton.next_power_of_2(raw.shape[1]),
        )  # fmt: skip
