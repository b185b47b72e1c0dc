"""Checkpoint names of the codec encoder and where each tensor goes.

The only place that knows how ``speech_tokenizer/model.safetensors`` spells the encoder. Codebook sums are divided by
their counts on the way.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from qwen3tts_hw.checkpoint.inventory import is_unused
from qwen3tts_hw.checkpoint.slots import TensorSlot, TensorSlots
from qwen3tts_hw.codec.encoder_layers import ConvolutionStack, ResidualBlock, ResidualQuantizer, Stage
from qwen3tts_hw.codec.encoder_transformer import EncoderLayer, EncoderTransformer
from qwen3tts_hw.types import CODEBOOK_SIZE

if TYPE_CHECKING:
    from qwen3tts_hw.codec.encoder import CodecEncoder

DECODER_PREFIX = "decoder."


class EncoderSlots(TensorSlots):
    """All checkpoint tensors of an encoder."""

    @classmethod
    def of(cls, encoder: CodecEncoder) -> EncoderSlots:
        """List the tensors of ``encoder`` under their checkpoint names."""
        slots = cls()
        slots._convolutions("encoder.encoder.layers", encoder.convolutions)
        slots._transformer("encoder.encoder_transformer.layers", encoder.transformer)
        slots.parameters("encoder.downsample.conv", encoder.downsample.conv)
        slots._quantizer("encoder.quantizer.semantic_residual_vector_quantizer", encoder.semantic)
        slots._quantizer("encoder.quantizer.acoustic_residual_vector_quantizer", encoder.acoustic)
        return slots

    def _convolutions(self, prefix: str, stack: ConvolutionStack) -> None:
        """The numbering counts the activations between the layers too."""
        self.parameters(f"{prefix}.0.conv", stack.entry.conv)
        index = 1
        for stage in stack.stages:
            assert isinstance(stage, Stage)
            for residual in stage.residuals:
                assert isinstance(residual, ResidualBlock)
                self.parameters(f"{prefix}.{index}.block.1.conv", residual.dilated.conv)
                self.parameters(f"{prefix}.{index}.block.3.conv", residual.pointwise.conv)
                index += 1
            self.parameters(f"{prefix}.{index + 1}.conv", stage.shorten.conv)
            index += 2
        self.parameters(f"{prefix}.{index + 1}.conv", stack.exit.conv)

    def _transformer(self, prefix: str, transformer: EncoderTransformer) -> None:
        for index, layer in enumerate(transformer.layers):
            assert isinstance(layer, EncoderLayer)
            name = f"{prefix}.{index}"
            self.parameters(f"{name}.input_layernorm", layer.attention_norm)
            self.parts(f"{name}.self_attn", ("q_proj", "k_proj", "v_proj"), layer.attention.qkv)
            self.parameters(f"{name}.self_attn.o_proj", layer.attention.output)
            self.tensor(f"{name}.self_attn_layer_scale.scale", layer.attention_scale)
            self.parameters(f"{name}.post_attention_layernorm", layer.mlp_norm)
            self.parameters(f"{name}.mlp.fc1", layer.expand)
            self.parameters(f"{name}.mlp.fc2", layer.contract)
            self.tensor(f"{name}.mlp_layer_scale.scale", layer.mlp_scale)

    def _quantizer(self, prefix: str, quantizer: ResidualQuantizer) -> None:
        """Hold sums and counts of each codebook until both are known, then divide."""
        vector_dim, channels = quantizer.projection.weight.shape
        self.slots[f"{prefix}.input_proj.weight"] = TensorSlot((vector_dim, channels, 1), quantizer.store_projection)
        raw: dict[str, Tensor] = {}
        for index in range(len(quantizer.tables)):
            sums, counts = (f"{prefix}.layers.{index}.codebook.{part}" for part in ("embed_sum", "cluster_usage"))
            self.slots[sums] = TensorSlot((CODEBOOK_SIZE, vector_dim), partial(raw.__setitem__, sums))
            self.slots[counts] = TensorSlot((CODEBOOK_SIZE,), partial(raw.__setitem__, counts))
            self.folds.append(partial(_divide, quantizer, index, raw, sums, counts))


def _divide(quantizer: ResidualQuantizer, index: int, raw: dict[str, Tensor], sums: str, counts: str) -> None:
    quantizer.store(index, raw.pop(sums), raw.pop(counts))


def load(encoder: CodecEncoder, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Store every encoder tensor in its slot and return the names used; raise CheckpointError with all problems."""
    return EncoderSlots.of(encoder).load(
        tensors,
        what="codec encoder",
        skip=lambda name: name.startswith(DECODER_PREFIX) or is_unused(name),
    )
