"""The decoder's loaded tensors as a fast form takes them; the only place that knows both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from qwen3tts_hw.codec.layers import (
    CONVNEXT_NORM_EPS,
    CausalUpsample,
    ConvNeXtBlock,
    DecoderBlock,
    ResidualUnit,
    SnakeBeta,
)
from qwen3tts_hw.codec.transformer import TransformerLayer
from qwen3tts_hw.codec_kernels.base import (
    BlockWeights,
    CodecWeights,
    ConvNeXtWeights,
    ConvWeights,
    LayerWeights,
    Snake,
    UnitWeights,
)

if TYPE_CHECKING:
    from qwen3tts_hw.codec.decoder import CodecDecoder


def codec_weights(decoder: CodecDecoder) -> CodecWeights:
    """Views of a loaded decoder's tensors."""
    config, transformer = decoder.config, decoder.transformer
    return CodecWeights(
        table=decoder.codebooks.table,
        pre_conv=_conv(decoder.pre_conv.conv),
        input=_linear(transformer.input),
        layers=[_layer(layer) for layer in transformer.layers],
        norm=transformer.norm.weight,
        output=_linear(transformer.output),
        upsamples=[
            _convnext(upsample, block)
            for upsample, block in zip(decoder.upsamples, decoder.upsample_blocks, strict=True)
        ],
        entry=_conv(decoder.entry.conv),
        blocks=[_block(block) for block in decoder.blocks],
        exit_activation=_snake(decoder.exit_activation),
        exit=_conv(decoder.exit.conv),
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        window=config.sliding_window,
        rms_eps=config.rms_norm_eps,
        norm_eps=CONVNEXT_NORM_EPS,
        rope_theta=config.rope_theta,
    )


def _conv(conv: nn.Conv1d, phases: int = 1) -> ConvWeights:
    (dilation,) = conv.dilation
    return ConvWeights(conv.weight, conv.bias, dilation, phases)


def _linear(linear: nn.Linear) -> ConvWeights:
    return ConvWeights(linear.weight[:, :, None], linear.bias)


def _snake(snake: SnakeBeta) -> Snake:
    return Snake(snake.frequency[:, 0], snake.magnitude[:, 0])


def _layer(layer: nn.Module) -> LayerWeights:
    assert isinstance(layer, TransformerLayer)
    return LayerWeights(
        attention_norm=layer.attention_norm.weight,
        qkv=layer.attention.qkv.weight,
        out=layer.attention.output.weight,
        attention_scale=layer.attention_scale,
        mlp_norm=layer.mlp_norm.weight,
        gate_up=layer.gate_up.weight,
        down=layer.down.weight,
        mlp_scale=layer.mlp_scale,
    )


def _convnext(upsample: nn.Module, block: nn.Module) -> ConvNeXtWeights:
    assert isinstance(upsample, CausalUpsample) and isinstance(block, ConvNeXtBlock)
    depthwise = block.depthwise.conv
    assert depthwise.bias is not None
    return ConvNeXtWeights(
        upsample=_conv(upsample.conv, upsample.stride),
        depthwise=depthwise.weight[:, 0],
        depthwise_bias=depthwise.bias,
        norm=block.norm.weight,
        norm_bias=block.norm.bias,
        expand=_linear(block.expand),
        contract=_linear(block.contract),
        scale=block.scale,
    )


def _block(block: nn.Module) -> BlockWeights:
    assert isinstance(block, DecoderBlock)
    units = [_unit(unit) for unit in block.residuals]
    return BlockWeights(_snake(block.activation), _conv(block.upsample.conv, block.upsample.stride), units)


def _unit(unit: nn.Module) -> UnitWeights:
    assert isinstance(unit, ResidualUnit)
    return UnitWeights(
        first=_snake(unit.activation),
        dilated=_conv(unit.dilated.conv),
        second=_snake(unit.pointwise_activation),
        pointwise=_conv(unit.pointwise),
    )
