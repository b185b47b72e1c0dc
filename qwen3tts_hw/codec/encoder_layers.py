"""Convolutions and the quantizer of the codec encoder.

Whole clips only: nothing is kept between calls. Follows the Mimi codec (arXiv 2410.00037) as the 12 Hz codec uses it.
Knows nothing about checkpoint names.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from qwen3tts_hw.codec.layers import MIN_CLUSTER_USAGE
from qwen3tts_hw.encoder_config import CodecEncoderConfig
from qwen3tts_hw.types import CODEBOOK_SIZE


class StridedConv(nn.Module):
    """Convolution that sees the present and the past only; ``[B, Cin, L]`` -> ``[B, Cout, ceil(L / stride)]``.

    ``pad_mode`` says what stands before the first sample and completes the last stride: zeros ("constant") or the
    outermost values again ("replicate").
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        *,
        kernel: int,
        stride: int = 1,
        dilation: int = 1,
        bias: bool = True,
        pad_mode: str = "constant",
    ) -> None:
        super().__init__()
        self.stride, self.pad_mode = stride, pad_mode
        self.extent = (kernel - 1) * dilation + 1  # inputs that one output spans
        self.conv = nn.Conv1d(channels_in, channels_out, kernel, stride=stride, dilation=dilation, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        padding = (self.extent - self.stride, -x.shape[-1] % self.stride)
        y: Tensor = self.conv(functional.pad(x, padding, mode=self.pad_mode))
        return y


class ResidualBlock(nn.Module):
    """Dilated and pointwise convolution over fewer channels, each after an ELU, added to the input; ``[B, C, L]``."""

    def __init__(self, channels: int, config: CodecEncoderConfig, *, dilation: int) -> None:
        super().__init__()
        narrow = channels // config.compress
        self.dilated = StridedConv(channels, narrow, kernel=config.residual_kernel_size, dilation=dilation)
        self.pointwise = StridedConv(narrow, channels, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dilated(functional.elu(x))
        y = self.pointwise(functional.elu(y))
        return x + y


class Stage(nn.Module):
    """Residual blocks, ELU, and a shortening convolution; ``[B, C, L]`` -> ``[B, 2 C, ceil(L / stride)]``."""

    def __init__(self, channels: int, config: CodecEncoderConfig, *, stride: int) -> None:
        super().__init__()
        self.residuals = nn.ModuleList(
            ResidualBlock(channels, config, dilation=config.dilation_growth_rate**index)
            for index in range(config.num_residual_layers)
        )
        self.shorten = StridedConv(channels, 2 * channels, kernel=2 * stride, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        for residual in self.residuals:
            x = residual(x)
        y: Tensor = self.shorten(functional.elu(x))
        return y


class ConvolutionStack(nn.Module):
    """Audio ``[B, 1, L]`` to features ``[B, C, ceil(L / 960)]``, one per 40 ms."""

    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        channels = config.num_filters
        self.entry = StridedConv(1, channels, kernel=config.kernel_size)
        self.stages = nn.ModuleList(
            Stage(channels << level, config, stride=stride) for level, stride in enumerate(config.strides)
        )
        self.exit = StridedConv(channels << len(config.strides), config.hidden_size, kernel=config.last_kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for stage in self.stages:
            x = stage(x)
        y: Tensor = self.exit(functional.elu(x))
        return y

    @property
    def past_samples(self) -> int:
        """How many samples before its own stride a feature depends on."""
        past, rate = 0, 1
        for conv in self._convolutions():
            past += (conv.extent - conv.stride) * rate
            rate *= conv.stride
        return past

    def _convolutions(self) -> Iterator[StridedConv]:
        return (module for module in self.modules() if isinstance(module, StridedConv))


class ResidualQuantizer(nn.Module):
    """Vectors to codes, each codebook coding what the ones before left over; ``[N, C]`` -> ``[N, K] int64``.

    The nearest entry of a codebook is the one whose product with the vector, less half its own squared length, is
    largest; of equal ones the first. Always float32.
    """

    def __init__(self, channels: int, vector_dim: int, codebooks: int) -> None:
        super().__init__()
        self.projection = nn.Linear(channels, vector_dim, bias=False)
        self.tables = nn.Parameter(torch.empty(codebooks, CODEBOOK_SIZE, vector_dim))

    def forward(self, x: Tensor) -> Tensor:
        rest: Tensor = self.projection(x)
        codes = []
        for table in self.tables:
            scores = torch.addmm(table.square().sum(-1), rest, table.T, beta=-0.5)  # [N, 2048]
            codes.append(scores.argmax(-1))
            rest = rest - functional.embedding(codes[-1], table)
        return torch.stack(codes, -1)

    def store_projection(self, weight: Tensor) -> None:
        """Set the projection from a convolution's weight ``[V, C, 1]``."""
        self.projection.weight.copy_(weight.squeeze(-1))

    def store(self, codebook: int, vectors: Tensor, usage: Tensor) -> None:
        """Fill one codebook from vector sums ``[2048, V]`` and their counts ``[2048]``."""
        self.tables[codebook].copy_(vectors.float() / usage.float().clamp(min=MIN_CLUSTER_USAGE)[:, None])
