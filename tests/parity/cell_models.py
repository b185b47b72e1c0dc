"""Models for the cells that need no server, and the watch that tells which attention operators really ran."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qwen3tts_hw import attention_ops, backends
from qwen3tts_hw.attention_ops import AttentionOp
from qwen3tts_hw.backends import Backend
from qwen3tts_hw.checkpoint.reader import Checkpoint, open_checkpoint
from qwen3tts_hw.codec.decoder import CodecDecoder
from qwen3tts_hw.model.code_predictor import CodePredictor
from qwen3tts_hw.model.embeddings import CodeEmbedder, TextEmbedder
from qwen3tts_hw.model.layers import LayerCache, rotary_table
from qwen3tts_hw.model.talker import Talker
from qwen3tts_hw.model.weights import embedding_targets, is_talker_stack, load, predictor_targets, talker_targets
from tests.parity.cell_outcome import require
from tests.parity.checkpoints import TinyCheckpoint, write_checkpoint
from tests.parity.matrix import EMULATED

ROWS = 8
CONTEXT_ROWS = 6  # of the talker before the compared step
# What a dispatcher sees when an op runs; the reference must be plain torch, without any of these.
OPERATORS = {
    "sdpa": "scaled_dot_product",
    "npu_fusion_v3": "npu::npu_fusion_attention_v3",
    "npu_fused_infer": "npu::npu_fused_infer_attention_score",
}


class Watch(TorchDispatchMode):
    """Counts the attention operators of a block, also while they are captured."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.name()
        if "attention" in name:
            self.operators[name] += 1
        return func(*args, **(kwargs or {}))

    def require(self, attention: str) -> dict[str, int]:
        """Return the counts; raise NotReachedError unless they are those of this attention op and of no other."""
        wanted = OPERATORS.get(attention)
        if wanted is not None:
            seen = [name for name in self.operators if wanted in name]
            require(bool(seen), f"{attention} calls {wanted}, seen: {dict(self.operators) or 'no attention operator'}")
        if attention != "sdpa":  # Ascend carries torch's own attention out by a fusion operator
            others = [other for other in OPERATORS.values() if other != wanted]
            strangers = [name for name in self.operators if any(other in name for other in others)]
            require(not strangers, f"{strangers} ran instead of or beside {attention}")
        return dict(self.operators)


def torch_device(device: str) -> str:
    """The backend's name for a device of the matrix."""
    return "npu" if device == EMULATED else device


@functools.cache
def backend(device: str) -> Backend:
    """The prepared backend of a device of the matrix; raises RuntimeError if an emulated one is not, or the reverse."""
    if (device == EMULATED) != ("ASCEND_EMULATOR_LIBRARIES" in os.environ) and device in (EMULATED, "npu"):
        raise RuntimeError(f"cells of {device} cannot run here: the Ascend device of this process is not that one")
    found = backends.resolve(torch_device(device))
    found.prepare_process()
    return found


def attention_op(name: str, device: str) -> AttentionOp:
    """The op of that name; raises NotReachedError if another one comes."""
    op = attention_ops.create(name, backend(device))
    require(op.name == name, f"asked for the attention op {name}, got {op.name}")
    return op


@functools.cache
def checkpoint(variant: str, root: Path) -> Checkpoint:
    """The tiny checkpoint of that name, written below ``root`` once; its speech never ends by itself."""
    kind, size = variant.split("-", 1)
    spec = TinyCheckpoint(kind, size, end_of_speech=False)
    directory = root / spec.key
    return open_checkpoint(directory if directory.exists() else write_checkpoint(spec, directory))


class Predictor:
    """The code predictor and its embeddings."""

    def __init__(self, source: Checkpoint, device: str, attention: str, dtype: torch.dtype) -> None:
        self.config, self.backend = source.config, backend(device)
        at: dict[str, Any] = {"device": self.backend.device, "dtype": dtype}
        self.codes, text = CodeEmbedder(self.config, **at), TextEmbedder(self.config, **at)
        op = attention_op(attention, device)
        self.predictor = CodePredictor(self.config, self.codes, op, max_rows=ROWS, **at)
        targets = {**embedding_targets(text, self.codes), **predictor_targets(self.predictor)}
        load(((name, tensor) for name, tensor in source.iter_main() if not is_talker_stack(name)), targets)


class TalkerStep:
    """The talker's layers as one decode step of a batch, behind a context of CONTEXT_ROWS rows per sequence."""

    def __init__(self, source: Checkpoint, device: str, attention: str, dtype: torch.dtype) -> None:
        self.config, self.backend, self.dtype = source.config, backend(device), dtype
        at: dict[str, Any] = {"device": self.backend.device, "dtype": dtype}
        self.talker = Talker(self.config, attention_op(attention, device), **at)
        targets = talker_targets(self.talker.layers, self.talker.norm, self.talker.head)
        load(((name, tensor) for name, tensor in source.iter_main() if is_talker_stack(name)), targets)
        stack = self.config.talker
        self._cos, self._sin = rotary_table(CONTEXT_ROWS + 1, stack.head_dim, stack.rope_theta, **at)
        shape = (stack.num_layers, 2, ROWS, stack.num_kv_heads, CONTEXT_ROWS + 1, stack.head_dim)
        self._cache = torch.zeros(shape, **at)

    def prefill(self, context: Tensor) -> None:
        """Fill the caches with ``[B, CONTEXT_ROWS, H]``."""
        self._run(context, 0)

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Run the next row ``[B, H]`` of each sequence: hidden states ``[B, H]`` and logits ``[B, V]``."""
        hidden = self._run(rows[:, None], CONTEXT_ROWS)[:, 0]
        return hidden, self.talker.logits(hidden)

    def one_by_one(self, context: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The same by the talker's own call, one sequence after the other."""
        found = []
        for before, row in zip(context, rows, strict=True):
            self.talker(before, 0)
            hidden = self.talker(row[None], CONTEXT_ROWS)
            found.append((hidden[0], self.talker.logits(hidden)[0]))
        return torch.stack([hidden for hidden, _ in found]), torch.stack([logits for _, logits in found])

    def _run(self, x: Tensor, start: int) -> Tensor:
        end = start + x.shape[1]
        for layer, pair in zip(self.talker.layers, self._cache, strict=True):
            x = layer(x, self._cos[start:end], self._sin[start:end], LayerCache(*pair[:, : x.shape[0]]), start)
        hidden: Tensor = self.talker.norm(x)
        return hidden


def codec(source: Checkpoint, device: str, dtype: torch.dtype) -> CodecDecoder:
    """The codec decoder in its plain form."""
    found = CodecDecoder(source.config.codec, backend(device).device, dtype)
    found.load_weights(source.iter_codec())
    return found
