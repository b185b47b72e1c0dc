"""config.json as transformers and vLLM want to see it: a thin shell over the raw dictionary.

Adds what vLLM's engine reads (KV shapes from the talker, plain one-dimensional RoPE) and hides what would mislead it:
the three mrope axes of the checkpoint are always equal, yet their mention makes vLLM feed three-row positions.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from qwen3tts_hw.config import MODEL_TYPE
from qwen3tts_hw.errors import ConfigError

_MISLEADING = ("rope_scaling", "rope_parameters", "mrope_section", "sliding_window", "use_sliding_window")


class Qwen3TTSTalkerConfig(PretrainedConfig):
    """The talker as a text model: vocabulary of codebook 0, Qwen3 sizes."""

    model_type = "qwen3_tts_talker"

    def __init__(self, **values: Any) -> None:
        theta = (values.get("rope_parameters") or {}).get("rope_theta") or values.get("rope_theta")
        kept = {key: value for key, value in values.items() if key not in _MISLEADING}
        kept["tie_word_embeddings"] = False
        kept.setdefault("eos_token_id", kept.get("codec_eos_token_id"))
        super().__init__(**kept)
        for key, value in kept.items():
            setattr(self, key, value)
        if theta is not None:
            self.rope_theta = float(theta)
            self.rope_parameters = {"rope_type": "default", "rope_theta": float(theta)}


class Qwen3TTSConfig(PretrainedConfig):
    """The whole checkpoint; ``get_text_config`` answers with the talker."""

    model_type = MODEL_TYPE
    sub_configs = {"talker_config": Qwen3TTSTalkerConfig}  # noqa: RUF012  # transformers reads it from the class

    def __init__(self, talker_config: Any = None, **values: Any) -> None:
        if talker_config is None and values:
            raise ConfigError("config.json: talker_config is missing")
        if not isinstance(talker_config, Qwen3TTSTalkerConfig):
            talker_config = Qwen3TTSTalkerConfig(**(talker_config or {}))
        self.talker_config = talker_config
        values.setdefault("eos_token_id", getattr(talker_config, "eos_token_id", None))
        super().__init__(**values)

    def get_text_config(self, *_: Any, **__: Any) -> Qwen3TTSTalkerConfig:
        """The config of the stack that owns the KV cache."""
        return self.talker_config
