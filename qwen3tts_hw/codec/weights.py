"""Checkpoint names of the codec decoder and where each tensor goes.

The only place that knows how ``speech_tokenizer/model.safetensors`` spells the decoder. Codebooks are projected,
logarithms exponentiated and kernels reordered on the way.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from qwen3tts_hw.checkpoint.inventory import is_unused
from qwen3tts_hw.checkpoint.slots import TensorSlot, TensorSlots
from qwen3tts_hw.codec.layers import CausalUpsample, CodebookSum, ConvNeXtBlock, DecoderBlock, ResidualUnit, SnakeBeta
from qwen3tts_hw.codec.transformer import CodecTransformer, TransformerLayer
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS

if TYPE_CHECKING:
    from qwen3tts_hw.codec.decoder import CodecDecoder

ENCODER_PREFIX = "encoder."


class DecoderSlots(TensorSlots):
    """All checkpoint tensors of a decoder."""

    @classmethod
    def of(cls, decoder: CodecDecoder) -> DecoderSlots:
        """List the tensors of ``decoder`` under their checkpoint names."""
        slots = cls()
        slots._codebooks(decoder.codebooks, decoder.config.vector_dim)
        slots.parameters("decoder.pre_conv.conv", decoder.pre_conv.conv)
        slots._transformer("decoder.pre_transformer", decoder.transformer)
        for index, upsample in enumerate(decoder.upsamples):
            assert isinstance(upsample, CausalUpsample)
            slots._upsample(f"decoder.upsample.{index}.0.conv", upsample)
        for index, block in enumerate(decoder.upsample_blocks):
            assert isinstance(block, ConvNeXtBlock)
            slots._convnext(f"decoder.upsample.{index}.1", block)
        slots.parameters("decoder.decoder.0.conv", decoder.entry.conv)
        for index, block in enumerate(decoder.blocks, start=1):
            assert isinstance(block, DecoderBlock)
            slots._block(f"decoder.decoder.{index}.block", block)
        after_blocks = len(decoder.blocks) + 1
        slots._snake(f"decoder.decoder.{after_blocks}", decoder.exit_activation)
        slots.parameters(f"decoder.decoder.{after_blocks + 1}.conv", decoder.exit.conv)
        return slots

    def _snake(self, prefix: str, snake: SnakeBeta) -> None:
        shape = (snake.frequency.shape[0],)
        self.slots[f"{prefix}.alpha"] = TensorSlot(shape, snake.store_alpha)
        self.slots[f"{prefix}.beta"] = TensorSlot(shape, snake.store_beta)

    def _upsample(self, prefix: str, upsample: CausalUpsample) -> None:
        phases, channels_in, taps = upsample.conv.weight.shape
        channels_out = phases // upsample.stride
        weight_shape = (channels_in, channels_out, taps * upsample.stride)
        self.slots[f"{prefix}.weight"] = TensorSlot(weight_shape, upsample.store_weight)
        self.slots[f"{prefix}.bias"] = TensorSlot((channels_out,), upsample.store_bias)

    def _convnext(self, prefix: str, block: ConvNeXtBlock) -> None:
        self.tensor(f"{prefix}.gamma", block.scale)
        self.parameters(f"{prefix}.dwconv.conv", block.depthwise.conv)
        self.parameters(f"{prefix}.norm", block.norm)
        self.parameters(f"{prefix}.pwconv1", block.expand)
        self.parameters(f"{prefix}.pwconv2", block.contract)

    def _block(self, prefix: str, block: DecoderBlock) -> None:
        self._snake(f"{prefix}.0", block.activation)
        self._upsample(f"{prefix}.1.conv", block.upsample)
        for index, unit in enumerate(block.residuals, start=2):
            assert isinstance(unit, ResidualUnit)
            self._snake(f"{prefix}.{index}.act1", unit.activation)
            self.parameters(f"{prefix}.{index}.conv1.conv", unit.dilated.conv)
            self._snake(f"{prefix}.{index}.act2", unit.pointwise_activation)
            self.parameters(f"{prefix}.{index}.conv2.conv", unit.pointwise)

    def _transformer(self, prefix: str, transformer: CodecTransformer) -> None:
        self.parameters(f"{prefix}.input_proj", transformer.input)
        self.parameters(f"{prefix}.norm", transformer.norm)
        self.parameters(f"{prefix}.output_proj", transformer.output)
        for index, layer in enumerate(transformer.layers):
            assert isinstance(layer, TransformerLayer)
            self._layer(f"{prefix}.layers.{index}", layer)

    def _layer(self, prefix: str, layer: TransformerLayer) -> None:
        self.parameters(f"{prefix}.input_layernorm", layer.attention_norm)
        self.parts(f"{prefix}.self_attn", ("q_proj", "k_proj", "v_proj"), layer.attention.qkv)
        self.parameters(f"{prefix}.self_attn.o_proj", layer.attention.output)
        self.tensor(f"{prefix}.self_attn_layer_scale.scale", layer.attention_scale)
        self.parameters(f"{prefix}.post_attention_layernorm", layer.mlp_norm)
        self.parts(f"{prefix}.mlp", ("gate_proj", "up_proj"), layer.gate_up)
        self.parameters(f"{prefix}.mlp.down_proj", layer.down)
        self.tensor(f"{prefix}.mlp_layer_scale.scale", layer.mlp_scale)

    def _codebooks(self, codebooks: CodebookSum, vector_dim: int) -> None:
        """Hold the raw tables until their projection is known, then fold them."""
        raw: dict[str, Tensor] = {}

        def hold(name: str, *shape: int) -> None:
            self.slots[name] = TensorSlot(shape, partial(raw.__setitem__, name))

        def fold(index: int, book: str, projection: str) -> None:
            codebooks.store(index, raw[f"{book}.embedding_sum"], raw[f"{book}.cluster_usage"], raw[projection])

        for index in range(NUM_CODEBOOKS):
            group, layer = ("rvq_first", 0) if index == 0 else ("rvq_rest", index - 1)
            book = f"decoder.quantizer.{group}.vq.layers.{layer}._codebook"
            projection = f"decoder.quantizer.{group}.output_proj.weight"
            hold(f"{book}.embedding_sum", CODEBOOK_SIZE, vector_dim)
            hold(f"{book}.cluster_usage", CODEBOOK_SIZE)
            hold(projection, codebooks.table.shape[1], vector_dim, 1)
            self.folds.append(partial(fold, index, book, projection))


def load(decoder: CodecDecoder, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Store every decoder tensor in its slot and return the names used; raise CheckpointError with all problems."""
    return DecoderSlots.of(decoder).load(
        tensors,
        what="codec decoder",
        skip=lambda name: name.startswith(ENCODER_PREFIX) or is_unused(name),
    )
