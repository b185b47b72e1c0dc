"""Convolutional layers of the codec decoder and the codebook lookup.

Every causal layer reads the inputs it has seen before from the rows of a :class:`~qwen3tts_hw.codec.state.CodecState`;
a stream that has just started has seen zeros. So whole sequences and single frames run through the same code. Knows
nothing about checkpoint names.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from qwen3tts_hw.codec.state import StateLayout, StateRows
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS

CONV_KERNEL = 7
RESIDUAL_DILATIONS = (1, 3, 9)
CONVNEXT_EXPANSION = 4
CONVNEXT_NORM_EPS = 1e-6
SNAKE_EPS = 1e-9
MIN_CLUSTER_USAGE = 1e-5
# From this width on a convolution runs as one matrix product. Wide layers have few steps per frame, for which the
# libraries' convolutions are slow on every device measured (for one shape by 70 times, through an FFT); narrow layers
# have many, for which laying out the windows costs more than it saves.
MATMUL_MIN_CHANNELS = 384


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that norms, sines and softmax of ``dtype`` tensors are computed in: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def convolve(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """Apply ``conv`` without padding to ``[R, Cin, L]``; the result of wide layers has strides of ``[R, L, Cout]``."""
    if conv.groups > 1 or conv.in_channels < MATMUL_MIN_CHANNELS:
        y: Tensor = conv(x)
        return y
    (taps,), (dilation,) = conv.kernel_size, conv.dilation
    windows = x.unfold(2, (taps - 1) * dilation + 1, 1)[..., ::dilation]  # [R, Cin, L, taps], a view
    return functional.linear(windows.transpose(1, 2).flatten(2), conv.weight.flatten(1), conv.bias).transpose(1, 2)


class CodebookSum(nn.Module):
    """Code vectors of all codebooks, projected and added: codes ``[R, 16, F] int64`` -> ``[R, C, F]``.

    Both groups of codebooks end in a linear projection without bias, so each table is projected once when the weights
    are loaded and decoding is one gather and one sum. Tables and sum are float32 whatever the decoder's dtype; the
    result differs from projecting the sum by rounding alone (below 1e-5 in float32).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(NUM_CODEBOOKS * CODEBOOK_SIZE, channels))

    def forward(self, codes: Tensor) -> Tensor:
        # Ids outside a table must not reach the gather: end of speech or padding would read another codebook or abort.
        first_rows = torch.arange(0, self.table.shape[0], CODEBOOK_SIZE, device=codes.device)
        rows = codes.clamp(0, CODEBOOK_SIZE - 1) + first_rows[:, None]
        return functional.embedding(rows, self.table).sum(1).transpose(1, 2)  # [R, 16, F, C] -> [R, C, F]

    def store(self, codebook: int, vectors: Tensor, usage: Tensor, projection: Tensor) -> None:
        """Fill one codebook from vector sums ``[2048, V]``, their counts ``[2048]`` and a projection ``[C, V, 1]``."""
        entries = vectors.float() / usage.float().clamp(min=MIN_CLUSTER_USAGE)[:, None]
        first = codebook * CODEBOOK_SIZE
        self.table[first : first + CODEBOOK_SIZE].copy_(entries @ projection.float().squeeze(-1).T)


