"""A decoder's weights as the fused form runs them: every layer packed in its format, sizes of state and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen3tts_hw.codec_kernels.base import BlockWeights, CodecWeights, ConvNeXtWeights, ConvWeights, LayerWeights
from qwen3tts_hw.codec_kernels.packing import PackedConv, format_of, pack, pack_snake

Factors = tuple[Tensor, Tensor]
EXIT_COLUMNS = 8  # of the last convolution's products that are kept: its taps, and padding
TableShape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A transformer layer; the layer scales are folded into ``out`` and ``down``."""

    attention_norm: Tensor
    qkv: PackedConv
    out: PackedConv
    mlp_norm: Tensor
    gate_up: PackedConv
    down: PackedConv


@dataclass(frozen=True, slots=True)
class PackedUpsample:
    """Upsampling and its ConvNeXt block; ``depthwise [taps, C]``, the block's scale folded into ``contract``."""

    upsample: PackedConv
    depthwise: Tensor
    depthwise_bias: Tensor
    norm: Tensor
    norm_bias: Tensor
    expand: PackedConv
    contract: PackedConv


@dataclass(frozen=True, slots=True)
class PackedUnit:
    """A residual unit."""

    first: Factors
    dilated: PackedConv
    second: Factors
    pointwise: PackedConv


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """Activation, upsampling and residual units."""

    activation: Factors
    upsample: PackedConv
    units: Sequence[PackedUnit]


class PackedDecoder:
    """All layers in the order in which they run."""

    def __init__(self, weights: CodecWeights, precision: str) -> None:
        self._precision = precision
        self.pre_conv = self._conv(weights.pre_conv)
        self.input = self._conv(weights.input)
        self.layers = [self._layer(layer) for layer in weights.layers]
        self.output = self._conv(weights.output)
        self.upsamples = [self._upsample(block) for block in weights.upsamples]
        self.entry = self._conv(weights.entry, "entry")
        self.blocks = [self._block(block, number) for number, block in enumerate(weights.blocks)]
        self.exit_activation = pack_snake(weights.exit_activation)
        # One output channel would leave the matrix units idle: each tap becomes a column, and the taps are added later.
        (kernel,) = weights.exit.weight
        self.exit = self._conv(ConvWeights(kernel.T[:, :, None]), "exit")
        self.exit_taps = kernel.shape[1]
        assert self.exit_taps <= EXIT_COLUMNS
        self.exit_bias = kernel.new_zeros(1) if weights.exit.bias is None else weights.exit.bias

    def table_shapes(self, ring: tuple[int, ...]) -> list[TableShape]:
        """What each layer keeps per stream, in order; ``ring`` is the shape of an attention layer's."""
        shapes = [_history(self.pre_conv), *((ring, torch.float32) for _ in self.layers)]
        shapes += [((len(block.depthwise) - 1, block.upsample.width), torch.float32) for block in self.upsamples]
        shapes.append(_history(self.entry))
        for block in self.blocks:
            shapes += [_history(block.upsample), *(_history(unit.dilated) for unit in block.units)]
        return [*shapes, ((self.exit_taps - 1, EXIT_COLUMNS), torch.float32)]

    def buffer_bytes(self) -> tuple[int, int]:
        """Bytes per frame and stream of the raw rows and of a words buffer, each the most that any layer needs."""
        raw, words = 0, 0
        for steps, conv in self._convs():
            raw = max(raw, 4 * steps * conv.columns)
            words = max(words, 2 * steps * conv.format.input_words * conv.channels)
        aside = [4 * conv.columns for layer in self.layers for conv in (layer.qkv, layer.gate_up)]
        return raw, max(words, *aside, 0)

    def _convs(self) -> Iterator[tuple[int, PackedConv]]:
        """Every convolution that writes raw rows or reads words, with its steps per frame."""
        steps = 1
        for layer in self.layers:
            yield from ((1, conv) for conv in (layer.out, layer.down))
        yield from ((1, conv) for conv in (self.pre_conv, self.input, self.output))
        for block in self.upsamples:
            yield steps, block.upsample
            steps *= block.upsample.phases
            yield from ((steps, conv) for conv in (block.expand, block.contract))
        yield steps, self.entry
        for stage in self.blocks:
            yield steps, stage.upsample
            steps *= stage.upsample.phases
            for unit in stage.units:
                yield from ((steps, conv) for conv in (unit.dilated, unit.pointwise))
        yield steps, self.exit

    def _conv(self, conv: ConvWeights, layer: str = "front", gain: Tensor | None = None) -> PackedConv:
        return pack(conv, format_of(self._precision, layer), gain=gain)

    def _linear(self, weight: Tensor, gain: Tensor | None = None) -> PackedConv:
        return self._conv(ConvWeights(weight[:, :, None]), gain=gain)

    def _layer(self, layer: LayerWeights) -> PackedLayer:
        return PackedLayer(
            attention_norm=layer.attention_norm,
            qkv=self._linear(layer.qkv),
            out=self._linear(layer.out, layer.attention_scale),
            mlp_norm=layer.mlp_norm,
            gate_up=self._linear(layer.gate_up),
            down=self._linear(layer.down, layer.mlp_scale),
        )

    def _upsample(self, block: ConvNeXtWeights) -> PackedUpsample:
        return PackedUpsample(
            upsample=self._conv(block.upsample),
            depthwise=block.depthwise.T.contiguous(),
            depthwise_bias=block.depthwise_bias,
            norm=block.norm,
            norm_bias=block.norm_bias,
            expand=self._conv(block.expand),
            contract=self._conv(block.contract, gain=block.scale),
        )

    def _block(self, block: BlockWeights, number: int) -> PackedBlock:
        units = [
            PackedUnit(
                first=pack_snake(unit.first),
                dilated=self._conv(unit.dilated, f"dilated {number}"),
                second=pack_snake(unit.second),
                pointwise=self._conv(unit.pointwise, f"pointwise {number}"),
            )
            for unit in block.units
        ]
        return PackedBlock(pack_snake(block.activation), self._conv(block.upsample, "upsample"), units)


def _history(conv: PackedConv) -> TableShape:
    return (conv.history, conv.format.input_words, conv.channels), conv.format.dtype
