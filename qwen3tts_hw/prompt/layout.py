"""The rows of a prompt, as ids: which text id and which codec id are added up at each position.

The talker's input is a sequence of rows, each the sum of a text-side and a codec-side embedding, either of which may
be absent. This module decides the ids; it knows no weights and no tensors. The row tables follow the prompt
construction of the official ``qwen-tts`` package; differing from it, a speaker without an entry in the dialect table
speaks no dialect.
"""

from __future__ import annotations

from dataclasses import dataclass

from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.errors import RequestError
from qwen3tts_hw.prompt.request import AUTO_LANGUAGE, SpeechRequest
from qwen3tts_hw.prompt.tokenizer import TextTokenizer
from qwen3tts_hw.types import ClonedVoice

ABSENT = -1
_DIALECT_LANGUAGES = (AUTO_LANGUAGE, "chinese")  # what a speaker's own dialect replaces


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """The prompt of one request; -1 means that a side is absent.

    ``text_ids`` and ``codec_ids`` have one entry per row. ``trailing_text_ids`` are the text sides of the rows after
    the prompt, one per frame; when they are used up every further row takes ``pad_text_id``. ``speaker_row`` is the row
    whose codec side is a speaker embedding, ``reference_start`` the first of ``reference_frames`` rows whose codec side
    is a frame of reference audio; both are for voice cloning, and their codec ids are -1.
    """

    text_ids: tuple[int, ...]
    codec_ids: tuple[int, ...]
    trailing_text_ids: tuple[int, ...]
    pad_text_id: int
    speaker_row: int | None = None
    reference_start: int | None = None
    reference_frames: int = 0

    @property
    def length(self) -> int:
        """Number of rows."""
        return len(self.text_ids)


class _Rows:
    """Rows under construction."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.codec: list[int] = []

    def add(self, text: int, codec: int = ABSENT) -> None:
        self.text.append(text)
        self.codec.append(codec)


def build_layout(config: ModelConfig, tokenizer: TextTokenizer, request: SpeechRequest) -> PromptLayout:
    """Lay a valid request out: instruction, role, tags, speaker, then texts and reference as its ``text_mode`` says."""
    text, codec = config.text_tokens, config.codec_tokens
    text_ids = tokenizer.encode(request.text)
    rows = _Rows()
    if request.instruct:
        instruction = tokenizer.encode(request.instruct)
        for index in (text.im_start, tokenizer.user_id, tokenizer.newline_id, *instruction):
            rows.add(index)
        rows.add(text.im_end)
        rows.add(tokenizer.newline_id)
    for index in (text.im_start, text.assistant, tokenizer.newline_id):
        rows.add(index)
    for tag in _tags(config, request):
        rows.add(text.tts_pad, tag)
    voice, streaming = request.voice, request.text_mode == "streaming"
    speaker_row = len(rows.text) if isinstance(voice, ClonedVoice) else None
    if speaker_row is not None:
        rows.add(text.tts_pad)
    elif isinstance(voice, str):
        rows.add(text.tts_pad, config.speaker_ids[voice])
    rows.add(text.tts_bos, codec.pad)
    frames = voice.reference_frames if isinstance(voice, ClonedVoice) else 0
    if isinstance(voice, ClonedVoice) and frames:
        spoken = [*tokenizer.encode(voice.reference_text), *text_ids, text.tts_eos]
        trailing = _add_reference(rows, config, spoken, frames, streaming=streaming)
    else:
        trailing = _add_text(rows, config, text_ids, streaming=streaming)
    return PromptLayout(
        tuple(rows.text),
        tuple(rows.codec),
        trailing,
        text.tts_pad,
        speaker_row,
        reference_start=len(rows.text) - frames if frames else None,
        reference_frames=frames,
    )


def frames_left(layout: PromptLayout, max_positions: int) -> int:
    """How many frames fit behind the prompt; raises RequestError if none does."""
    if layout.length >= max_positions:
        raise RequestError("input", f"the prompt has {layout.length} rows; the model has {max_positions} positions")
    return max_positions - layout.length


def language_id(config: ModelConfig, language: str, voice: str | None) -> int | None:
    """Codec id of the language to speak; None lets the model decide.

    A speaker's dialect replaces auto and chinese, not any other language.
    """
    dialect = config.speaker_dialects.get(voice) if voice is not None else None
    if dialect is not None and language in _DIALECT_LANGUAGES:
        return config.language_ids[dialect]
    return None if language == AUTO_LANGUAGE else config.language_ids[language]


def _tags(config: ModelConfig, request: SpeechRequest) -> tuple[int, ...]:
    codec = config.codec_tokens
    preset = request.voice if isinstance(request.voice, str) else None
    language = language_id(config, request.language, preset)
    if language is None:
        return codec.nothink, codec.think_bos, codec.think_eos
    return codec.think, codec.think_bos, language, codec.think_eos


def _add_text(rows: _Rows, config: ModelConfig, text_ids: list[int], *, streaming: bool) -> tuple[int, ...]:
    """Add the text's rows and return the text ids that trail behind the prompt."""
    text, codec = config.text_tokens, config.codec_tokens
    if streaming:
        rows.add(text_ids[0], codec.bos)
        return (*text_ids[1:], text.tts_eos)
    for index in text_ids:
        rows.add(index, codec.pad)
    rows.add(text.tts_eos, codec.pad)
    rows.add(text.tts_pad, codec.bos)
    return (text.tts_pad,)


def _add_reference(
    rows: _Rows, config: ModelConfig, spoken: list[int], frames: int, *, streaming: bool
) -> tuple[int, ...]:
    """Add the rows of reference and target text and of the reference's frames; return the trailing text ids.

    The frames' rows come last and have no codec id. ``spoken`` is both texts and the end of text. Streaming, text and
    frames run side by side from the first row on; what is longer goes on alone.
    """
    text, codec = config.text_tokens, config.codec_tokens
    if not streaming:
        for index in spoken:
            rows.add(index, codec.pad)
        spoken = []
    beside = [*spoken[: frames + 1], *[text.tts_pad] * (frames + 1 - len(spoken))]
    rows.add(beside[0], codec.bos)
    for index in beside[1:]:
        rows.add(index)
    return tuple(spoken[frames + 1 :]) or (text.tts_pad,)
