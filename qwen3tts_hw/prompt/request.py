"""A speech request, and the one place where it is validated.

:func:`build_request` takes what a user gave, from HTTP, the command line or Python, and either returns a
:class:`SpeechRequest` that every later stage may trust, or raises RequestError naming the field in the spelling of the
HTTP interface. Knows the checkpoint's configuration, not its weights; imports no torch.
"""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import dataclass, replace
from numbers import Integral, Real

from qwen3tts_hw.config import MIN_FACTOR, ModelConfig
from qwen3tts_hw.errors import RequestError, UnknownVoiceError
from qwen3tts_hw.settings import Settings
from qwen3tts_hw.types import CODEBOOK_SIZE, ClonedVoice, SamplingSpec

TEXT_MODES = ("whole", "streaming")
AUTO_LANGUAGE = "auto"
MIN_TEMPERATURE = 0.01  # below it, and above 0, the division of the logits would overflow
MAX_TEMPERATURE = 10.0
MAX_REPETITION_PENALTY = 10.0
MAX_SEED = 2**63 - 1
_WIDTHS = (1_024, 2_048)  # of the published checkpoints
_QUOTED = 60
_SURROGATE = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """A valid request.

    ``voice`` is a key of the checkpoint's speaker table, a :class:`~qwen3tts_hw.types.ClonedVoice` for a Base
    checkpoint, or None where the instruction designs the voice.
    ``language`` is lower case, "auto" if it was left open. ``instruct`` is None or holds more than white space.
    ``text_mode`` says whether the text enters the prompt as a whole, or one token per frame ("streaming").
    ``max_frames`` limits the length.
    """

    text: str
    voice: str | ClonedVoice | None
    language: str
    instruct: str | None
    text_mode: str
    sampling: SamplingSpec
    max_frames: int


def build_request(  # noqa: PLR0913 - one keyword per request field, passed through by name
    config: ModelConfig,
    settings: Settings,
    *,
    text: str,
    voice: str | ClonedVoice | None = None,
    language: str | None = None,
    instruct: str | None = None,
    text_mode: str | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    max_new_tokens: int | None = None,
) -> SpeechRequest:
    """Validate a request against a checkpoint; None stands for the checkpoint's default everywhere.

    ``temperature`` 0 is greedy for all 16 codebooks. A missing ``seed`` is drawn at random. ``max_new_tokens`` counts
    frames. Raises RequestError (UnknownVoiceError for a voice the checkpoint does not have) naming the field.
    """
    return SpeechRequest(
        text=_text(text, "input", settings),
        voice=_voice(config, voice),
        language=_language(config, language),
        instruct=_instruct(config, settings, instruct),
        text_mode=_text_mode(config, text_mode),
        sampling=_sampling(config.sampling, temperature, top_k, top_p, repetition_penalty, seed),
        max_frames=_integer("max_new_tokens", max_new_tokens, 1, config.max_new_frames, default=config.max_new_frames),
    )


