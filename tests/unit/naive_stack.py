"""A second writing of the Qwen3-style decoder stack: whole sequences, one head at a time, no cache.

Works on a checkpoint's tensors by their names and shares no code with the package.
"""

from __future__ import annotations

import torch
from torch import Tensor


def naive_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def naive_rotate(x: Tensor, theta: float) -> Tensor:
    """Rotate ``[S, D]``: channel j and channel j + D/2 are a pair."""
    size = x.shape[1]
    rotated = torch.empty_like(x)
    for channel in range(size // 2):
        angle = torch.arange(x.shape[0]) * theta ** (-2 * channel / size)
        first, second = x[:, channel], x[:, channel + size // 2]
        rotated[:, channel] = first * angle.cos() - second * angle.sin()
        rotated[:, channel + size // 2] = second * angle.cos() + first * angle.sin()
    return rotated


def naive_stack(weights: dict[str, Tensor], prefix: str, x: Tensor, stack) -> Tensor:
    """Final-normed output ``[S, C]`` for input rows ``x [S, C]`` at positions 0 .. S-1."""
    mask = torch.full((len(x), len(x)), float("-inf")).triu(1)
    for index in range(stack.num_layers):
        w = {
            name.removeprefix(f"{prefix}layers.{index}."): value
            for name, value in weights.items()
            if name.startswith(f"{prefix}layers.{index}.")
        }
        h = naive_norm(x, w["input_layernorm.weight"])
        query, key, value = (
            (h @ w[f"self_attn.{name}_proj.weight"].T).split(stack.head_dim, dim=1) for name in ("q", "k", "v")
        )
        heads = []
        for head in range(stack.num_heads):
            shared = head // (stack.num_heads // stack.num_kv_heads)
            q = naive_rotate(naive_norm(query[head], w["self_attn.q_norm.weight"]), stack.rope_theta)
            k = naive_rotate(naive_norm(key[shared], w["self_attn.k_norm.weight"]), stack.rope_theta)
            heads.append((q @ k.T / stack.head_dim**0.5 + mask).softmax(dim=-1) @ value[shared])
        x = x + torch.cat(heads, dim=1) @ w["self_attn.o_proj.weight"].T
        h = naive_norm(x, w["post_attention_layernorm.weight"])
        gate = h @ w["mlp.gate_proj.weight"].T
        x = x + (gate * gate.sigmoid() * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    return naive_norm(x, weights[f"{prefix}norm.weight"])
