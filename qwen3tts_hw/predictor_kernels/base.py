"""The contract of a code predictor's fast form, and the values that cross it.

Tensors only: a fast form knows neither modules nor the engine. It is built over loaded weights and must be built again
after they change. What it computes is the plain form's result, up to the order of summation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one decoder layer, ``[out, in]``; queries, keys and values packed, gate and up packed."""

    input_norm: Tensor
    qkv: Tensor
    query_norm: Tensor
    key_norm: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class PredictorWeights:
    """Everything a code predictor computes with.

    ``heads [15, 2048, C]``; ``tables [16, 2048, C]``: embeddings of all codes of all codebooks, already projected to
    the predictor's width. ``projection`` and its bias map the talker's hidden state, None where widths are equal.
    ``cos``, ``sin [positions, D]``.
    """

    layers: Sequence[LayerWeights]
    norm: Tensor
    heads: Tensor
    tables: Tensor
    projection: Tensor | None
    projection_bias: Tensor | None
    cos: Tensor
    sin: Tensor
    num_heads: int
    num_kv_heads: int
    eps: float


@dataclass(frozen=True, slots=True)
class SlotTensors:
    """The slot table's tensors that a frame step reads and writes, one entry per slot; see the engine's slot table."""

    codes: Tensor
    frontier: Tensor
    prompt_rows: Tensor
    max_frames: Tensor
    ended: Tensor
    seen: Tensor
    floats: Tensor
    integers: Tensor


@dataclass(frozen=True, slots=True)
class BegunFrame:
    """Codebook 0's choice ``[B] int64`` (2048 = end of speech), and what the residual codes are drawn with.

    ``key [B] int32``, ``temperature [B] float32``, ``top_k [B] int64``, ``top_p [B] float32``.
    """

    choice: Tensor
    key: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor


class FastPredictor(Protocol):
    """A predictor over fixed weights and buffers. Calls allocate outputs only and may be captured."""

    def residual_codes(self, hidden: Tensor, code0: Tensor, begun: BegunFrame) -> Tensor:
        """Codes 1..15 ``[B, 15] int64`` from ``hidden [B, H]`` and ``code0 [B] int64``; ``begun.choice`` is ignored."""

    def begin(self, table: SlotTensors, logits: Tensor, slots: Tensor, end_token: int) -> BegunFrame:
        """Choose code 0 of each row from ``logits [B, V]`` by the sampling parameters and history of its slot."""

    def finish(
        self, table: SlotTensors, begun: BegunFrame, residual: Tensor, slots: Tensor, positions: Tensor, end_token: int
    ) -> Tensor:
        """Write the frames that are due into the table; codebook 0's tokens ``[B] int64``."""


class FastForm(Protocol):
    """A way to build fast predictors; ``name`` appears in health reports."""

    name: str

    def build(self, weights: PredictorWeights, max_rows: int) -> FastPredictor:
        """Bind loaded weights and allocate buffers for calls of up to ``max_rows`` rows."""
