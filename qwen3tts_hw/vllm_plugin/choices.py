"""The user's and the checkpoint's choices, read out of vLLM's configuration object."""

from __future__ import annotations

from typing import Any

from qwen3tts_hw.settings import Settings


def settings_of(vllm_config: Any) -> Settings:
    """Settings from vLLM's ``--additional-config`` block "qwen3tts" and the environment."""
    block = (vllm_config.additional_config or {}).get("qwen3tts") or {}
    return Settings.resolve(block)
