"""torch's scaled_dot_product_attention, which picks a fused kernel per device and keeps the softmax in float32.

Shared key/value heads go through ``enable_gqa``: on a CPU its results are bit-equal to expanded heads, and it needs no
copy of them.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from qwen3tts_hw.attention_ops.base import check_lengths


class SdpaAttention:
    """Attention by torch's own kernels; works on every device."""

    name = "sdpa"

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float) -> torch.Tensor:
        num_queries, num_keys = query.shape[2], key.shape[2]
        check_lengths(num_queries, num_keys)
        return scaled_dot_product_attention(
            query, key, value, is_causal=num_queries > 1, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
