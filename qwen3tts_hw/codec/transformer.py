"""The codec decoder's transformer: causal attention over a sliding window, one position per frame.

Past keys and values live in the rows of a :class:`~qwen3tts_hw.codec.state.CodecState`, the newest ``window - 1`` of
them; which of these entries exist follows from the slot's frame counter. Attention is written out in plain matrix
products: the fused kernels of different devices disagree about boolean masks, and 72 keys leave them little to gain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from qwen3tts_hw.codec.layers import wide
from qwen3tts_hw.codec.rotary import rotate, rotation
from qwen3tts_hw.codec.state import StateLayout, StateRows
from qwen3tts_hw.config import CodecDecoderConfig

QUERY_BLOCK_FRAMES = 256  # bounds the score matrix of a long one-pass decode to 256 x (256 + window - 1)


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Queries ``start .. stop`` of a call; they meet keys ``start .. stop + window - 1`` of the joined list.

    ``hidden`` ``[R, 1, queries, keys] bool`` is true where a key may not be seen.
    """

    start: int
    stop: int
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Positions:
    """What all attention layers of a call share: rotation ``[R, 1, F, D]`` and the visibility of keys."""

    cosine: Tensor
    sine: Tensor
    blocks: tuple[QueryBlock, ...]


def positions_of(start: Tensor, frames: int, config: CodecDecoderConfig, dtype: torch.dtype) -> Positions:
    """Lay out ``frames`` new positions after ``start`` ``[R] int64``; angles are float32, exact up to 2**24 frames."""
    absolute = start[:, None] + torch.arange(frames, device=start.device)  # [R, F]
    cosine, sine = rotation(absolute[:, None], config.head_dim, config.rope_theta, dtype)  # [R, 1, F, D]
    firsts = range(0, frames, QUERY_BLOCK_FRAMES)
    blocks = tuple(
        _query_block(start, at, min(at + QUERY_BLOCK_FRAMES, frames), config.sliding_window) for at in firsts
    )
    return Positions(cosine, sine, blocks)


def _query_block(start: Tensor, first: int, stop: int, window: int) -> QueryBlock:
    queries = torch.arange(stop - first, device=start.device)[:, None] + (window - 1)
    keys = torch.arange(stop - first + window - 1, device=start.device)
    distance = queries - keys  # [queries, keys]; key k of the block is window - 1 frames older than query k
    outside = (distance < 0) | (distance >= window)
    unfilled = start[:, None] + (keys + (first - window + 1)) < 0  # [R, keys]: older than the stream
    return QueryBlock(first, stop, (outside | unfilled[:, None])[:, None])


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32."""

    def __init__(self, channels: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(wide(x.dtype))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


class WindowAttention(nn.Module):
    """Multi-head attention in which a frame sees itself and the ``window - 1`` frames before; ``[R, F, C]``."""

    def __init__(self, layout: StateLayout, config: CodecDecoderConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.num_heads, config.head_dim
        width = self.heads * self.head_dim
        self.window = config.sliding_window
        self.qkv = nn.Linear(config.hidden_size, 3 * width, bias=False)
        self.output = nn.Linear(width, config.hidden_size, bias=False)
        self.past = layout.add(2, self.heads, self.window - 1, self.head_dim)

    def forward(self, x: Tensor, rows: StateRows, positions: Positions) -> Tensor:
        qkv: Tensor = self.qkv(x)
        qkv = qkv.view(*x.shape[:2], 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)  # [3, R, H, F, D]
        query, key = rotate(qkv[:2], positions.cosine, positions.sine).unbind(0)
        joined = rows.extend(self.past, torch.stack((key, qkv[2]), 1), dim=3)  # [R, 2, H, window - 1 + F, D]
        parts = [self._attend(query, joined, block) for block in positions.blocks]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        y: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return y

    def _attend(self, query: Tensor, joined: Tensor, block: QueryBlock) -> Tensor:
        key, value = joined[:, :, :, block.start : block.stop + self.window - 1].unbind(1)
        scores = query[:, :, block.start : block.stop] @ key.transpose(2, 3) * self.head_dim**-0.5
        weights = scores.masked_fill(block.hidden, float("-inf")).softmax(-1, dtype=wide(scores.dtype))
        mixed: Tensor = weights.to(value.dtype) @ value
        return mixed


class TransformerLayer(nn.Module):
    """Attention and a gated network, each normed before, scaled after and added; ``[R, F, C]``."""

    def __init__(self, layout: StateLayout, config: CodecDecoderConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = WindowAttention(layout, config)
        self.attention_scale = nn.Parameter(torch.empty(config.hidden_size))
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.mlp_scale = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, x: Tensor, rows: StateRows, positions: Positions) -> Tensor:
        attended = self.attention(self.attention_norm(x), rows, positions)
        x = (x + self.attention_scale * attended).to(x.dtype)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        y: Tensor = self.down(functional.silu(gate) * up)
        return (x + self.mlp_scale * y).to(x.dtype)


class CodecTransformer(nn.Module):
    """Projection in, layers, norm, projection out; ``[R, F, latent]`` -> ``[R, F, latent]``."""

    def __init__(self, layout: StateLayout, config: CodecDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.input = nn.Linear(config.latent_dim, config.hidden_size)
        self.layers = nn.ModuleList(TransformerLayer(layout, config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.output = nn.Linear(config.hidden_size, config.latent_dim)

    def forward(self, x: Tensor, rows: StateRows) -> Tensor:
        positions = positions_of(rows.start, x.shape[1], self.config, x.dtype)
        x = self.input(x)
        for layer in self.layers:
            x = layer(x, rows, positions)
        y: Tensor = self.output(self.norm(x))
        return y
