"""The talker in plain torch, for one sequence at a time: what the local engine runs and the parity tests trust.

Under vLLM the same checkpoint tensors live in vLLM's own layers (:mod:`qwen3tts_hw.vllm_plugin.model`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qwen3tts_hw.attention_ops.base import AttentionOp
from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.model.layers import DecoderLayer, LayerCache, Linear, RMSNorm, rotary_table

_GROWTH_ROWS = 256


class Talker(nn.Module):
    """Decoder stack, final norm and codec head, with a key/value cache that grows by blocks.

    The three mrope axes of the checkpoint always carry the same position, so rotation is one-dimensional (spec 2.3).
    """

    def __init__(
        self, config: ModelConfig, attention: AttentionOp, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        stack = config.talker
        self.stack, self.device, self.dtype = stack, device, dtype
        self.layers = nn.ModuleList(
            DecoderLayer(stack, attention, device=device, dtype=dtype) for _ in range(stack.num_layers)
        )
        self.norm = RMSNorm(stack.hidden_size, stack.rms_norm_eps, device=device, dtype=dtype)
        self.head = Linear(stack.hidden_size, config.talker_vocab_size, device=device, dtype=dtype)
        self._cache = torch.empty(0)
        self._cos = self._sin = torch.empty(0)
        self._capacity = 0

    def forward(self, rows: Tensor, start: int) -> Tensor:
        """Run rows ``[S, H]`` at positions ``start ..``; returns final-normed hidden states ``[S, H]``.

        ``start`` 0 begins a new sequence; later calls take one row, since the attention op knows no partial prefill.
        """
        end = start + rows.shape[0]
        self._reserve(end)
        cos, sin = self._cos[start:end], self._sin[start:end]
        x = rows[None]
        for layer, pair in zip(self.layers, self._cache, strict=True):
            x = layer(x, cos, sin, LayerCache(pair[0], pair[1]), start)
        hidden: Tensor = self.norm(x[0])
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[n, V] float32`` of codebook 0 from hidden states ``[n, H]``."""
        logits: Tensor = self.head(hidden)
        return logits.float()

    def _reserve(self, rows: int) -> None:
        if rows <= self._capacity:
            return
        stack = self.stack
        capacity = max(rows, 2 * self._capacity, _GROWTH_ROWS)
        shape = (stack.num_layers, 2, 1, stack.num_kv_heads, capacity, stack.head_dim)
        grown = torch.zeros(shape, device=self.device, dtype=self.dtype)
        if self._capacity:
            grown[..., : self._capacity, :] = self._cache
        self._cache, self._capacity = grown, capacity
        self._cos, self._sin = rotary_table(
            capacity, stack.head_dim, stack.rope_theta, device=self.device, dtype=self.dtype
        )
