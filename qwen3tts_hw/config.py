"""What a checkpoint says about itself: config.json, speech_tokenizer/config.json, generation_config.json.

The only reader of those files. Checkpoint spellings (``num_code_groups``, ``spk_id``) end here. Values are frozen;
unknown or impossible sizes raise :class:`~qwen3tts_hw.errors.ConfigError` naming the key. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwen3tts_hw.encoder_config import (
    CodecEncoderConfig,
    SpeakerEncoderConfig,
    parse_codec_encoder_config,
    parse_speaker_encoder_config,
)
from qwen3tts_hw.errors import ConfigError
from qwen3tts_hw.json_section import JsonSection, read_json
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME, SamplingSpec

MODEL_TYPE = "qwen3_tts"
TOKENIZER_TYPE = "qwen3_tts_tokenizer_12hz"
ARCHITECTURE = "Qwen3TTSForConditionalGeneration"
MODEL_VARIANTS = ("custom_voice", "voice_design", "base")
CODEC_SUBFOLDER = "speech_tokenizer"
MIN_FACTOR = 1e-6  # smaller values of top_p and repetition_penalty vanish or overflow in float32
_CODEC_FILE = f"{CODEC_SUBFOLDER}/config.json"


@dataclass(frozen=True, slots=True)
class DecoderStackConfig:
    """Sizes of one Qwen3-style decoder stack (talker or code predictor)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float


@dataclass(frozen=True, slots=True)
class CodecTokens:
    """Ids of codebook 0's vocabulary that are not codes."""

    pad: int
    bos: int
    eos: int
    think: int
    nothink: int
    think_bos: int
    think_eos: int


@dataclass(frozen=True, slots=True)
class TextTokens:
    """Text ids the prompt is built from; ``assistant`` follows im_start in the role rows."""

    im_start: int
    im_end: int
    assistant: int
    tts_pad: int
    tts_bos: int
    tts_eos: int


