"""The text tokenizer's files: a small byte-level BPE composed here, or a copy of given ones.

Owns the format of ``vocab.json``, ``merges.txt`` and ``tokenizer_config.json`` and the list of special tokens. The
small vocabulary is 256 byte symbols, then the merges that build a list of common words from left to right, then the
special tokens in the published order. Does not encode text (see :mod:`qwen3tts_hw.prompt.tokenizer`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3tts_hw.checkpoint.published import PUBLISHED_TEXT_VOCAB_SIZE
from qwen3tts_hw.config import TextTokens
from qwen3tts_hw.errors import CheckpointError
from qwen3tts_hw.json_section import read_json

TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer_config.json")

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
)
_PLAIN_TOKENS = frozenset(SPECIAL_TOKENS[14:26])  # added tokens that are not flagged special
_NAMED_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}

# "assistant" and "user" come first: no merge of another word can then split them, and each is one token.
_WORD_LINES = (
    "assistant|user|Hello| world| the| and| of| to| a| in| is| that| it| for| was| on| are| with| this| you| I| not",
    " have| be| at| by| from| will| one| all| there| speech| voice| sound| good| morning|Good|The|This|It|We|You|What",
    "How|Very| happy| sad| warm| slow| fast| model| frame| audio|'s|'t|'re|'ve|'m|'ll|'d|ing|tion|er|ed|iPhone|YouTube",
    " Hi|Hi|你|好|你好|我|是|的|世|界|世界|今|天|今天|。|\uff0c|\uff01|\uff1f",
    "こ|ん|に|ち|は|こんにちは|の|で|す|です|日本|é|ü|ñ|…|—|...|!!|\n\n|  ",
)
_WORDS = tuple(word for line in _WORD_LINES for word in line.split("|"))


@dataclass(frozen=True, slots=True)
class TextVocabulary:
    """What config.json must say about a tokenizer: the ids used in prompts, and the rows of the text embedding."""

    tokens: TextTokens
    size: int


def byte_symbols() -> dict[int, str]:
    """Printable stand-ins for the 256 byte values, as byte-level BPE vocabularies spell them (GPT-2).

    Printable Latin-1 characters stand for themselves; the other bytes take U+0100 onwards in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in set(printable)]
    return {value: chr(value) for value in printable} | {value: chr(256 + rank) for rank, value in enumerate(others)}


def write_tokenizer(directory: Path) -> TextVocabulary:
    """Write the small tokenizer's three files into ``directory``."""
    vocabulary, merges = _small_bpe()
    added = {content: len(vocabulary) + rank for rank, content in enumerate(SPECIAL_TOKENS)}
    # newline="\n": the files are byte-identical on every platform
    with (directory / "vocab.json").open("w", encoding="utf-8", newline="\n") as file:
        json.dump(vocabulary, file, ensure_ascii=False, separators=(",", ":"))
    with (directory / "merges.txt").open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{left} {right}\n" for left, right in merges)
    with (directory / "tokenizer_config.json").open("w", encoding="utf-8", newline="\n") as file:
        json.dump(_tokenizer_config(added), file, ensure_ascii=False, indent=2)
    return _vocabulary_of(vocabulary, added)


def copy_tokenizer(source: Path, directory: Path) -> TextVocabulary:
    """Copy a tokenizer's three files from ``source``; raise CheckpointError if one is missing or lacks a token."""
    missing = [name for name in TOKENIZER_FILES if not (source / name).is_file()]
    if missing:
        raise CheckpointError(f"tokenizer directory {source} lacks {', '.join(missing)}")
    vocabulary = read_json(source / "vocab.json")
    decoder = read_json(source / "tokenizer_config.json").get("added_tokens_decoder") or {}
    added = {entry["content"]: int(index) for index, entry in decoder.items()}
    try:
        found = _vocabulary_of(vocabulary, added)
    except KeyError as error:
        raise CheckpointError(f"the tokenizer in {source} has no token {error.args[0]!r}") from None
    for name in TOKENIZER_FILES:
        shutil.copyfile(source / name, directory / name)
    return found


def _small_bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    symbols = byte_symbols()
    ordered = [symbols[value] for value in sorted(symbols, key=lambda value: ord(symbols[value]))]
    vocabulary = {symbol: index for index, symbol in enumerate(ordered)}
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        letters = [symbols[value] for value in word.encode("utf-8")]
        prefix = letters[0]
        for letter in letters[1:]:
            if prefix + letter not in vocabulary:
                vocabulary[prefix + letter] = len(vocabulary)
                merges.append((prefix, letter))
            prefix += letter
    return vocabulary, merges


def _vocabulary_of(vocabulary: Mapping[str, int], added: Mapping[str, int]) -> TextVocabulary:
    """Look the prompt's tokens up; a vocabulary in the published range gets the published number of rows."""
    tokens = TextTokens(
        im_start=added["<|im_start|>"],
        im_end=added["<|im_end|>"],
        assistant=vocabulary["assistant"],
        tts_pad=added["<tts_pad>"],
        tts_bos=added["<tts_text_bos>"],
        tts_eos=added["<tts_text_eod>"],
    )
    used = max(*vocabulary.values(), *added.values()) + 1
    padded = -(-used // 64) * 64
    published = PUBLISHED_TEXT_VOCAB_SIZE - 512 < used <= PUBLISHED_TEXT_VOCAB_SIZE
    return TextVocabulary(tokens, PUBLISHED_TEXT_VOCAB_SIZE if published else padded)


def _tokenizer_config(added: Mapping[str, int]) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(index): {"content": content, **flags, "special": content not in _PLAIN_TOKENS}
            for content, index in added.items()
        },
        "additional_special_tokens": [
            content
            for content in SPECIAL_TOKENS
            if content not in _PLAIN_TOKENS and content not in ("<|endoftext|>", "<tts_text_eod>")
        ],
        "extra_special_tokens": dict(_NAMED_TOKENS),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131_072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
        **_NAMED_TOKENS,
    }
