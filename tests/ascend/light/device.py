"""What the light bed's tests share: the two backends, models on both, and counts of what a block did to the device."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from qwen3tts_hw import attention_ops, backends
from qwen3tts_hw.backends import Backend
from qwen3tts_hw.checkpoint.reader import open_checkpoint
from qwen3tts_hw.codec.decoder import CodecDecoder
from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.engine.frame_step import FrameStep
from qwen3tts_hw.engine.state import SlotTable
from qwen3tts_hw.model.code_predictor import CodePredictor
from qwen3tts_hw.model.embeddings import CodeEmbedder, TextEmbedder
from qwen3tts_hw.model.weights import embedding_targets, is_talker_stack, load, predictor_targets

ROWS = 8


@functools.cache
def backend(name: str) -> Backend:
    """The backend of that name, prepared."""
    found = backends.resolve(name)
    found.prepare_process()
    return found


class Parts:
    """Code predictor, frame step and codec of a checkpoint on one device."""

    def __init__(self, directory: Path, device: str, attention: str, dtype: torch.dtype) -> None:
        checkpoint = open_checkpoint(directory)
        self.backend = backend(device)
        self.config: ModelConfig = checkpoint.config
        at = {"device": self.backend.device, "dtype": dtype}
        self.codes, text = CodeEmbedder(self.config, **at), TextEmbedder(self.config, **at)
        op = attention_ops.create(attention, self.backend)
        self.predictor = CodePredictor(self.config, self.codes, op, max_rows=ROWS, **at)
        targets = {**embedding_targets(text, self.codes), **predictor_targets(self.predictor)}
        load(((name, tensor) for name, tensor in checkpoint.iter_main() if not is_talker_stack(name)), targets)
        self.codec = CodecDecoder(self.config.codec, self.backend.device, torch.float32)
        self.codec.load_weights(checkpoint.iter_codec())
        self.table = SlotTable(ROWS, 64, self.backend)
        self.step = FrameStep(self.config, self.table, self.predictor)

    def to(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors on this device."""
        return tuple(tensor.to(self.backend.device) for tensor in tensors)


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count what the block does to the emulated device; the counter is filled at its end."""
    from ascend_emulator import layer

    counts: Counter[str] = Counter()
    layer.reset_counters()
    yield counts
    counts.update(layer.counters())


def operators(counts: Counter[str], how: str = "eager") -> Counter[str]:
    """Only the device operators of a count, "eager" or "captured", without the prefix."""
    return Counter({name.removeprefix(f"{how} "): n for name, n in counts.items() if name.startswith(f"{how} ")})