def _string(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise RequestError(field, f"{field} must be a string, found {_described(value)}")
    if found := _SURROGATE.search(value):
        raise RequestError(
            field,
            f"{field} is not valid Unicode: unpaired surrogate U+{ord(found[0]):04X} at character {found.start()}",
        )
    return value


def _text(value: object, field: str, settings: Settings) -> str:
    text = _string(value, field)
    if len(text) > settings.max_text_chars:
        raise RequestError(
            field, f"{field} has {len(text)} characters; at most {settings.max_text_chars} are accepted at once"
        )
    if not text.strip():
        raise RequestError(field, f"{field} is empty; text to speak was expected")
    return text


def _voice(config: ModelConfig, value: object) -> str | ClonedVoice | None:
    if isinstance(value, ClonedVoice):
        check_cloning(config, "voice")
        return _cloned(config, value)
    if config.variant == "base":
        raise RequestError(
            "voice",
            "this checkpoint (base) speaks in voices cloned from reference audio: give ref_audio with ref_text, or the "
            "name of a registered voice",
        )
    if config.variant != "custom_voice":
        if value is None:
            return None
        raise RequestError(
            "voice",
            f"this checkpoint ({config.variant}) has no preset voices; describe the voice in instructions, or use a "
            "custom_voice checkpoint",
        )
    supported = f"supported: {', '.join(config.speakers)}"
    if value is None:
        raise RequestError("voice", f"voice is missing; {supported}")
    wanted = _string(value, "voice")
    exact = wanted.strip().lower()
    if exact in config.speaker_ids:
        return exact
    for name in config.speakers:
        if _joined(name) == _joined(exact):
            return name
    raise UnknownVoiceError("voice", f"unknown voice {_shortened(wanted)}; {supported}")


def check_reference_text(value: object, settings: Settings) -> str:
    """Validate the text spoken in reference audio; raise RequestError."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise RequestError(
            "ref_text",
            "ref_text is missing; give what is said in ref_audio, or set x_vector_only_mode to use the voice's sound "
            "alone",
        )
    return _text(value, "ref_text", settings)


def check_cloning(config: ModelConfig, field: str) -> None:
    """Raise RequestError blaming ``field`` if the checkpoint cannot clone voices."""
    if config.variant != "base":
        raise RequestError(
            field,
            f"{field} is for cloned voices, which this checkpoint ({config.variant}) does not make; use "
            "Qwen3-TTS-12Hz-1.7B-Base or Qwen3-TTS-12Hz-0.6B-Base",
        )


def _cloned(config: ModelConfig, voice: ClonedVoice) -> ClonedVoice:
    """Check what does not depend on how the voice came about: its embedding's width, its reference's completeness."""
    width, found = config.talker.hidden_size, len(voice.embedding) // 4
    if found != width or len(voice.embedding) % 4:
        raise RequestError(
            "speaker_embedding",
            f"the speaker embedding has {found} numbers; this checkpoint needs {width}"
            + ("; it was made with a checkpoint of the other size" if found in _WIDTHS else ""),
        )
    if bool(voice.reference_text.strip()) != bool(voice.reference_codes):
        raise RequestError("ref_text", "the voice has reference text or reference codes, but not both")
    return voice


def _joined(name: str) -> str:
    """A speaker's name with spaces and hyphens as underscores: "uncle fu" is uncle_fu."""
    return re.sub(r"[\s\-]+", "_", name)


def _language(config: ModelConfig, value: object) -> str:
    if value is None:
        return AUTO_LANGUAGE
    given = _string(value, "language")
    language = given.strip().lower()
    if language in config.languages:
        return language
    message = f"unknown language {_shortened(given)}; supported: {', '.join(config.languages)}"
    if language in config.language_ids:
        speakers = sorted(name for name, dialect in config.speaker_dialects.items() if dialect == language)
        message = f"{language} is a dialect, which is chosen through the voice" + (
            f" ({', '.join(speakers)}) with language auto or chinese" if speakers else ""
        )
    raise RequestError("language", message)


def _instruct(config: ModelConfig, settings: Settings, value: object) -> str | None:
    """Validate the instruction; white space alone counts as none, and voice design cannot do without one."""
    given = "" if value is None else _string(value, "instructions")
    if not given.strip():
        if config.variant == "voice_design":
            raise RequestError(
                "instructions", "instructions is missing; this checkpoint needs a description of the voice"
            )
        return None
    if not config.accepts_instruct:
        kind = "base" if config.variant == "base" else "0.6B"
        raise RequestError(
            "instructions",
            f"this checkpoint ({kind}) does not follow instructions; Qwen3-TTS-12Hz-1.7B-CustomVoice does",
        )
    return _text(given, "instructions", settings)


def _text_mode(config: ModelConfig, value: object) -> str:
    if value is None:
        return "streaming" if config.variant == "base" else "whole"
    mode = _string(value, "text_mode")
    if mode not in TEXT_MODES:
        raise RequestError("text_mode", f"unknown text_mode {_shortened(mode)}; supported: {', '.join(TEXT_MODES)}")
    return mode


def _sampling(
    defaults: SamplingSpec,
    temperature: object,
    top_k: object,
    top_p: object,
    repetition_penalty: object,
    seed: object,
) -> SamplingSpec:
    chosen = _number("temperature", temperature, 0.0, MAX_TEMPERATURE, default=defaults.temperature)
    if 0.0 < chosen < MIN_TEMPERATURE:
        raise RequestError(
            "temperature", f"temperature is {chosen}; use 0 for greedy choice, or at least {MIN_TEMPERATURE}"
        )
    return replace(
        defaults,
        temperature=chosen,
        top_k=_integer("top_k", top_k, 0, CODEBOOK_SIZE, default=defaults.top_k),
        top_p=_positive("top_p", top_p, 1.0, default=defaults.top_p),
        repetition_penalty=_positive(
            "repetition_penalty", repetition_penalty, MAX_REPETITION_PENALTY, default=defaults.repetition_penalty
        ),
        residual_temperature=defaults.residual_temperature if chosen else 0.0,
        seed=_integer("seed", seed, 0, MAX_SEED, default=secrets.randbelow(MAX_SEED + 1)),
    )


def _integer(field: str, value: object, low: int, high: int, *, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(field, f"{field} must be an integer, found {_described(value)}")
    number = int(value)
    if not low <= number <= high:
        raise RequestError(field, f"{field} must be from {low} to {high}, found {_described(number)}")
    return number


def _number(field: str, value: object, low: float, high: float, *, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(field, f"{field} must be a number, found {_described(value)}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        number = math.inf
    if not low <= number <= high:  # neither holds for NaN
        raise RequestError(field, f"{field} must be from {low:g} to {high:g}, found {_described(value)}")
    return number


def _positive(field: str, value: object, high: float, *, default: float) -> float:
    number = _number(field, value, 0.0, high, default=default)
    if number < MIN_FACTOR:
        raise RequestError(field, f"{field} must be at least {MIN_FACTOR:g}, found {_described(number)}")
    return number


def _described(value: object) -> str:
    """What a wrong value was, briefly: numbers and short strings as they are, anything else by its type."""
    if isinstance(value, str):
        return _shortened(value)
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, Integral) and abs(int(value)) >= 10**20:  # str() of a huge integer is slow, or refused
        return "a very large integer" if int(value) > 0 else "a very large negative integer"
    return str(value) if isinstance(value, Real) else f"a value of type {type(value).__name__}"


def _shortened(text: str) -> str:
    """Quote a user's string in a message, cut after 60 characters, with nothing unprintable in it."""
    return repr(text) if len(text) <= _QUOTED else f"{text[:_QUOTED]!r}..."