class SnakeBeta(nn.Module):
    """``x + sin(x * frequency)^2 * magnitude`` per channel of ``[R, C, L]``, in float32.

    The checkpoint holds logarithms; both factors are computed when the weights are loaded. Halves would lose the 1e-9
    that keeps the magnitude finite, and the phase of large inputs.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.frequency = nn.Parameter(torch.empty(channels, 1))
        self.magnitude = nn.Parameter(torch.empty(channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        sine = (x * self.frequency).sin_()
        return torch.addcmul(x.to(sine.dtype), sine.square_(), self.magnitude.to(sine.dtype)).to(x.dtype)

    def store_alpha(self, alpha: Tensor) -> None:
        """Set the frequencies from the stored logarithms ``[C]``."""
        self.frequency.copy_(alpha.float().exp()[:, None])

    def store_beta(self, beta: Tensor) -> None:
        """Set the magnitudes from the stored logarithms ``[C]``."""
        self.magnitude.copy_((beta.float().exp() + SNAKE_EPS).reciprocal()[:, None])


class CausalConv(nn.Module):
    """Convolution that sees the present and past inputs only; ``[R, Cin, L]`` -> ``[R, Cout, L]``."""

    def __init__(
        self,
        layout: StateLayout,
        channels_in: int,
        channels_out: int,
        *,
        kernel: int = CONV_KERNEL,
        dilation: int = 1,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels_in, channels_out, kernel, dilation=dilation, groups=groups)
        self.past = layout.add(channels_in, (kernel - 1) * dilation)

    def forward(self, x: Tensor, rows: StateRows) -> Tensor:
        return convolve(self.conv, rows.extend(self.past, x, dim=2))


class CausalUpsample(nn.Module):
    """Transposed convolution, kernel ``taps * stride``, tail cut off; ``[R, Cin, L]`` -> ``[R, Cout, L * stride]``.

    Computed as an ordinary causal convolution over ``taps`` inputs that yields the ``stride`` output phases as
    channels, which are then interleaved: no overlap to add, nothing to trim, and the start of a stream is no special
    case.
    """

    def __init__(self, layout: StateLayout, channels_in: int, channels_out: int, *, stride: int, taps: int) -> None:
        super().__init__()
        self.stride, self.taps = stride, taps
        self.conv = nn.Conv1d(channels_in, channels_out * stride, taps)
        self.past = layout.add(channels_in, 1) if taps > 1 else None

    def forward(self, x: Tensor, rows: StateRows) -> Tensor:
        phases = convolve(self.conv, x if self.past is None else rows.extend(self.past, x, dim=2))
        batch, channels, length = phases.shape
        phases = phases.view(batch, channels // self.stride, self.stride, length)
        return phases.transpose(2, 3).flatten(2)

    def store_weight(self, weight: Tensor) -> None:
        """Set the taps from a transposed convolution's weight ``[Cin, Cout, taps * stride]``."""
        by_tap = weight.reshape(*weight.shape[:2], self.taps, self.stride)  # tap 0 meets the newest input
        self.conv.weight.copy_(by_tap.permute(1, 3, 0, 2).flip(-1).flatten(0, 1))

    def store_bias(self, bias: Tensor) -> None:
        """Set the bias ``[Cout]``, the same for every phase."""
        if self.conv.bias is not None:
            self.conv.bias.copy_(bias.repeat_interleave(self.stride))


class ConvNeXtBlock(nn.Module):
    """Depthwise causal convolution and a pointwise network, scaled and added to the input; ``[R, C, L]``."""

    def __init__(self, layout: StateLayout, channels: int) -> None:
        super().__init__()
        self.depthwise = CausalConv(layout, channels, channels, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=CONVNEXT_NORM_EPS)
        self.expand = nn.Linear(channels, CONVNEXT_EXPANSION * channels)
        self.contract = nn.Linear(CONVNEXT_EXPANSION * channels, channels)
        self.scale = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor, rows: StateRows) -> Tensor:
        y: Tensor = self.depthwise(x, rows).transpose(1, 2)
        weight, bias = self.norm.weight.to(wide(x.dtype)), self.norm.bias.to(wide(x.dtype))
        y = functional.layer_norm(y.to(weight.dtype), weight.shape, weight, bias, self.norm.eps).to(x.dtype)
        y = self.contract(functional.gelu(self.expand(y)))
        return (x + (self.scale * y).transpose(1, 2)).to(x.dtype)


class ResidualUnit(nn.Module):
    """Dilated and pointwise convolution, each after a SnakeBeta, added to the input; ``[R, C, L]``."""

    def __init__(self, layout: StateLayout, channels: int, *, dilation: int) -> None:
        super().__init__()
        self.activation = SnakeBeta(channels)
        self.dilated = CausalConv(layout, channels, channels, dilation=dilation)
        self.pointwise_activation = SnakeBeta(channels)
        self.pointwise = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor, rows: StateRows) -> Tensor:
        y: Tensor = self.dilated(self.activation(x), rows)
        return x + convolve(self.pointwise, self.pointwise_activation(y))


class DecoderBlock(nn.Module):
    """SnakeBeta, upsampling by ``stride`` and three residual units; ``[R, C, L]`` -> ``[R, C / 2, L * stride]``."""

    def __init__(self, layout: StateLayout, channels: int, *, stride: int) -> None:
        super().__init__()
        self.activation = SnakeBeta(channels)
        self.upsample = CausalUpsample(layout, channels, channels // 2, stride=stride, taps=2)
        self.residuals = nn.ModuleList(
            ResidualUnit(layout, channels // 2, dilation=dilation) for dilation in RESIDUAL_DILATIONS
        )

    def forward(self, x: Tensor, rows: StateRows) -> Tensor:
        x = self.upsample(self.activation(x), rows)
        for unit in self.residuals:
            x = unit(x, rows)
        return x
