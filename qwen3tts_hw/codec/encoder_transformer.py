"""The codec encoder's transformer: causal attention over a whole clip, one position per 40 ms.

Attention is written out in plain matrix products, block of queries by block, so that memory grows with the clip's
length and not with its square. Knows nothing about checkpoint names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from qwen3tts_hw.codec.rotary import rotate, rotation
from qwen3tts_hw.encoder_config import CodecEncoderConfig

QUERY_BLOCK_POSITIONS = 256


@dataclass(frozen=True, slots=True)
class CausalBlock:
    """Queries ``start .. stop`` and the keys ``first_key .. stop``; ``hidden`` is true where a key may not be seen."""

    start: int
    stop: int
    first_key: int
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class ClipPositions:
    """What all layers of a call share: rotation ``[L, D]`` and the visibility of keys."""

    cosine: Tensor
    sine: Tensor
    blocks: tuple[CausalBlock, ...]


def clip_positions(length: int, config: CodecEncoderConfig, window: int | None, device: torch.device) -> ClipPositions:
    """Lay out a clip of ``length`` positions, of which each sees itself and the past, or ``window`` in all."""
    positions = torch.arange(length, device=device)
    cosine, sine = rotation(positions, config.head_dim, config.rope_theta, torch.float32)
    blocks = []
    for start in range(0, length, QUERY_BLOCK_POSITIONS):
        stop = min(start + QUERY_BLOCK_POSITIONS, length)
        first_key = 0 if window is None else max(0, start - window + 1)
        distance = positions[start:stop, None] - positions[first_key:stop]
        hidden = distance < 0
        if window is not None:
            hidden = hidden | (distance >= window)
        blocks.append(CausalBlock(start, stop, first_key, hidden))
    return ClipPositions(cosine, sine, tuple(blocks))


class CausalAttention(nn.Module):
    """Multi-head attention in which a position sees itself and the past; ``[B, L, C]``."""

    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.num_heads, config.head_dim
        width = self.heads * self.head_dim
        self.qkv = nn.Linear(config.hidden_size, 3 * width, bias=False)
        self.output = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, positions: ClipPositions) -> Tensor:
        qkv: Tensor = self.qkv(x)
        qkv = qkv.view(*x.shape[:2], 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)  # [3, B, H, L, D]
        query, key = rotate(qkv[:2], positions.cosine, positions.sine).unbind(0)
        parts = [self._attend(query, key, qkv[2], block) for block in positions.blocks]
        y: Tensor = self.output(torch.cat(parts, 2).transpose(1, 2).flatten(2))
        return y

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, block: CausalBlock) -> Tensor:
        keys = slice(block.first_key, block.stop)
        scores = query[:, :, block.start : block.stop] @ key[:, :, keys].transpose(2, 3) * self.head_dim**-0.5
        mixed: Tensor = scores.masked_fill_(block.hidden, float("-inf")).softmax(-1) @ value[:, :, keys]
        return mixed


class EncoderLayer(nn.Module):
    """Attention and a two-layer network, each normed before, scaled after and added; ``[B, L, C]``."""

    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = CausalAttention(config)
        self.attention_scale = nn.Parameter(torch.empty(config.hidden_size))
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.expand = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.contract = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.mlp_scale = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, x: Tensor, positions: ClipPositions) -> Tensor:
        x = x + self.attention_scale * self.attention(self.attention_norm(x), positions)
        y: Tensor = self.contract(functional.gelu(self.expand(self.mlp_norm(x))))
        return x + self.mlp_scale * y


class EncoderTransformer(nn.Module):
    """The layers one after the other, without a final norm; ``[B, L, C]`` -> ``[B, L, C]``.

    With ``windowed`` a position sees the configured window only, as transformers from 5.3 on have it; the official
    package runs on an older one, which ignores the window.
    """

    def __init__(self, config: CodecEncoderConfig, *, windowed: bool) -> None:
        super().__init__()
        self.config = config
        self.window = config.sliding_window if windowed else None
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        positions = clip_positions(x.shape[1], self.config, self.window, x.device)
        for layer in self.layers:
            x = layer(x, positions)
        return x
