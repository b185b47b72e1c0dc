"""The contract of the codec decoder's fast form, and the values that cross it.

Tensors only: a fast form knows neither modules nor the engine. It is built over loaded float32 weights and must be
built again after they change. Channel orders are those of the plain form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

PRECISIONS = ("high", "medium", "low")


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """A causal convolution ``weight [N, C, taps]``, tap order oldest first, and ``bias [N]``.

    With ``phases`` > 1 the outputs of a step are ``channels * phases`` columns, channel by channel, which become
    ``phases`` steps of the output.
    """

    weight: Tensor
    bias: Tensor | None = None
    dilation: int = 1
    phases: int = 1


@dataclass(frozen=True, slots=True)
class Snake:
    """``x + sin(x * frequency)^2 * magnitude``, ``[C]`` each."""

    frequency: Tensor
    magnitude: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer layer; queries, keys and values packed, gate and up packed, layer scales as they are."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    attention_scale: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    mlp_scale: Tensor


@dataclass(frozen=True, slots=True)
class ConvNeXtWeights:
    """Upsampling and the block behind it; ``depthwise [C, taps]``."""

    upsample: ConvWeights
    depthwise: Tensor
    depthwise_bias: Tensor
    norm: Tensor
    norm_bias: Tensor
    expand: ConvWeights
    contract: ConvWeights
    scale: Tensor


@dataclass(frozen=True, slots=True)
class UnitWeights:
    """A residual unit: activation, dilated convolution, activation, pointwise convolution."""

    first: Snake
    dilated: ConvWeights
    second: Snake
    pointwise: ConvWeights


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Activation, upsampling and residual units."""

    activation: Snake
    upsample: ConvWeights
    units: Sequence[UnitWeights]


@dataclass(frozen=True, slots=True)
class CodecWeights:
    """Everything the decoder computes with; ``table [16 * 2048, C]`` holds projected code vectors."""

    table: Tensor
    pre_conv: ConvWeights
    input: ConvWeights
    layers: Sequence[LayerWeights]
    norm: Tensor
    output: ConvWeights
    upsamples: Sequence[ConvNeXtWeights]
    entry: ConvWeights
    blocks: Sequence[BlockWeights]
    exit_activation: Snake
    exit: ConvWeights
    num_heads: int
    head_dim: int
    window: int
    rms_eps: float
    norm_eps: float
    rope_theta: float


class StreamState(Protocol):
    """What a decoder remembers of its streams, one slot each."""

    slots: int
    frames: Tensor

    @property
    def bytes_per_slot(self) -> int:
        """Device memory of one stream, in bytes."""

    def reset(self, slot_ids: Tensor) -> None:
        """Return the slots in ``slot_ids [N] int64`` (on the device) to the start of a stream, in place."""

    def copy(self, source: int, target: int) -> None:
        """Make slot ``target`` the same as slot ``source``, in place."""


class FastDecoder(Protocol):
    """A streaming decoder over fixed weights and buffers. Calls may be captured and must follow each other."""

    def new_state(self, slots: int) -> StreamState:
        """State of ``slots`` streams, all at their start; only for this decoder."""

    def step(self, codes: Tensor, state: StreamState, slots: Tensor) -> Tensor:
        """Samples ``[R, F * 1920] float32`` in [-1, 1] of ``codes [R, 16, F] int64``; see the plain form."""


class FastForm(Protocol):
    """A way to build fast decoders; ``name`` and ``precision`` appear in health reports."""

    name: str
    precision: str

    def build(self, weights: CodecWeights) -> FastDecoder:
        """Bind loaded weights and allocate buffers."""
