"""Parsed configurations of the published forms, and the tokenizer subset, for tests of prompts and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qwen3tts_hw.checkpoint.published import PUBLISHED_TEXT_TOKENS, PUBLISHED_TEXT_VOCAB_SIZE, compose
from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.prompt.tokenizer import TextTokenizer

SUBSET = Path(__file__).parent.parent / "data" / "qwen2_subset"


def published_files(variant: str = "custom_voice", size: str = "1.7B") -> dict[str, dict[str, Any]]:
    return compose(variant, size, PUBLISHED_TEXT_TOKENS, PUBLISHED_TEXT_VOCAB_SIZE)


def published_config(variant: str = "custom_voice", size: str = "1.7B") -> ModelConfig:
    files = published_files(variant, size)
    return ModelConfig.from_dicts(
        files["config.json"], files["speech_tokenizer/config.json"], files["generation_config.json"]
    )


def subset_tokenizer() -> TextTokenizer:
    return TextTokenizer.from_directory(SUBSET)
