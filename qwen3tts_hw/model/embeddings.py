"""Input rows of the talker: text path, codec path, and their sum.

Owns the embedding tables. Codec tables of all 16 codebooks are one table, so that a frame's sum is one gather; ids of
-1 mean "nothing here" and read a row of zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.model.layers import Linear
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS

ROWS_PER_GATHER = 512  # bounds the [rows, 16, H] float32 intermediate during long prefills


class TextEmbedder(nn.Module):
    """``fc2(silu(fc1(table[id])))``: text ids to talker width (spec 2.1)."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        inner = config.text_hidden_size
        self.table = nn.Parameter(
            torch.empty(config.text_vocab_size, inner, device=device, dtype=dtype), requires_grad=False
        )
        self.fc1 = Linear(inner, inner, bias=True, device=device, dtype=dtype)
        self.fc2 = Linear(inner, config.talker.hidden_size, bias=True, device=device, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Rows ``[n, H]`` for ``ids [n] int64``; an id of -1 gives a row of zeros."""
        rows: Tensor = self.fc2(nn.functional.silu(self.fc1(nn.functional.embedding(ids.clamp(min=0), self.table))))
        return rows * (ids >= 0).unsqueeze(-1).to(rows.dtype)


class CodeEmbedder(nn.Module):
    """Embeddings of the 16 codebooks: codebook 0's whole vocabulary, then 15 residual tables, then a row of zeros."""

    offsets: Tensor

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.talker_rows = config.talker_vocab_size
        self.zero_row = self.talker_rows + (NUM_CODEBOOKS - 1) * CODEBOOK_SIZE
        self.table = nn.Parameter(
            torch.zeros(self.zero_row + 1, config.talker.hidden_size, device=device, dtype=dtype), requires_grad=False
        )
        offsets = [0] + [self.talker_rows + g * CODEBOOK_SIZE for g in range(NUM_CODEBOOKS - 1)]
        self.register_buffer("offsets", torch.tensor(offsets, device=device), persistent=False)

    def codebook(self, index: int) -> Tensor:
        """The table of one codebook, a view ``[rows, H]``."""
        if index == 0:
            return self.table[: self.talker_rows]
        start = self.talker_rows + (index - 1) * CODEBOOK_SIZE
        return self.table[start : start + CODEBOOK_SIZE]

    def rows(self, codebook: int, codes: Tensor) -> Tensor:
        """Embeddings ``[n, H]`` of valid ``codes [n] int64`` of one codebook."""
        return nn.functional.embedding(codes, self.codebook(codebook))

    def sum(self, codes: Tensor) -> Tensor:
        """Sum over codebooks of ``codes [n, 16]`` (-1 = nothing): accumulated in float32, rounded once, ``[n, H]``."""
        index = torch.where(codes >= 0, codes + self.offsets, self.zero_row)
        blocks = [nn.functional.embedding(part, self.table).float().sum(dim=1) for part in index.split(ROWS_PER_GATHER)]
        total = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        return total.to(self.table.dtype)
