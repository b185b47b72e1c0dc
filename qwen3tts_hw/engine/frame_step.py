"""The frame step: from a talker step's hidden states and logits to one finished frame per request.

Runs after the talker, for the last row of each request, as one function of fixed shape that can be captured: choose
code 0 (penalty, minimum length, filters, noise), run the code predictor, write the frame into the slot table. A row
makes a frame only if it stands right before its slot's frontier and the slot has not ended; any other row (a prompt
chunk, a recomputed row, a step scheduled past the end) returns what is already known and writes to the scratch slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.engine.state import SlotTable
from qwen3tts_hw.graph_wrappers import InputSpec
from qwen3tts_hw.model.code_predictor import CodePredictor
from qwen3tts_hw.model.sampling import choose, frame_key, penalise_repeats
from qwen3tts_hw.predictor_kernels.base import FastPredictor
from qwen3tts_hw.types import CODEBOOK_SIZE, MIN_FRAMES

END = CODEBOOK_SIZE  # column and candidate number of end of speech among the legal choices


class FrameStep:
    """Bind the predictor to a slot table; call it with one row per request."""

    def __init__(self, config: ModelConfig, table: SlotTable, predictor: CodePredictor) -> None:
        self.table, self.predictor = table, predictor
        self.end_token = config.codec_tokens.eos
        self._candidates = torch.arange(CODEBOOK_SIZE + 1, device=table.device, dtype=torch.int32)

    def __call__(self, hidden: Tensor, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Make a frame for each row that is due one.

        ``hidden [B, H]`` final-normed talker output, ``logits [B, V]`` of codebook 0, ``slots [B] int64``, ``positions
        [B] int64`` of the rows. Returns codebook 0's tokens ``[B] int64``; end of speech is the checkpoint's id.
        """
        if self.predictor.fast is not None:
            return self._fast(self.predictor.fast, hidden, logits, slots, positions)
        table = self.table
        target = positions + 1
        frontier, start = table.frontier[slots], table.prompt_rows[slots]
        due = (target == frontier) & ~table.ended[slots]
        frame = (frontier - start).to(torch.int32)
        key = frame_key(*table.seeds(slots), frame)

        choice = self._choose_first(logits, slots, frame, key)
        is_end = choice == END
        code0 = choice.clamp(max=CODEBOOK_SIZE - 1)
        residual = self.predictor(hidden, code0, table.residual_rows(slots), key)

        makes = due & ~is_end
        writer = torch.where(makes, slots, table.scratch)
        place = target.clamp(max=table.max_positions - 1)
        table.codes[writer, place] = torch.cat([code0[:, None], residual], dim=1).to(torch.int16)
        table.seen[writer, code0] = torch.ones_like(makes)  # a Python True would be a copy from the host
        table.frontier[writer] = target + 1
        is_last = frontier + 1 - start >= table.max_frames[slots]
        table.ended[torch.where(due & (is_end | is_last), slots, table.scratch)] = torch.ones_like(due)
        known = table.codes[slots, place, 0].to(torch.int64)
        return torch.where((target < table.frontier[slots]) & (known >= 0), known, self.end_token)

    def _fast(self, fast: FastPredictor, hidden: Tensor, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """The same step through the predictor's kernels."""
        tensors = self.table.tensors()
        begun = fast.begin(tensors, logits, slots, self.end_token)
        residual = fast.residual_codes(hidden, begun.choice, begun)
        return fast.finish(tensors, begun, residual, slots, positions, self.end_token)

    def _choose_first(self, logits: Tensor, slots: Tensor, frame: Tensor, key: Tensor) -> Tensor:
        """Code 0 ``[B]`` as a column of the legal choices: 0..2047 and END."""
        table = self.table
        legal = torch.cat([logits[:, :CODEBOOK_SIZE], logits[:, self.end_token : self.end_token + 1]], dim=1).float()
        legal = penalise_repeats(legal, table.seen[slots], table.penalty(slots))
        barred = (self._candidates == END) & (frame < MIN_FRAMES)[:, None]
        legal = legal.masked_fill(barred, float("-inf"))
        return choose(legal, table.talker_rows(slots), key, 0, self._candidates)


def frame_buckets(most: int) -> tuple[int, ...]:
    """Batch sizes worth a graph for up to ``most`` rows: 1, 2, 4, 8, then steps of 8 up to 128."""
    sizes = (1, 2, 4, *range(8, 129, 8))
    top = next((size for size in sizes if size >= most), sizes[-1])
    return tuple(size for size in sizes if size <= top)


def frame_step_inputs(
    config: ModelConfig, table: SlotTable, *, hidden_dtype: torch.dtype, logits_dtype: torch.dtype
) -> tuple[InputSpec, ...]:
    """Shapes of the frame step's arguments for a graph wrapper; padding rows carry the scratch slot."""
    return (
        InputSpec("hidden", (config.talker.hidden_size,), hidden_dtype),
        InputSpec("logits", (config.talker_vocab_size,), logits_dtype),
        InputSpec("slots", (), torch.int64, table.scratch),
        InputSpec("positions", (), torch.int64),
    )
