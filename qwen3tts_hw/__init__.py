"""Qwen3-TTS (12 Hz) on NVIDIA, Ascend and CPU: a vLLM plugin and a small local engine.

Importing the package is cheap: it loads neither torch nor vLLM. The public names below are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen3tts_hw.audio_file import write_wav
    from qwen3tts_hw.engine.local import LocalEngine
    from qwen3tts_hw.prompt.request import SpeechRequest, build_request

__all__ = ["LocalEngine", "SpeechRequest", "__version__", "build_request", "write_wav"]
__version__ = "0.1.0"

_LAZY = {
    "LocalEngine": "qwen3tts_hw.engine.local",
    "SpeechRequest": "qwen3tts_hw.prompt.request",
    "build_request": "qwen3tts_hw.prompt.request",
    "write_wav": "qwen3tts_hw.audio_file",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
