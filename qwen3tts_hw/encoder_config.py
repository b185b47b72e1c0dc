"""Sizes of the two encoders that listen to reference audio: the codec's encoder and the speaker encoder.

Part of what :mod:`qwen3tts_hw.config` reads; only checkpoints that clone voices need them. Checkpoint spellings end
here. Anything the encoders do not implement raises ConfigError naming the key. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen3tts_hw.errors import ConfigError
from qwen3tts_hw.json_section import JsonSection
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

DOWNSAMPLE_STRIDE = 2  # from the convolutions' 25 Hz to 12.5 frames per second


@dataclass(frozen=True, slots=True)
class CodecEncoderConfig:
    """The codec encoder of ``speech_tokenizer/`` (spec 6.8).

    ``strides`` are in the order in which the audio meets them. ``num_quantizers`` counts what the file holds, of which
    the first 16 are used. ``sliding_window`` is in positions of 40 ms; the official package does not apply it.
    """

    num_filters: int
    kernel_size: int
    last_kernel_size: int
    residual_kernel_size: int
    num_residual_layers: int
    dilation_growth_rate: int
    compress: int
    strides: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    sliding_window: int
    num_quantizers: int
    vector_dim: int

    @property
    def samples_per_position(self) -> int:
        """Samples that one position of the transformer stands for."""
        return math.prod(self.strides)


@dataclass(frozen=True, slots=True)
class SpeakerEncoderConfig:
    """The speaker encoder (spec 7.2).

    ``channels``, ``kernel_sizes`` and ``dilations`` have one entry per stage: the first convolution, the residual
    blocks, and the aggregation of their outputs.
    """

    embedding_size: int
    num_mels: int
    channels: tuple[int, ...]
    kernel_sizes: tuple[int, ...]
    dilations: tuple[int, ...]
    attention_channels: int
    groups: int
    squeeze_channels: int


def parse_codec_encoder_config(codec: Mapping[str, Any], where: str) -> CodecEncoderConfig:
    """Parse the encoder's part of speech_tokenizer/config.json, which errors call ``where``."""
    top = JsonSection(codec, where)
    top.require("input_sample_rate", SAMPLE_RATE_HZ)
    top.require("encoder_valid_num_quantizers", NUM_CODEBOOKS)
    enc = top.section("encoder_config")
    parsed = CodecEncoderConfig(
        num_filters=enc.size("num_filters"),
        kernel_size=enc.size("kernel_size"),
        last_kernel_size=enc.size("last_kernel_size"),
        residual_kernel_size=enc.size("residual_kernel_size"),
        num_residual_layers=enc.size("num_residual_layers"),
        dilation_growth_rate=enc.size("dilation_growth_rate"),
        compress=enc.size("compress"),
        strides=enc.sizes("upsampling_ratios")[::-1],
        hidden_size=enc.size("hidden_size"),
        intermediate_size=enc.size("intermediate_size"),
        num_layers=enc.size("num_hidden_layers"),
        num_heads=enc.size("num_attention_heads"),
        head_dim=enc.size("head_dim"),
        norm_eps=enc.number("norm_eps"),
        rope_theta=enc.number("rope_theta"),
        sliding_window=enc.size("sliding_window"),
        num_quantizers=enc.size("num_quantizers"),
        vector_dim=enc.size("codebook_dim"),
    )
    _check_codec_encoder(enc, parsed)
    return parsed


def _check_codec_encoder(enc: JsonSection, parsed: CodecEncoderConfig) -> None:
    """Refuse what the encoder does not implement, rather than give wrong codes."""
    for key, expected in (
        ("audio_channels", 1),
        ("sampling_rate", SAMPLE_RATE_HZ),
        ("codebook_size", CODEBOOK_SIZE),
        ("num_semantic_quantizers", 1),
        ("num_key_value_heads", parsed.num_heads),
        ("vector_quantization_hidden_dimension", parsed.vector_dim),
        ("hidden_act", "gelu"),
        ("pad_mode", "constant"),
        ("use_causal_conv", True),
        ("use_conv_shortcut", False),
        ("attention_bias", False),
    ):
        enc.require(key, expected)
    samples = parsed.samples_per_position * DOWNSAMPLE_STRIDE
    if samples != SAMPLES_PER_FRAME:
        raise ConfigError(f"{enc.where}: upsampling_ratios make frames of {samples} samples, not {SAMPLES_PER_FRAME}")
    if parsed.num_quantizers < NUM_CODEBOOKS:
        raise ConfigError(f"{enc.where}: num_quantizers is {parsed.num_quantizers}; {NUM_CODEBOOKS} are used")
    if parsed.head_dim % 2:
        raise ConfigError(f"{enc.where}: head_dim {parsed.head_dim} is odd; rotary embedding needs pairs")


def parse_speaker_encoder_config(config: Mapping[str, Any], where: str) -> SpeakerEncoderConfig:
    """Parse speaker_encoder_config of a Base checkpoint's config.json, which errors call ``where``."""
    given = JsonSection(config, where).section("speaker_encoder_config")
    section = JsonSection({**_SPEAKER_DEFAULTS, **given.values}, given.where)
    section.require("sample_rate", SAMPLE_RATE_HZ)
    parsed = SpeakerEncoderConfig(
        embedding_size=section.size("enc_dim"),
        num_mels=section.size("mel_dim"),
        channels=section.sizes("enc_channels"),
        kernel_sizes=section.sizes("enc_kernel_sizes"),
        dilations=section.sizes("enc_dilations"),
        attention_channels=section.size("enc_attention_channels"),
        groups=section.size("enc_res2net_scale"),
        squeeze_channels=section.size("enc_se_channels"),
    )
    stages, width = len(parsed.channels), parsed.channels[0]
    if stages < 3 or {len(parsed.kernel_sizes), len(parsed.dilations)} != {stages}:
        raise ConfigError(
            f"{section.where}: enc_channels, enc_kernel_sizes and enc_dilations need one entry per stage, at least 3"
        )
    if set(parsed.channels[:-1]) != {width} or width % parsed.groups:
        raise ConfigError(
            f"{section.where}: enc_channels {list(parsed.channels)} must be equal but for the last, and a multiple of "
            f"enc_res2net_scale {parsed.groups}"
        )
    return parsed


_SPEAKER_DEFAULTS: Mapping[str, Any] = {
    "sample_rate": SAMPLE_RATE_HZ,
    "mel_dim": 128,
    "enc_channels": [512, 512, 512, 512, 1536],
    "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 4, 1],
    "enc_attention_channels": 128,
    "enc_res2net_scale": 8,
    "enc_se_channels": 128,
}
"""What the official configuration class assumes; published files give ``enc_dim`` and ``sample_rate`` only."""
