"""The JSON of ``POST /v1/audio/speech``: field names and types, and how they become a SpeechRequest.

OpenAI's fields and the ones this model adds. Only the shape is decided here; what a value may be is decided by
:func:`qwen3tts_hw.prompt.request.build_request`, except for the fields that concern HTTP alone. Unknown fields are
refused: a misspelt option must not be ignored. Imports no torch.
"""

from __future__ import annotations

import difflib
import struct
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.prompt.request import TEXT_MODES, SpeechRequest, build_request
from qwen3tts_hw.serving.body import json_type, printable
from qwen3tts_hw.serving.errors import HttpError
from qwen3tts_hw.settings import Settings
from qwen3tts_hw.types import NUM_CODEBOOKS, SAMPLE_RATE_HZ, ClonedVoice, SpeechOutcome

RESPONSE_FORMATS = ("wav", "pcm")
STREAM_FORMATS = ("audio", "sse")
NO_VOICE = ("design", "default", "")  # what a client that must send a voice sends to a checkpoint that has none
_EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list of numbers",
}


class VoiceReference(BaseModel):
    """OpenAI's second spelling of a voice: an object with its id."""

    model_config = ConfigDict(strict=True, extra="forbid")

    id: str


class SpeechBody(BaseModel):
    """The request body. ``null`` is the same as leaving an optional field out."""

    model_config = ConfigDict(strict=True, extra="forbid")

    input: str = Field(description="The text to speak.")
    model: str | None = Field(None, description="A served model name; may be left out.")
    voice: str | VoiceReference | None = Field(
        None, description="A preset or registered voice; 'default' or 'design' where there is none to choose."
    )
    ref_audio: str | None = Field(
        None, description="Base checkpoints: audio of the voice, as a data URL or base64; or an address, if allowed."
    )
    ref_text: str | None = Field(None, description="What is said in ref_audio.")
    x_vector_only_mode: bool | None = Field(None, description="True: use the sound of the voice alone, no ref_text.")
    speaker_embedding: list[float | int] | None = Field(None, description="A voice as numbers, instead of ref_audio.")
    trim_silence: bool | None = Field(None, description="Cut silence before and after the speech in ref_audio.")
    normalize_loudness: bool | None = Field(None, description="Bring ref_audio to a usual loudness.")
    trailing_silence_ms: int | None = Field(None, description="Silence to append to ref_audio.")
    instructions: str | None = Field(None, description="How to speak, or for voice design what the voice is like.")
    response_format: str | None = Field(None, description="'wav' (default) or 'pcm': 16-bit mono at 24 kHz.")
    speed: float | int | None = Field(None, description="Only 1.0.")
    stream_format: str | None = Field(None, description="'audio' (default) or 'sse'.")
    stream: bool | None = Field(None, description="False: one body of exact size when all of it is made. Default true.")
    language: str | None = Field(None, description="A language of the checkpoint, or 'auto' (default).")
    text_mode: str | None = Field(None, description="'whole' or 'streaming': how the text enters the prompt.")
    seed: int | None = Field(None, description="0 .. 2**63 - 1; drawn at random if left out.")
    temperature: float | int | None = Field(None, description="0 is greedy.")
    top_k: int | None = Field(None, description="0 switches the filter off.")
    top_p: float | int | None = Field(None, description="1.0 switches the filter off.")
    repetition_penalty: float | int | None = Field(None, description="1.0 switches it off.")
    max_new_tokens: int | None = Field(None, description="Most frames of 80 ms to make.")
    include_codes: bool | None = Field(None, description="Keep the codec's codes for the outcome.")

    @property
    def audio_format(self) -> str:
        """The container: OpenAI's default is mp3, which is not made here, so the default is wav."""
        return "wav" if self.response_format is None else self.response_format

    @property
    def sse(self) -> bool:
        """Whether the answer is a stream of server-sent events."""
        return self.stream_format == "sse"

    @property
    def streaming(self) -> bool:
        """Whether the answer starts with the first chunk: the default, since OpenAI's client reads it as it comes."""
        return self.stream is not False


