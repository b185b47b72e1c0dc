"""vLLM's per-architecture config hook: what makes plain ``vllm serve MODEL`` enough.

Runs in the process that parses the arguments, before vLLM decides on scheduling, graphs and workers; the result travels
to all others. Refuses what is not supported with a sentence instead of failing later.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from qwen3tts_hw.checkpoint.reader import open_checkpoint, resolve_directory
from qwen3tts_hw.errors import UnsupportedError
from qwen3tts_hw.vllm_plugin.choices import settings_of
from qwen3tts_hw.vllm_plugin.platforms import platform_defaults, worker_path
from qwen3tts_hw.vllm_plugin.registration import has_endpoint_plugins

logger = logging.getLogger(__name__)

PLUGIN_NAME = "qwen3tts_hw"
DEFAULT_MAX_ROWS = 10_240  # prompt rows + frames (13.6 minutes of audio), unless --max-model-len says otherwise


class Qwen3TTSConfigHook(VerifyAndUpdateConfig):
    """Defaults and refusals for ``Qwen3TTSForConditionalGeneration``."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Check the checkpoint's headers and set what concerns the model alone."""
        open_checkpoint(resolve_directory(model_config.model, model_config.revision)).check()
        model_config.skip_tokenizer_init = True
        # vLLM's text routes cannot ask for speech: the end is all they get, and would get again until their limit.
        model_config.override_generation_config = {"max_new_tokens": 1, **model_config.override_generation_config}
        if getattr(model_config, "original_max_model_len", None) is None:
            model_config.max_model_len = min(model_config.max_model_len, DEFAULT_MAX_ROWS)

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Choose worker, scheduler limits and cache; refuse what cannot work."""
        settings = settings_of(vllm_config)
        _refuse(vllm_config)
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = worker_path()
        # Placeholder prompt ids are equal for all requests: a prefix cache would mix their contents.
        vllm_config.cache_config.enable_prefix_caching = False
        scheduler = vllm_config.scheduler_config
        if scheduler.max_num_seqs > settings.max_streams:
            logger.info("max_num_seqs lowered from %d to max_streams %d", scheduler.max_num_seqs, settings.max_streams)
            scheduler.max_num_seqs = settings.max_streams
        platform_defaults(vllm_config)
        _advise_on_routes()
        logger.info("qwen3tts settings: %s", settings.as_dict())


def _refuse(vllm_config: Any) -> None:
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        raise UnsupportedError(
            f"tensor_parallel_size {parallel.tensor_parallel_size} and pipeline_parallel_size "
            f"{parallel.pipeline_parallel_size}: the model fits one device, only 1 is supported; "
            "use --data-parallel-size to use more devices"
        )
    if scheduler.policy != "fcfs":
        raise UnsupportedError(f"scheduling policy {scheduler.policy!r}: only 'fcfs' keeps to max_num_seqs slots")
    if vllm_config.speculative_config is not None:
        raise UnsupportedError("speculative decoding is not supported: a talker token is no draft for the next frame")
    if vllm_config.lora_config is not None:
        raise UnsupportedError("LoRA is not supported for Qwen3-TTS; serve a merged checkpoint")


def _advise_on_routes() -> None:
    named = os.environ.get("VLLM_PLUGINS")
    if has_endpoint_plugins() and (named is None or PLUGIN_NAME not in named.split(",")):
        logger.warning(
            "the speech routes stay off: vLLM adds routes of plugins only if VLLM_PLUGINS names them; "
            "start with VLLM_PLUGINS=%s to serve /v1/audio/speech",
            PLUGIN_NAME if named is None else f"{named},{PLUGIN_NAME}",
        )
