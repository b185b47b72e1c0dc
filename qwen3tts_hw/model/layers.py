"""Building blocks of the decoder stacks: RMSNorm, rotary tables, one Qwen3-style layer.

The maths follows the official package's float32 rules: normalisation, rotary angles and softmax in float32, the cast
back before the norm's weight. Knows no checkpoint names, no device and no engine; attention is the op it is given.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from qwen3tts_hw.attention_ops.base import AttentionOp
from qwen3tts_hw.config import DecoderStackConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension: float32 statistics, cast back, then the weight."""

    def __init__(self, size: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., size]``; the result has the input's dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Linear(nn.Module):
    """``y = x · Wᵀ (+ b)`` with the weight stored ``[out, in]``; parameters are left uninitialised for the loader."""

    matrix_weights: ClassVar[tuple[str, ...]] = ("weight",)  # see Backend.prepare_weights

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool = False, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device, dtype=dtype), requires_grad=False)
        self.bias = (
            nn.Parameter(torch.empty(outputs, device=device, dtype=dtype), requires_grad=False) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in]`` to ``[..., out]``; by a product of matrices, which is all a packed weight is good for."""
        rows = nn.functional.linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        return rows.view(*x.shape[:-1], rows.shape[-1])


def rotary_table(
    positions: int, head_dim: int, theta: float, *, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[positions, head_dim]``: angles in float32, cast to ``dtype`` once."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * (1.0 / theta**exponent)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding in the half-split layout to ``[B, heads, S, D]`` with tables ``[S, D]``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class LayerCache:
    """Keys and values of one layer, ``[B, Hkv, slots, D]`` each; written in place, read by slice."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def append(self, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Write rows ``start ..`` and return all rows up to and including them."""
        end = start + keys.shape[2]
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]


class DecoderLayer(nn.Module):
    """One pre-norm layer: grouped-query attention with q/k norms, then a SwiGLU block (spec 2.2)."""

    def __init__(
        self, config: DecoderStackConfig, attention: AttentionOp, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config, self.attention = config, attention
        width, heads, kv_heads, head_dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.query_size, self.kv_size = heads * head_dim, kv_heads * head_dim
        at = {"device": device, "dtype": dtype}
        self.input_norm = RMSNorm(width, config.rms_norm_eps, device=device, dtype=dtype)
        self.qkv = Linear(width, self.query_size + 2 * self.kv_size, **at)  # type: ignore[arg-type]  # mixed-type kwargs
        self.query_norm = RMSNorm(head_dim, config.rms_norm_eps, device=device, dtype=dtype)
        self.key_norm = RMSNorm(head_dim, config.rms_norm_eps, device=device, dtype=dtype)
        self.out = Linear(self.query_size, width, **at)  # type: ignore[arg-type]  # mixed-type kwargs
        self.mlp_norm = RMSNorm(width, config.rms_norm_eps, device=device, dtype=dtype)
        self.gate_up = Linear(width, 2 * config.intermediate_size, **at)  # type: ignore[arg-type]  # mixed-type kwargs
        self.down = Linear(config.intermediate_size, width, **at)  # type: ignore[arg-type]  # mixed-type kwargs

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, start: int) -> Tensor:
        """Run rows ``start ..`` of a sequence: ``x [B, S, width]``, tables ``[S, D]``; returns ``[B, S, width]``."""
        batch, rows, _ = x.shape
        config = self.config
        packed = self.qkv(self.input_norm(x))
        query, key, value = packed.split([self.query_size, self.kv_size, self.kv_size], dim=-1)
        query = self.query_norm(query.view(batch, rows, config.num_heads, config.head_dim)).transpose(1, 2)
        key = self.key_norm(key.view(batch, rows, config.num_kv_heads, config.head_dim)).transpose(1, 2)
        value = value.view(batch, rows, config.num_kv_heads, config.head_dim).transpose(1, 2)
        keys, values = cache.append(rotate(key, cos, sin), value, start)
        attended = self.attention(rotate(query, cos, sin), keys, values, scale=config.head_dim**-0.5)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, rows, self.query_size))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        mixed: Tensor = self.down(nn.functional.silu(gate) * up)
        return x + mixed