def parse_speech_body(values: Mapping[str, Any]) -> SpeechBody:
    """Check names, types and the HTTP-only fields of a decoded body; raise HttpError 400 naming the field."""
    try:
        body = SpeechBody.model_validate(dict(values))
    except ValidationError as error:
        raise _shape_error(error, values) from None
    _check_choice("response_format", body.audio_format, RESPONSE_FORMATS)
    _check_choice("stream_format", body.stream_format or STREAM_FORMATS[0], STREAM_FORMATS)
    if body.speed is not None and body.speed != 1.0:
        raise HttpError(400, "speed must be 1.0; other speeds are not supported", param="speed")
    if body.sse and not body.streaming:
        raise HttpError(400, "stream is false; server-sent events can only be streamed", param="stream")
    return body


def voice_name(body: SpeechBody, config: ModelConfig) -> str | None:
    """The voice that is named; None where clients that cannot leave it out have sent a name that means nothing."""
    voice = body.voice.id if isinstance(body.voice, VoiceReference) else body.voice
    if config.variant != "custom_voice" and voice is not None and voice.strip().lower() in NO_VOICE:
        return None
    return voice


def speech_request(
    body: SpeechBody, config: ModelConfig, settings: Settings, *, voice: str | ClonedVoice | None
) -> SpeechRequest:
    """Build the request for the engine in a voice; raise RequestError for a value the checkpoint cannot serve."""
    return build_request(
        config,
        settings,
        text=body.input,
        voice=voice,
        language=body.language,
        instruct=body.instructions,
        text_mode=body.text_mode,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        max_new_tokens=body.max_new_tokens,
    )


def outcome_object(outcome: SpeechOutcome) -> dict[str, Any]:
    """Describe how a request ended; ``codes`` is a list of frames of 16 codes, present if they were asked for."""
    told: dict[str, Any] = {
        "id": outcome.request_id,
        "finish_reason": outcome.finish_reason.value,
        "frames": outcome.frames,
        "audio_seconds": outcome.audio_seconds,
        "prompt_rows": outcome.prompt_rows,
        "seed": outcome.seed,
    }
    if outcome.codes:
        told["codes"] = [list(frame) for frame in struct.iter_unpack(f"<{NUM_CODEBOOKS}h", outcome.codes)]
    return told


def voices_object(config: ModelConfig) -> dict[str, Any]:
    """Describe what a request to this checkpoint may ask for."""
    voices = []
    for speaker in config.speakers:
        voice = {"id": speaker, "name": "_".join(part.capitalize() for part in speaker.split("_"))}
        if speaker in config.speaker_dialects:
            voice["dialect"] = config.speaker_dialects[speaker]
        voices.append(voice)
    return {
        "voices": voices,
        "languages": list(config.languages),
        "variant": config.variant,
        "text_modes": list(TEXT_MODES),
        "accepts_instructions": config.accepts_instruct,
        "sample_rate": SAMPLE_RATE_HZ,
    }


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise HttpError(
            400, f"{field} {printable(value)!r} is not supported; supported: {', '.join(choices)}", param=field
        )


def _shape_error(error: ValidationError, values: Mapping[str, Any]) -> HttpError:
    """Say the first thing that is wrong with the shape, in the words of JSON."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        return _unknown_field(field)
    if field not in values:
        return HttpError(400, f"{field} is required", param=field, code="missing_field")
    found = json_type(values[field])
    if field == "speaker_embedding" and found == "array":
        return HttpError(400, f"{field} must hold numbers only", param=field, code="invalid_type")
    expected = 'a string or {"id": string}' if field == "voice" else _EXPECTED.get(first["type"], "another type")
    return HttpError(400, f"{field} must be {expected}, found {_article(found)}", param=field, code="invalid_type")


def _unknown_field(field: str) -> HttpError:
    known = sorted(SpeechBody.model_fields)
    close = difflib.get_close_matches(field[:64], known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known fields: {', '.join(known)}"
    name = printable(field)
    return HttpError(400, f"unknown field {name!r}; {hint}", param=name, code="unknown_field")


def _article(kind: str) -> str:
    if kind == "null":
        return kind
    return f"an {kind}" if kind[0] in "ao" else f"a {kind}"
