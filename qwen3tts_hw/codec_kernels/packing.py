"""Weights as the kernels read them: words, scaled and padded, in the order of the products; and where which precision.

A *format* says how many 16-bit words stand for an input and for a weight; see :mod:`.triton_conv`. Measured waveform
error against float32, random weights of the published size, signal standard deviation 0.25 (largest absolute
difference; root mean square as a share of the signal's):

=========  =======================================================================  ========  =========
precision  formats                                                                  max abs   rms share
=========  =======================================================================  ========  =========
high       two bfloat16 words each everywhere                                       3.0e-4    2.1e-4
medium     one float16 word in the dilated convolutions of the last two blocks      5.9e-4    5.0e-4
low        one float16 word everywhere                                              4.6e-3    3.6e-3
--         for comparison, the plain form in bfloat16                               5.3e-2    4.7e-2
=========  =======================================================================  ========  =========

Early layers are few operations and make most of the error; the last blocks are half of the operations and make little.
In "high" most of the error comes from the matrix units, which cut rather than round when they add.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from qwen3tts_hw.codec_kernels.base import ConvWeights, Snake

GRANULE = 32  # widths are padded to multiples of it
FLOAT16_TOP = 256.0  # weights are scaled below this, far from float16's limits on both sides


@dataclass(frozen=True, slots=True)
class Format:
    """Dtype of a layer's words, and how many stand for an input and for a weight."""

    dtype: torch.dtype
    input_words: int
    weight_words: int


EXACT = Format(torch.bfloat16, 2, 2)
SINGLE = Format(torch.float16, 1, 1)


def format_of(precision: str, layer: str) -> Format:
    """The format of a layer: "front", "entry", "exit", "upsample", or "dilated"/"pointwise" and its block's number."""
    if precision == "low":
        return SINGLE
    if precision == "medium" and layer in ("dilated 2", "dilated 3"):
        return SINGLE
    return EXACT


def padded(width: int) -> int:
    """The width of rows that hold ``width`` channels."""
    return -(-width // GRANULE) * GRANULE


@dataclass(frozen=True, slots=True)
class PackedConv:
    """A convolution ready to run: ``words [columns, taps, weight_words, C]``, ``bias [columns]``.

    ``width`` columns per phase are computed; ``phases`` of them make up ``columns``.
    """

    words: Tensor
    scale: float
    bias: Tensor
    dilation: int
    phases: int
    format: Format

    @property
    def columns(self) -> int:
        return self.words.shape[0]

    @property
    def width(self) -> int:
        return self.words.shape[0] // self.phases

    @property
    def taps(self) -> int:
        return self.words.shape[1]

    @property
    def channels(self) -> int:
        return self.words.shape[3]

    @property
    def history(self) -> int:
        """Steps of input kept between calls."""
        return (self.taps - 1) * self.dilation


def pack(conv: ConvWeights, form: Format, *, gain: Tensor | None = None) -> PackedConv:
    """Bring a convolution into the kernels' form; ``gain [N]`` multiplies its results."""
    weight, phases = conv.weight.float(), conv.phases
    bias = torch.zeros_like(weight[:, 0, 0]) if conv.bias is None else conv.bias.float()
    if gain is not None:
        weight, bias = weight * gain.float()[:, None, None], bias * gain.float()
    outputs, channels, taps = weight.shape
    width = padded(outputs // phases)
    by_phase = weight.view(outputs // phases, phases, channels, taps).permute(1, 0, 3, 2)  # [phase, N, tap, C]
    by_phase = functional.pad(by_phase, (0, padded(channels) - channels, 0, 0, 0, width - outputs // phases))
    bias = functional.pad(bias.view(-1, phases).T, (0, width - outputs // phases))
    scale = 1.0
    if form.dtype == torch.float16:
        largest = float(by_phase.abs().max())
        scale = 2.0 ** math.floor(math.log2(FLOAT16_TOP / largest)) if largest > 0 else 1.0
    words = to_words(by_phase.flatten(0, 1) * scale, form.dtype, form.weight_words)
    return PackedConv(words, 1.0 / scale, bias.flatten().contiguous(), conv.dilation, phases, form)


def to_words(values: Tensor, dtype: torch.dtype, words: int) -> Tensor:
    """``[..., C]`` as ``[..., words, C]`` of the dtype, which add up to the values."""
    first = values.to(dtype)
    if words == 1:
        return first.unsqueeze(-2).contiguous()
    return torch.stack((first, (values - first.float()).to(dtype)), -2)


def pack_snake(snake: Snake) -> tuple[Tensor, Tensor]:
    """Frequencies and magnitudes, padded by channels that stay zero."""
    frequency, magnitude = snake.frequency.float().flatten(), snake.magnitude.float().flatten()
    room = (0, padded(len(frequency)) - len(frequency))
    return functional.pad(frequency, room), functional.pad(magnitude, room)
