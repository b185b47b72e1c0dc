"""The configuration files of the published checkpoints, composed from their sizes, and small ones of the same form.

Equal in meaning to the published files: every key that any implementation reads is there; the dump of generic
transformers defaults is not. The sizes "tiny" (1.7B form: the code predictor has a projection), "tiny-0.6B" (equal
widths, no projection) and "tiny-heads128" (attention heads of the published size) keep every published id, speaker and
language but fit in a few megabytes. Knows no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen3tts_hw.config import ARCHITECTURE, CODEC_SUBFOLDER, MODEL_TYPE, MODEL_VARIANTS, TOKENIZER_TYPE, TextTokens
from qwen3tts_hw.errors import UnsupportedError
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

Json = dict[str, Any]

PUBLISHED_TEXT_VOCAB_SIZE = 151_936
PUBLISHED_TEXT_TOKENS = TextTokens(
    im_start=151_644, im_end=151_645, assistant=77_091, tts_pad=151_671, tts_bos=151_672, tts_eos=151_673
)
LANGUAGE_IDS: Mapping[str, int] = {
    "chinese": 2055,
    "english": 2050,
    "german": 2053,
    "italian": 2070,
    "portuguese": 2071,
    "spanish": 2054,
    "japanese": 2058,
    "korean": 2064,
    "french": 2061,
    "russian": 2069,
}
DIALECT_IDS: Mapping[str, int] = {"beijing_dialect": 2074, "sichuan_dialect": 2062}
SPEAKER_IDS: Mapping[str, int] = {
    "serena": 3066,
    "vivian": 3065,
    "uncle_fu": 3010,
    "ryan": 3061,
    "aiden": 2861,
    "ono_anna": 2873,
    "sohee": 2864,
    "eric": 2875,
    "dylan": 2878,
}
SPEAKER_DIALECTS: Mapping[str, str] = {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}


@dataclass(frozen=True, slots=True)
class _Size:
    """The numbers that differ between sizes."""

    size_name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mrope_section: tuple[int, int, int]
    text_hidden: int
    predictor_hidden: int
    predictor_intermediate: int
    predictor_layers: int
    predictor_head_dim: int
    small: bool


# The tiny talker's head_dim is 32, the smallest that vLLM's attention kernels take on every device.
_SIZES = {
    "tiny": _Size("1b7", 64, 128, 3, 4, 2, 32, (6, 5, 5), 32, 48, 96, 2, 16, small=True),
    "tiny-0.6B": _Size("0b6", 64, 128, 3, 4, 2, 32, (6, 5, 5), 32, 64, 128, 2, 16, small=True),
    # The published head size on little else: some devices' packed attention takes heads of 128 (and 192) only.
    "tiny-heads128": _Size("1b7", 64, 128, 3, 4, 2, 128, (24, 20, 20), 32, 48, 96, 2, 128, small=True),
    "0.6B": _Size("0b6", 1024, 3072, 28, 16, 8, 128, (24, 20, 20), 2048, 1024, 3072, 5, 128, small=False),
    "1.7B": _Size("1b7", 2048, 6144, 28, 16, 8, 128, (24, 20, 20), 2048, 1024, 3072, 5, 128, small=False),
}
SIZES = tuple(_SIZES)


def compose(variant: str, size: str, tokens: TextTokens, text_vocab_size: int) -> dict[str, Json]:
    """Compose every JSON file but the tokenizer's: relative path -> content.

    Raises UnsupportedError for an unknown variant or size, and for voice design in a 0.6B form, which does not exist.
    """
    numbers = _numbers(variant, size)
    return {
        "config.json": _model_config(variant, numbers, tokens, text_vocab_size),
        "generation_config.json": _generation_config(),
        "preprocessor_config.json": {
            "padding_side": "left",
            "padding_value": 0.0,
            "processor_class": "Qwen3TTSProcessor",
            "return_attention_mask": True,
        },
        f"{CODEC_SUBFOLDER}/config.json": _codec_config(small=numbers.small),
        f"{CODEC_SUBFOLDER}/configuration.json": {
            "framework": "pytorch",
            "task": "feature-extraction",
            "allow_remote": True,
        },
        f"{CODEC_SUBFOLDER}/preprocessor_config.json": {
            "chunk_length_s": None,
            "feature_extractor_type": "EncodecFeatureExtractor",
            "feature_size": 1,
            "overlap": None,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": True,
            "sampling_rate": SAMPLE_RATE_HZ,
        },
    }


def is_small(size: str) -> bool:
    """Whether a size is one of the small forms, stored in float32 throughout."""
    return size in _SIZES and _SIZES[size].small


def _numbers(variant: str, size: str) -> _Size:
    if variant not in MODEL_VARIANTS:
        raise UnsupportedError(f"unknown variant {variant!r}; supported: {', '.join(MODEL_VARIANTS)}")
    if size not in _SIZES:
        raise UnsupportedError(f"unknown size {size!r}; supported: {', '.join(SIZES)}")
    if variant == "voice_design" and _SIZES[size].size_name == "0b6":
        raise UnsupportedError(f"there is no voice_design checkpoint of size {size}; supported: tiny, 1.7B")
    return _SIZES[size]


def _model_config(variant: str, numbers: _Size, tokens: TextTokens, text_vocab_size: int) -> Json:
    config: Json = {
        "architectures": [ARCHITECTURE],
        "assistant_token_id": tokens.assistant,
        "im_end_token_id": tokens.im_end,
        "im_start_token_id": tokens.im_start,
        "tts_bos_token_id": tokens.tts_bos,
        "tts_eos_token_id": tokens.tts_eos,
        "tts_pad_token_id": tokens.tts_pad,
        "model_type": MODEL_TYPE,
        "tokenizer_type": TOKENIZER_TYPE,
        "tts_model_size": numbers.size_name,
        "tts_model_type": variant,
    }
    if variant == "base":
        config["speaker_encoder_config"] = _speaker_encoder_config(numbers)
    config["talker_config"] = _talker_config(variant, numbers, text_vocab_size)
    config["transformers_version"] = "4.57.3"
    return config


def _speaker_encoder_config(numbers: _Size) -> Json:
    config: Json = {"enc_dim": numbers.hidden, "sample_rate": SAMPLE_RATE_HZ}
    if numbers.small:
        config |= {"enc_channels": [32, 32, 32, 32, 96], "enc_se_channels": 16, "enc_attention_channels": 16}
    return config


def _talker_config(variant: str, numbers: _Size, text_vocab_size: int) -> Json:
    preset = variant == "custom_voice"
    return {
        "attention_bias": False,
        "attention_dropout": 0,
        "code_predictor_config": _predictor_config(numbers),
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_think_id": 2154,
        "codec_language_id": {**LANGUAGE_IDS, **(DIALECT_IDS if preset else {})},
        "codec_nothink_id": 2155,
        "codec_pad_id": 2148,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "spk_id": dict(SPEAKER_IDS) if preset else {},
        "spk_is_dialect": {name: SPEAKER_DIALECTS.get(name, False) for name in SPEAKER_IDS} if preset else {},
        "head_dim": numbers.head_dim,
        "hidden_act": "silu",
        "hidden_size": numbers.hidden,
        "initializer_range": 0.02,
        "intermediate_size": numbers.intermediate,
        "max_position_embeddings": 32_768,
        "model_type": "qwen3_tts_talker",
        "num_attention_heads": numbers.heads,
        "num_code_groups": NUM_CODEBOOKS,
        "num_hidden_layers": numbers.layers,
        "num_key_value_heads": numbers.kv_heads,
        "position_id_per_seconds": 13,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "interleaved": True,
            "mrope_section": list(numbers.mrope_section),
            "rope_type": "default",
            "type": "default",
        },
        "rope_theta": 1_000_000,
        "sliding_window": None,
        "text_hidden_size": numbers.text_hidden,
        "text_vocab_size": text_vocab_size,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 3072,
    }


def _predictor_config(numbers: _Size) -> Json:
    return {
        "attention_bias": False,
        "attention_dropout": 0,
        "head_dim": numbers.predictor_head_dim,
        "hidden_act": "silu",
        "hidden_size": numbers.predictor_hidden,
        "initializer_range": 0.02,
        "intermediate_size": numbers.predictor_intermediate,
        "layer_types": ["full_attention"] * numbers.predictor_layers,
        "max_position_embeddings": 65_536,
        "max_window_layers": 28,
        "model_type": "qwen3_tts_talker_code_predictor",
        "num_attention_heads": numbers.heads,
        "num_code_groups": NUM_CODEBOOKS,
        "num_hidden_layers": numbers.predictor_layers,
        "num_key_value_heads": numbers.kv_heads,
        "pad_token_id": None,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": CODEBOOK_SIZE,
    }


def _generation_config() -> Json:
    return {
        "do_sample": True,
        "repetition_penalty": 1.05,
        "temperature": 0.9,
        "top_p": 1.0,
        "top_k": 50,
        "subtalker_dosample": True,
        "subtalker_temperature": 0.9,
        "subtalker_top_p": 1.0,
        "subtalker_top_k": 50,
        "max_new_tokens": 8192,
    }


def _codec_config(*, small: bool) -> Json:
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": TOKENIZER_TYPE,
        "encoder_valid_num_quantizers": NUM_CODEBOOKS,
        "input_sample_rate": SAMPLE_RATE_HZ,
        "output_sample_rate": SAMPLE_RATE_HZ,
        "decode_upsample_rate": SAMPLES_PER_FRAME,
        "encode_downsample_rate": SAMPLES_PER_FRAME,
        "decoder_config": _codec_decoder_config() | (_SMALL_DECODER if small else {}),
        "encoder_config": _codec_encoder_config() | (_SMALL_ENCODER if small else {}),
        "transformers_version": "4.57.3",
    }


_SMALL_DECODER: Json = {
    "latent_dim": 64,
    "codebook_dim": 32,
    "decoder_dim": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "sliding_window": 5,
    "vector_quantization_hidden_dimension": 32,
}
_SMALL_ENCODER: Json = {
    "codebook_dim": 8,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_filters": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "num_quantizers": 18,  # two more than are used, as the published file has sixteen more
    "upsample_groups": 32,
    "vector_quantization_hidden_dimension": 8,
}


def _codec_decoder_config() -> Json:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "latent_dim": 1024,
        "codebook_dim": 512,
        "codebook_size": CODEBOOK_SIZE,
        "decoder_dim": 1536,
        "hidden_act": "silu",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "head_dim": 64,
        "num_attention_heads": 16,
        "num_hidden_layers": 8,
        "num_key_value_heads": 16,
        "num_quantizers": NUM_CODEBOOKS,
        "num_semantic_quantizers": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10_000,
        "semantic_codebook_size": 4096,
        "sliding_window": 72,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "vector_quantization_hidden_dimension": 512,
    }


def _codec_encoder_config() -> Json:
    return {
        "_frame_rate": 12.5,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "audio_channels": 1,
        "codebook_dim": 256,
        "codebook_size": CODEBOOK_SIZE,
        "compress": 2,
        "dilation_growth_rate": 2,
        "dtype": "float32",
        "head_dim": 64,
        "hidden_act": "gelu",
        "hidden_size": 512,
        "initializer_range": 0.02,
        "intermediate_size": 2048,
        "kernel_size": 7,
        "last_kernel_size": 3,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "norm_eps": 1e-05,
        "normalize": False,
        "num_attention_heads": 8,
        "num_filters": 64,
        "num_hidden_layers": 8,
        "num_key_value_heads": 8,
        "num_quantizers": 32,
        "num_residual_layers": 1,
        "num_semantic_quantizers": 1,
        "pad_mode": "constant",
        "residual_kernel_size": 3,
        "rope_theta": 10_000.0,
        "sampling_rate": SAMPLE_RATE_HZ,
        "sliding_window": 250,
        "transformers_version": "4.57.0.dev0",
        "trim_right_ratio": 1.0,
        "upsample_groups": 512,
        "upsampling_ratios": [8, 6, 5, 4],
        "use_cache": False,
        "use_causal_conv": True,
        "use_conv_shortcut": False,
        "use_streaming": False,
        "vector_quantization_hidden_dimension": 256,
    }
