"""Which tensors a checkpoint must hold, and their shapes, derived from its sizes.

Covers ``model.safetensors`` (talker, code predictor, speaker encoder) and ``speech_tokenizer/model.safetensors`` (codec
decoder and encoder). Knows names and shapes only: no files, no weights, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from qwen3tts_hw.config import DecoderStackConfig, ModelConfig
from qwen3tts_hw.encoder_config import SpeakerEncoderConfig
from qwen3tts_hw.errors import ConfigError
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS

Shapes = dict[str, tuple[int, ...]]

UNUSED_CODEC_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        r"decoder\.quantizer\.rvq_(first|rest)\.input_proj\.weight",
        r"encoder\.quantizer\.\w+\.output_proj\.weight",
        r"encoder\.quantizer\.acoustic_residual_vector_quantizer\.layers\.(1[5-9]|[2-9]\d)\.codebook\.\w+",
        r"encoder\.quantizer\.\w+\.layers\.\d+\.codebook\.initialized",
    )
)
"""Tensors of the codec file that take no part in encoding or decoding 16 codebooks: left alone on purpose."""


def is_unused(name: str) -> bool:
    """Whether a tensor of the codec file is left alone on purpose."""
    return any(pattern.fullmatch(name) for pattern in UNUSED_CODEC_PATTERNS)


def main_tensors(config: ModelConfig) -> Shapes:
    """Names and shapes of ``model.safetensors``."""
    width, text_width = config.talker.hidden_size, config.text_hidden_size
    shapes: Shapes = {}
    _qwen3_stack(shapes, "talker.model.", config.talker)
    shapes["talker.model.codec_embedding.weight"] = (config.talker_vocab_size, width)
    shapes["talker.model.text_embedding.weight"] = (config.text_vocab_size, text_width)
    _affine(shapes, "talker.text_projection.linear_fc1", text_width, text_width)
    _affine(shapes, "talker.text_projection.linear_fc2", width, text_width)
    shapes["talker.codec_head.weight"] = (config.talker_vocab_size, width)
    _code_predictor(shapes, config)
    if config.speaker_encoder is not None:
        _speaker_encoder(shapes, config.speaker_encoder)
    return shapes


def codec_tensors(codec_json: Mapping[str, Any]) -> Shapes:
    """Names and shapes of ``speech_tokenizer/model.safetensors``, from the JSON of ``speech_tokenizer/config.json``."""
    shapes: Shapes = {}
    try:
        _codec_decoder(shapes, codec_json["decoder_config"])
        _codec_encoder(shapes, codec_json["encoder_config"])
    except KeyError as error:
        raise ConfigError(f"speech_tokenizer/config.json: {error.args[0]} is missing") from None
    return shapes


def _affine(shapes: Shapes, prefix: str, *weight: int, bias: int | None = None) -> None:
    """Add a weight and its bias; the bias is as long as the first dimension unless given (transposed convolutions)."""
    shapes[f"{prefix}.weight"] = weight
    shapes[f"{prefix}.bias"] = (weight[0] if bias is None else bias,)


def _qwen3_stack(shapes: Shapes, prefix: str, stack: DecoderStackConfig) -> None:
    width, inner = stack.hidden_size, stack.intermediate_size
    queries, keys = stack.num_heads * stack.head_dim, stack.num_kv_heads * stack.head_dim
    for index in range(stack.num_layers):
        layer = f"{prefix}layers.{index}."
        for projection, outputs in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{layer}self_attn.{projection}_proj.weight"] = (outputs, width)
        shapes[f"{layer}self_attn.o_proj.weight"] = (width, queries)
        shapes[f"{layer}self_attn.q_norm.weight"] = (stack.head_dim,)
        shapes[f"{layer}self_attn.k_norm.weight"] = (stack.head_dim,)
        _gated_mlp(shapes, layer, width, inner)
        shapes[f"{layer}input_layernorm.weight"] = (width,)
        shapes[f"{layer}post_attention_layernorm.weight"] = (width,)
    shapes[f"{prefix}norm.weight"] = (width,)


def _gated_mlp(shapes: Shapes, layer: str, width: int, inner: int) -> None:
    shapes[f"{layer}mlp.gate_proj.weight"] = (inner, width)
    shapes[f"{layer}mlp.up_proj.weight"] = (inner, width)
    shapes[f"{layer}mlp.down_proj.weight"] = (width, inner)


def _code_predictor(shapes: Shapes, config: ModelConfig) -> None:
    prefix, width = "talker.code_predictor.", config.predictor.hidden_size
    _qwen3_stack(shapes, f"{prefix}model.", config.predictor)
    for index in range(NUM_CODEBOOKS - 1):
        # The embeddings are summed into the talker's next input, so they have the talker's width.
        shapes[f"{prefix}model.codec_embedding.{index}.weight"] = (CODEBOOK_SIZE, config.talker.hidden_size)
        shapes[f"{prefix}lm_head.{index}.weight"] = (CODEBOOK_SIZE, width)
    if config.has_projection:
        _affine(shapes, f"{prefix}small_to_mtp_projection", width, config.talker.hidden_size)


def _speaker_encoder(shapes: Shapes, sizes: SpeakerEncoderConfig) -> None:
    channels, kernels = sizes.channels, sizes.kernel_sizes
    prefix, pooled = "speaker_encoder.", channels[-1]
    _affine(shapes, f"{prefix}blocks.0.conv", channels[0], sizes.num_mels, kernels[0])
    for index in range(1, len(channels) - 1):
        block, width = f"{prefix}blocks.{index}.", channels[index]
        part = width // sizes.groups
        _affine(shapes, f"{block}tdnn1.conv", width, channels[index - 1], 1)
        for group in range(sizes.groups - 1):
            _affine(shapes, f"{block}res2net_block.blocks.{group}.conv", part, part, kernels[index])
        _affine(shapes, f"{block}tdnn2.conv", width, width, 1)
        _affine(shapes, f"{block}se_block.conv1", sizes.squeeze_channels, width, 1)
        _affine(shapes, f"{block}se_block.conv2", width, sizes.squeeze_channels, 1)
    _affine(shapes, f"{prefix}mfa.conv", pooled, sum(channels[1:-1]), kernels[-1])
    _affine(shapes, f"{prefix}asp.tdnn.conv", sizes.attention_channels, 3 * pooled, 1)
    _affine(shapes, f"{prefix}asp.conv", pooled, sizes.attention_channels, 1)
    _affine(shapes, f"{prefix}fc", sizes.embedding_size, 2 * pooled, 1)


def _codec_decoder(shapes: Shapes, dec: Mapping[str, Any]) -> None:
    latent, width = dec["latent_dim"], dec["hidden_size"]
    heads = dec["num_attention_heads"] * dec["head_dim"]
    prefix = "decoder.pre_transformer."
    for index in range(dec["num_hidden_layers"]):
        layer = f"{prefix}layers.{index}."
        for projection in ("q", "k", "v"):
            shapes[f"{layer}self_attn.{projection}_proj.weight"] = (heads, width)
        shapes[f"{layer}self_attn.o_proj.weight"] = (width, heads)
        _gated_mlp(shapes, layer, width, dec["intermediate_size"])
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight", *_LAYER_SCALES):
            shapes[f"{layer}{name}"] = (width,)
    shapes[f"{prefix}norm.weight"] = (width,)
    _affine(shapes, f"{prefix}input_proj", width, latent)
    _affine(shapes, f"{prefix}output_proj", latent, width)
    _decoder_quantizer(shapes, dec)
    _affine(shapes, "decoder.pre_conv.conv", latent, dec["codebook_dim"], 3)
    for index, factor in enumerate(dec["upsampling_ratios"]):
        _upsampler(shapes, f"decoder.upsample.{index}.", latent, factor)
    _vocoder(shapes, dec)


_LAYER_SCALES = ("self_attn_layer_scale.scale", "mlp_layer_scale.scale")


def _decoder_quantizer(shapes: Shapes, dec: Mapping[str, Any]) -> None:
    outer, vector, entries = dec["codebook_dim"], dec["codebook_dim"] // 2, dec["codebook_size"]
    semantic = dec["num_semantic_quantizers"]
    for branch, count in (("rvq_first", semantic), ("rvq_rest", dec["num_quantizers"] - semantic)):
        prefix = f"decoder.quantizer.{branch}."
        shapes[f"{prefix}input_proj.weight"] = (vector, outer, 1)
        shapes[f"{prefix}output_proj.weight"] = (outer, vector, 1)
        for index in range(count):
            shapes[f"{prefix}vq.layers.{index}._codebook.cluster_usage"] = (entries,)
            shapes[f"{prefix}vq.layers.{index}._codebook.embedding_sum"] = (entries, vector)


def _upsampler(shapes: Shapes, prefix: str, channels: int, factor: int) -> None:
    """A transposed convolution and a ConvNeXt block."""
    _affine(shapes, f"{prefix}0.conv", channels, channels, factor)
    shapes[f"{prefix}1.gamma"] = (channels,)
    _affine(shapes, f"{prefix}1.dwconv.conv", channels, 1, 7)
    _affine(shapes, f"{prefix}1.norm", channels)
    _affine(shapes, f"{prefix}1.pwconv1", 4 * channels, channels)
    _affine(shapes, f"{prefix}1.pwconv2", channels, 4 * channels)


def _vocoder(shapes: Shapes, dec: Mapping[str, Any]) -> None:
    """The convolutional blocks that halve the channels while they raise the rate, down to one channel."""
    channels, rates = dec["decoder_dim"], dec["upsample_rates"]
    prefix = "decoder.decoder."
    _affine(shapes, f"{prefix}0.conv", channels, dec["latent_dim"], 7)
    for index, rate in enumerate(rates):
        block, half = f"{prefix}{index + 1}.block.", channels // 2
        _snake(shapes, f"{block}0", channels)
        _affine(shapes, f"{block}1.conv", channels, half, 2 * rate, bias=half)
        for unit in (2, 3, 4):
            for order, kernel in ((1, 7), (2, 1)):
                _snake(shapes, f"{block}{unit}.act{order}", half)
                _affine(shapes, f"{block}{unit}.conv{order}.conv", half, half, kernel)
        channels = half
    _snake(shapes, f"{prefix}{len(rates) + 1}", channels)
    _affine(shapes, f"{prefix}{len(rates) + 2}.conv", 1, channels, 7)


def _snake(shapes: Shapes, prefix: str, channels: int) -> None:
    shapes[f"{prefix}.alpha"] = shapes[f"{prefix}.beta"] = (channels,)


def _codec_encoder(shapes: Shapes, enc: Mapping[str, Any]) -> None:
    width, inner = enc["hidden_size"], enc["intermediate_size"]
    _seanet(shapes, enc)
    queries, keys = (enc[key] * enc["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    for index in range(enc["num_hidden_layers"]):
        layer = f"encoder.encoder_transformer.layers.{index}."
        for projection, outputs in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{layer}self_attn.{projection}_proj.weight"] = (outputs, width)
        shapes[f"{layer}self_attn.o_proj.weight"] = (width, queries)
        shapes[f"{layer}mlp.fc1.weight"] = (inner, width)
        shapes[f"{layer}mlp.fc2.weight"] = (width, inner)
        _affine(shapes, f"{layer}input_layernorm", width)
        _affine(shapes, f"{layer}post_attention_layernorm", width)
        for name in _LAYER_SCALES:
            shapes[f"{layer}{name}"] = (width,)
    shapes["encoder.downsample.conv.weight"] = (width, width, 4)  # 25 Hz to 12.5 Hz: stride 2, kernel 4
    _encoder_quantizer(shapes, enc)


def _seanet(shapes: Shapes, enc: Mapping[str, Any]) -> None:
    """The convolutional front end; indices count the parameter-free activations between the layers too."""
    prefix, channels, kernel = "encoder.encoder.layers.", enc["num_filters"], enc["residual_kernel_size"]
    _affine(shapes, f"{prefix}0.conv", channels, enc["audio_channels"], enc["kernel_size"])
    index = 1
    for ratio in reversed(enc["upsampling_ratios"]):
        narrow = channels // enc["compress"]
        for _ in range(enc["num_residual_layers"]):
            _affine(shapes, f"{prefix}{index}.block.1.conv", narrow, channels, kernel)
            _affine(shapes, f"{prefix}{index}.block.3.conv", channels, narrow, 1)
            index += 1
        _affine(shapes, f"{prefix}{index + 1}.conv", 2 * channels, channels, 2 * ratio)
        channels, index = 2 * channels, index + 2
    _affine(shapes, f"{prefix}{index + 1}.conv", enc["hidden_size"], channels, enc["last_kernel_size"])


def _encoder_quantizer(shapes: Shapes, enc: Mapping[str, Any]) -> None:
    width, vector = enc["hidden_size"], enc["vector_quantization_hidden_dimension"]
    semantic = enc["num_semantic_quantizers"]
    for branch, count in (("semantic", semantic), ("acoustic", enc["num_quantizers"] - semantic)):
        prefix = f"encoder.quantizer.{branch}_residual_vector_quantizer."
        shapes[f"{prefix}input_proj.weight"] = (vector, width, 1)
        shapes[f"{prefix}output_proj.weight"] = (width, vector, 1)
        for index in range(count):
            codebook = f"{prefix}layers.{index}.codebook."
            shapes[f"{codebook}initialized"] = (1,)
            shapes[f"{codebook}cluster_usage"] = (enc["codebook_size"],)
            shapes[f"{codebook}embed_sum"] = (enc["codebook_size"], enc["codebook_dim"])
