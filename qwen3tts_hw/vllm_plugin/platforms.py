"""What the config hook must know of vLLM's platforms: which worker class, which defaults. Imports no worker."""

from __future__ import annotations

import os
from typing import Any

from qwen3tts_hw.errors import UnsupportedError

_WORKERS = "qwen3tts_hw.vllm_plugin.workers"
_CPU_CACHE_BYTES = 4 << 30


def worker_path() -> str:
    """Dotted path of the worker class for vLLM's current platform."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return f"{_WORKERS}.CpuSpeechWorker"
    if current_platform.is_cuda():
        return f"{_WORKERS}.CudaSpeechWorker"
    if current_platform.device_type == "npu":
        return f"{_WORKERS}.NpuSpeechWorker"
    raise UnsupportedError(f"vLLM platform {current_platform.device_type!r}; supported: cpu, cuda, npu")


def platform_defaults(vllm_config: Any) -> None:
    """Adjust what a platform chooses badly for speech when the user has not chosen."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _start_quickly(vllm_config.compilation_config)
        _limit_cpu_cache(vllm_config)


def _start_quickly(compilation: Any) -> None:
    """Do not compile the talker on a CPU: it takes up to a minute of every first start, for trials and tests."""
    from vllm.config import CompilationMode

    if compilation.mode is None:
        compilation.mode = CompilationMode.NONE


def _limit_cpu_cache(vllm_config: Any) -> None:
    """vLLM's CPU platform takes 92 % of the memory for KV cache; take what all slots can use, at most 4 GiB."""
    cache = vllm_config.cache_config
    if os.environ.get("VLLM_CPU_KVCACHE_SPACE") or cache.kv_cache_memory_bytes:
        return
    talker = vllm_config.model_config.hf_text_config
    row_bytes = 2 * talker.num_hidden_layers * talker.num_key_value_heads * talker.head_dim * 4
    useful = row_bytes * vllm_config.model_config.max_model_len * vllm_config.scheduler_config.max_num_seqs
    cache.kv_cache_memory_bytes = min(_CPU_CACHE_BYTES, useful)
