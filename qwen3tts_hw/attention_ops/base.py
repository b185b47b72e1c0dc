"""The contract of an attention op and the shape rule that all of them share.

Tensors are ``[B, heads, S, D]``. No mask crosses this seam: with as many keys as queries attention is causal, a single
query sees every key it is given. Polarity and shape of masks are settled inside each implementation.
"""

from __future__ import annotations

from typing import Protocol

import torch

from qwen3tts_hw.errors import AttentionMaskError


class AttentionOp(Protocol):
    """Grouped-query attention with an implied mask; ``name`` appears in health reports."""

    name: str

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float
    ) -> torch.Tensor:  # [B, Hq, Sq, D], the dtype of query
        """Attend from ``[B, Hq, Sq, D]`` to ``[B, Hkv, Sk, D]``; raises AttentionMaskError as :func:`check_lengths`."""


def check_lengths(num_queries: int, num_keys: int) -> None:
    """Raise AttentionMaskError unless the implied mask is unambiguous: one query, or as many queries as keys."""
    if num_queries not in (1, num_keys):
        raise AttentionMaskError(
            f"attention from {num_queries} queries to {num_keys} keys has no implied mask; "
            f"pass one query, or exactly as many queries as keys"
        )