@dataclass(frozen=True, slots=True)
class CodecDecoderConfig:
    """The codec decoder of ``speech_tokenizer/`` (spec 6.1)."""

    codebook_dim: int  # input_proj/output_proj width; code vectors are half as wide
    latent_dim: int
    decoder_dim: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    sliding_window: int
    upsample_rates: tuple[int, ...]
    upsampling_ratios: tuple[int, ...]

    @property
    def vector_dim(self) -> int:
        """Width of one codebook vector."""
        return self.codebook_dim // 2


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the checkpoint directory says, parsed once.

    ``variant`` is one of :data:`MODEL_VARIANTS`; ``size_name`` is "0b6" or "1b7" for published checkpoints.
    ``language_ids`` maps lower-case names, dialects included, to codec ids; ``speaker_ids`` maps lower-case names to
    codec ids; ``speaker_dialects`` maps a speaker to the language key that replaces auto and chinese (spec 4.2).
    The two encoders of reference audio exist in Base checkpoints only.
    """

    variant: str
    size_name: str
    talker: DecoderStackConfig
    predictor: DecoderStackConfig
    text_vocab_size: int
    text_hidden_size: int
    talker_vocab_size: int
    max_positions: int
    codec_tokens: CodecTokens
    text_tokens: TextTokens
    language_ids: Mapping[str, int]
    speaker_ids: Mapping[str, int]
    speaker_dialects: Mapping[str, str]
    codec: CodecDecoderConfig
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    max_new_frames: int = 8192
    codec_encoder: CodecEncoderConfig | None = None
    speaker_encoder: SpeakerEncoderConfig | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    raw_codec: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def speaker_embedding_size(self) -> int | None:
        """Width of a speaker embedding; None where voices are not cloned."""
        return None if self.speaker_encoder is None else self.speaker_encoder.embedding_size

    @property
    def has_projection(self) -> bool:
        """Whether the predictor maps the talker's width to its own (1.7B) or takes it as it is (0.6B)."""
        return self.talker.hidden_size != self.predictor.hidden_size

    @property
    def accepts_instruct(self) -> bool:
        """Whether this checkpoint follows an instruction; the 0.6B ones and Base were not trained to."""
        return self.variant != "base" and self.size_name != "0b6"

    @property
    def languages(self) -> tuple[str, ...]:
        """Names a request may give as its language, sorted; dialects are reached through a speaker only."""
        return ("auto", *sorted(name for name in self.language_ids if "dialect" not in name))

    @property
    def speakers(self) -> tuple[str, ...]:
        """Preset speaker names, sorted."""
        return tuple(sorted(self.speaker_ids))

    @classmethod
    def from_directory(cls, directory: str | Path) -> ModelConfig:
        """Read the three JSON files of a checkpoint directory; raise ConfigError naming what is wrong."""
        root = Path(directory)
        generation = root / "generation_config.json"
        return cls.from_dicts(
            read_json(root / "config.json"),
            read_json(root / _CODEC_FILE),
            read_json(generation) if generation.is_file() else {},
        )

    @classmethod
    def from_dicts(
        cls, config: Mapping[str, Any], codec: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Parse the decoded JSON of config.json, speech_tokenizer/config.json and generation_config.json."""
        top = JsonSection(config, "config.json")
        _check_family(top)
        talker = top.section("talker_config")
        predictor = talker.section("code_predictor_config")
        variant = top.text("tts_model_type")
        if variant not in MODEL_VARIANTS:
            raise ConfigError(f"config.json: tts_model_type is {variant!r}; supported: {', '.join(MODEL_VARIANTS)}")
        clones = variant == "base"
        defaults = JsonSection(generation or {}, "generation_config.json")
        parsed = cls(
            variant=variant,
            size_name=str(config.get("tts_model_size", "")),
            talker=_stack(talker),
            predictor=_stack(predictor),
            text_vocab_size=talker.size("text_vocab_size"),
            text_hidden_size=talker.size("text_hidden_size"),
            talker_vocab_size=talker.size("vocab_size"),
            max_positions=talker.size("max_position_embeddings"),
            codec_tokens=_codec_tokens(talker),
            text_tokens=_text_tokens(top),
            language_ids=_id_table(talker, "codec_language_id"),
            speaker_ids=_id_table(talker, "spk_id"),
            speaker_dialects=_dialects(talker),
            codec=parse_codec_config(codec),
            sampling=_sampling(defaults),
            max_new_frames=int(_from(defaults, "max_new_tokens", 8192, low=1)),
            codec_encoder=parse_codec_encoder_config(codec, _CODEC_FILE) if clones else None,
            speaker_encoder=parse_speaker_encoder_config(config, top.where) if clones else None,
            raw=dict(config),
            raw_codec=dict(codec),
        )
        _check_sizes(parsed, talker, predictor)
        return parsed


def parse_codec_config(codec: Mapping[str, Any]) -> CodecDecoderConfig:
    """Parse speech_tokenizer/config.json; raise ConfigError for a codec other than the 12 Hz one."""
    top = JsonSection(codec, _CODEC_FILE)
    found = top.text("model_type")
    if found != TOKENIZER_TYPE:
        raise ConfigError(f"{top.where}: model_type is {found!r}; only {TOKENIZER_TYPE!r} is supported")
    dec = top.section("decoder_config")
    parsed = CodecDecoderConfig(
        codebook_dim=dec.size("codebook_dim"),
        latent_dim=dec.size("latent_dim"),
        decoder_dim=dec.size("decoder_dim"),
        hidden_size=dec.size("hidden_size"),
        intermediate_size=dec.size("intermediate_size"),
        num_layers=dec.size("num_hidden_layers"),
        num_heads=dec.size("num_attention_heads"),
        head_dim=dec.size("head_dim"),
        rms_norm_eps=dec.number("rms_norm_eps"),
        rope_theta=dec.number("rope_theta"),
        sliding_window=dec.size("sliding_window"),
        upsample_rates=dec.sizes("upsample_rates"),
        upsampling_ratios=dec.sizes("upsampling_ratios"),
    )
    samples = 1
    for rate in (*parsed.upsample_rates, *parsed.upsampling_ratios):
        samples *= rate
    _require(dec, "upsample_rates and upsampling_ratios multiplied", samples, SAMPLES_PER_FRAME)
    _require(dec, "num_quantizers", dec.size("num_quantizers"), NUM_CODEBOOKS)
    _require(dec, "codebook_size", dec.size("codebook_size"), CODEBOOK_SIZE)
    _require(dec, "num_key_value_heads", dec.size("num_key_value_heads"), parsed.num_heads)
    _require(top, "output_sample_rate", top.size("output_sample_rate"), SAMPLE_RATE_HZ)
    return parsed


def _check_family(top: JsonSection) -> None:
    found = top.values.get("model_type")
    if found != MODEL_TYPE:
        raise ConfigError(f"{top.where}: model_type is {found!r}; this package serves {MODEL_TYPE!r} only")
    tokenizer = top.values.get("tokenizer_type", TOKENIZER_TYPE)
    if tokenizer != TOKENIZER_TYPE:
        raise ConfigError(f"{top.where}: tokenizer_type is {tokenizer!r}; only {TOKENIZER_TYPE!r} is supported")


def _stack(section: JsonSection) -> DecoderStackConfig:
    if section.values.get("attention_bias"):
        raise ConfigError(f"{section.where}: attention_bias is true; the published models have none")
    if section.values.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{section.where}: hidden_act is {section.values['hidden_act']!r}; only 'silu' is supported")
    return DecoderStackConfig(
        hidden_size=section.size("hidden_size"),
        intermediate_size=section.size("intermediate_size"),
        num_layers=section.size("num_hidden_layers"),
        num_heads=section.size("num_attention_heads"),
        num_kv_heads=section.size("num_key_value_heads"),
        head_dim=section.size("head_dim"),
        rms_norm_eps=section.number("rms_norm_eps"),
        rope_theta=_rope_theta(section),
    )


def _rope_theta(section: JsonSection) -> float:
    """RoPE base; transformers 5 writes it under rope_parameters, transformers 4 beside the sizes."""
    for holder in (section.section_or_empty("rope_parameters"), section):
        if holder.values.get("rope_theta") is not None:
            theta = holder.number("rope_theta")
            if theta > 1.0:
                return theta
            raise ConfigError(f"{holder.where}: rope_theta is {theta:g}; it must be above 1")
    raise ConfigError(f"{section.where}: rope_theta is missing (a default would ruin the audio)")


def _codec_tokens(talker: JsonSection) -> CodecTokens:
    return CodecTokens(
        pad=talker.integer("codec_pad_id"),
        bos=talker.integer("codec_bos_id"),
        eos=talker.integer("codec_eos_token_id"),
        think=talker.integer("codec_think_id"),
        nothink=talker.integer("codec_nothink_id"),
        think_bos=talker.integer("codec_think_bos_id"),
        think_eos=talker.integer("codec_think_eos_id"),
    )


def _text_tokens(top: JsonSection) -> TextTokens:
    return TextTokens(
        im_start=top.integer("im_start_token_id"),
        im_end=top.integer("im_end_token_id"),
        assistant=top.integer("assistant_token_id"),
        tts_pad=top.integer("tts_pad_token_id"),
        tts_bos=top.integer("tts_bos_token_id"),
        tts_eos=top.integer("tts_eos_token_id"),
    )


def _id_table(talker: JsonSection, key: str) -> dict[str, int]:
    section = talker.section_or_empty(key)
    return {name.lower(): section.integer(name) for name in section.values}


def _dialects(talker: JsonSection) -> dict[str, str]:
    """Speakers that speak a dialect; a speaker missing from the table has none (fine-tuned checkpoints)."""
    table = talker.section_or_empty("spk_is_dialect").values
    return {name.lower(): value for name, value in table.items() if isinstance(value, str) and value}


def _sampling(generation: JsonSection) -> SamplingSpec:
    """Defaults of generation_config.json; do_sample false there means greedy."""
    return SamplingSpec(
        temperature=_from(generation, "temperature", 0.9, low=0.0) if _flag(generation, "do_sample") else 0.0,
        top_k=int(_from(generation, "top_k", 50, low=0)),
        top_p=_from(generation, "top_p", 1.0, low=MIN_FACTOR, high=1.0),
        repetition_penalty=_from(generation, "repetition_penalty", 1.05, low=MIN_FACTOR),
        residual_temperature=(
            _from(generation, "subtalker_temperature", 0.9, low=0.0) if _flag(generation, "subtalker_dosample") else 0.0
        ),
        residual_top_k=int(_from(generation, "subtalker_top_k", 50, low=0)),
        residual_top_p=_from(generation, "subtalker_top_p", 1.0, low=MIN_FACTOR, high=1.0),
    )


def _from(generation: JsonSection, key: str, default: float, *, low: float, high: float = 1e6) -> float:
    """A number of generation_config.json, or the official package's default where it is missing."""
    value = default if generation.values.get(key) is None else generation.number(key)
    if not low <= value <= high:  # neither holds for NaN
        raise ConfigError(f"{generation.where}: {key} is {value:g}; it must be from {low:g} to {high:g}")
    return value


def _flag(generation: JsonSection, key: str) -> bool:
    value = generation.values.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{generation.where}: {key} must be true or false, found {value!r}")
    return value is not False


def _require(section: JsonSection, key: str, found: int, expected: int) -> None:
    if found != expected:
        raise ConfigError(f"{section.where}: {key} is {found}; the 12 Hz models have {expected}")


def _check_sizes(config: ModelConfig, talker: JsonSection, predictor: JsonSection) -> None:
    _require(talker, "num_code_groups", talker.size("num_code_groups"), NUM_CODEBOOKS)
    _require(predictor, "num_code_groups", predictor.size("num_code_groups"), NUM_CODEBOOKS)
    _require(predictor, "vocab_size", predictor.size("vocab_size"), CODEBOOK_SIZE)
    for section, stack in ((talker, config.talker), (predictor, config.predictor)):
        if stack.num_heads % stack.num_kv_heads:
            raise ConfigError(
                f"{section.where}: num_attention_heads {stack.num_heads} is not a multiple of "
                f"num_key_value_heads {stack.num_kv_heads}"
            )
        if stack.head_dim % 2:
            raise ConfigError(f"{section.where}: head_dim {stack.head_dim} is odd; rotary embedding needs pairs")
    if config.speaker_embedding_size not in (None, config.talker.hidden_size):
        raise ConfigError(
            f"config.json: speaker_encoder_config: enc_dim is {config.speaker_embedding_size}; the embedding becomes a "
            f"row of the talker, whose hidden_size is {config.talker.hidden_size}"
        )
    _check_ids(config, talker)


def _check_ids(config: ModelConfig, talker: JsonSection) -> None:
    tokens = config.codec_tokens
    for name in ("pad", "bos", "eos", "think", "nothink", "think_bos", "think_eos"):
        value = getattr(tokens, name)
        if not CODEBOOK_SIZE <= value < config.talker_vocab_size:
            raise ConfigError(
                f"{talker.where}: codec {name} id {value} is outside {CODEBOOK_SIZE}..{config.talker_vocab_size - 1}"
            )
    for table, key in ((config.language_ids, "codec_language_id"), (config.speaker_ids, "spk_id")):
        for name, value in table.items():
            if not 0 <= value < config.talker_vocab_size:
                raise ConfigError(f"{talker.where}: {key}[{name!r}] is {value}, vocab_size {config.talker_vocab_size}")
    for name in ("im_start", "im_end", "assistant", "tts_pad", "tts_bos", "tts_eos"):
        if not 0 <= getattr(config.text_tokens, name) < config.text_vocab_size:
            raise ConfigError(f"config.json: {name} token id is outside text_vocab_size {config.text_vocab_size}")
    for speaker, dialect in config.speaker_dialects.items():
        if dialect not in config.language_ids:
            raise ConfigError(f"{talker.where}: spk_is_dialect[{speaker!r}] names {dialect!r}, unknown language")
