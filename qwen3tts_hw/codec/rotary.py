"""Rotary position embedding of the codec's transformers: angles in float32, the halves of a head forming the pairs."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[..., head_dim]`` of integer positions ``[...]``; exact positions up to 2**24."""
    pairs = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[..., None] * (1.0 / theta ** (pairs / head_dim))
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate ``[..., head_dim]`` by position; the first and second half form the pairs."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine
