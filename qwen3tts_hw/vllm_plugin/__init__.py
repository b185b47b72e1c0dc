"""The attachment to vLLM: ``register()`` is its ``vllm.general_plugins`` entry point.

vLLM calls it in every process it starts (API server, engine core, workers, model inspection), so it is cheap, may run
twice, and touches no device. Nothing outside this package imports vLLM.
"""

from __future__ import annotations

_registered = False


def register() -> None:
    """Tell transformers and vLLM about the architecture: config class, model class, config hook, routes."""
    global _registered  # vLLM may call a plugin more than once in a process
    if _registered:
        return
    from qwen3tts_hw.vllm_plugin.registration import register_all

    register_all()
    _registered = True
