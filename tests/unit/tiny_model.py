"""A tiny checkpoint's talker, embeddings and code predictor, loaded without an engine around them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qwen3tts_hw import attention_ops, backends
from qwen3tts_hw.backends import Backend
from qwen3tts_hw.checkpoint.reader import open_checkpoint
from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.model.code_predictor import CodePredictor
from qwen3tts_hw.model.embeddings import CodeEmbedder, TextEmbedder
from qwen3tts_hw.model.sampling import SamplingRows
from qwen3tts_hw.model.talker import Talker
from qwen3tts_hw.model.weights import embedding_targets, load, predictor_targets, talker_targets

BACKEND: Backend = backends.resolve("cpu")
MAX_ROWS = 8


@dataclass(frozen=True)
class TinyModel:
    """The modules, and the checkpoint's tensors by name for second writings of the maths."""

    config: ModelConfig
    text: TextEmbedder
    codes: CodeEmbedder
    talker: Talker
    predictor: CodePredictor
    weights: dict[str, Tensor]


def build_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> TinyModel:
    """Modules without weights."""
    device = BACKEND.device
    attention = attention_ops.create("sdpa", BACKEND)
    codes = CodeEmbedder(config, device=device, dtype=dtype)
    return TinyModel(
        config,
        TextEmbedder(config, device=device, dtype=dtype),
        codes,
        Talker(config, attention, device=device, dtype=dtype),
        CodePredictor(config, codes, attention, max_rows=MAX_ROWS, device=device, dtype=dtype),
        {},
    )


def targets_of(model: TinyModel) -> dict[str, Tensor]:
    """Where each tensor of the checkpoint goes."""
    return {
        **embedding_targets(model.text, model.codes),
        **predictor_targets(model.predictor),
        **talker_targets(model.talker.layers, model.talker.norm, model.talker.head),
    }


def load_model(directory: Path, dtype: torch.dtype = torch.float32) -> TinyModel:
    """Build and load; the modules are the caller's to change."""
    checkpoint = open_checkpoint(directory)
    model = build_model(checkpoint.config, dtype)
    model.weights.update(checkpoint.iter_main())
    load(model.weights.items(), targets_of(model))
    return model


def sampling_rows(count: int, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> SamplingRows:
    """The same sampling in every row; greedy unless a temperature is given."""
    return SamplingRows(torch.full((count,), temperature), torch.full((count,), top_k), torch.full((count,), top_p))
