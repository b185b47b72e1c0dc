"""What ``register()`` does: name the architecture to transformers and vLLM, attach the routes before vLLM 0.26."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from qwen3tts_hw.config import ARCHITECTURE, MODEL_TYPE

# Modules that hold build_app, oldest first; wrapped only where endpoint plugins do not exist (vLLM < 0.26).
_APP_MODULES = ("vllm.entrypoints.openai.api_server",)
_WRAPPED = "_qwen3tts_wrapped"


def register_all() -> None:
    """Register config class, model class and config hook."""
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from qwen3tts_hw.vllm_plugin.config_hook import Qwen3TTSConfigHook
    from qwen3tts_hw.vllm_plugin.hf_config import Qwen3TTSConfig

    AutoConfig.register(MODEL_TYPE, Qwen3TTSConfig, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, f"qwen3tts_hw.vllm_plugin.model:{ARCHITECTURE}")
    MODELS_CONFIG_MAP[ARCHITECTURE] = Qwen3TTSConfigHook
    if not has_endpoint_plugins():
        _wrap_build_app()


def has_endpoint_plugins() -> bool:
    """Whether this vLLM loads routes from ``vllm.endpoint_plugins`` (0.26 and later)."""
    return importlib.util.find_spec("vllm.plugins.endpoint_plugins") is not None


def _wrap_build_app() -> None:
    """Attach the routes where build_app is a plain module function; remove once vLLM < 0.26 is no longer supported.

    Acts only in a process that has imported the API server already: elsewhere there is nothing to attach to.
    """
    for name in _APP_MODULES:
        module = sys.modules.get(name)
        if module is None or not hasattr(module, "build_app") or getattr(module, _WRAPPED, False):
            continue
        original = module.build_app

        def build_app(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            from qwen3tts_hw.vllm_plugin.endpoint import SpeechEndpoint

            app = _original(*args, **kwargs)
            SpeechEndpoint().attach_router(app)
            return app

        setattr(module, _WRAPPED, True)
        module.build_app = build_app  # type: ignore[attr-defined]  # module attribute replaced on purpose
