"""The talker's input rows, looked up by (slot, position): the one place that knows what they are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen3tts_hw.engine.state import SlotTable
from qwen3tts_hw.model.embeddings import CodeEmbedder, TextEmbedder


def input_rows(table: SlotTable, text: TextEmbedder, codes: CodeEmbedder, slots: Tensor, positions: Tensor) -> Tensor:
    """Rows ``[n, H]`` for ``slots [n] int64`` and ``positions [n] int64``: codec side, speaker, text side, added up.

    Positions beyond the table read its last one; nothing waits for the device.
    """
    places = positions.clamp(max=table.max_positions - 1)
    rows = codes.sum(table.codes[slots, places].to(torch.int64))
    if table.speaker is not None:
        here = (places == table.speaker_rows[slots]).unsqueeze(-1)
        rows = torch.where(here, table.speaker[slots], rows)  # the codec side of a speaker row is empty
    total: Tensor = rows + text(table.text[slots, places].to(torch.int64))
    return total
