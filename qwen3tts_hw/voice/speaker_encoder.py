"""SpeakerEncoder: reference audio to the one vector that tells the talker whose voice to use (Base checkpoints).

An ECAPA-TDNN (arXiv 2005.07143) without batch norms over log-mel frames, in float32; the vector has the talker's width
and takes the speaker row of the prompt as it is. Knows no files, sample rates or requests.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from qwen3tts_hw.checkpoint.slots import TensorSlots
from qwen3tts_hw.encoder_config import SpeakerEncoderConfig
from qwen3tts_hw.errors import RequestError
from qwen3tts_hw.types import SAMPLE_RATE_HZ
from qwen3tts_hw.voice.mel import EDGE_SAMPLES, HOP_SAMPLES, MelSpectrogram

PREFIX = "speaker_encoder."
MIN_VARIANCE = 1e-12


class ReflectConv(nn.Module):
    """Convolution over reflected edges that keeps the length; ``[B, Cin, T]`` -> ``[B, Cout, T]``."""

    def __init__(self, channels_in: int, channels_out: int, *, kernel: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels_in, channels_out, kernel, dilation=dilation)
        around = (kernel - 1) * dilation
        self.padding = (around // 2, around - around // 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(functional.pad(x, self.padding, mode="reflect") if any(self.padding) else x)
        return y


class Res2Net(nn.Module):
    """Convolutions over groups of channels, each fed its group and the result before; ``[B, C, T]``."""

    def __init__(self, channels: int, *, groups: int, kernel: int, dilation: int) -> None:
        super().__init__()
        width = channels // groups
        self.groups = groups
        self.blocks = nn.ModuleList(
            ReflectConv(width, width, kernel=kernel, dilation=dilation) for _ in range(groups - 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = x.chunk(self.groups, 1)
        outputs = [first]
        for index, (group, block) in enumerate(zip(rest, self.blocks, strict=True)):
            outputs.append(functional.relu(block(group if index == 0 else group + outputs[-1])))
        return torch.cat(outputs, 1)


class SqueezeExcite(nn.Module):
    """Scale each channel by a gate computed from the means over time; ``[B, C, T]``."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze = ReflectConv(channels, squeezed)
        self.excite = ReflectConv(squeezed, channels)

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.excite(functional.relu(self.squeeze(x.mean(2, keepdim=True))))
        return x * gate.sigmoid()


class ResidualStage(nn.Module):
    """Pointwise, grouped and pointwise convolution, gated and added to the input; ``[B, C, T]``."""

    def __init__(self, config: SpeakerEncoderConfig, stage: int) -> None:
        super().__init__()
        channels = config.channels[stage]
        kernel, dilation = config.kernel_sizes[stage], config.dilations[stage]
        self.before = ReflectConv(channels, channels)
        self.grouped = Res2Net(channels, groups=config.groups, kernel=kernel, dilation=dilation)
        self.after = ReflectConv(channels, channels)
        self.gate = SqueezeExcite(channels, config.squeeze_channels)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.grouped(functional.relu(self.before(x)))
        y = self.gate(functional.relu(self.after(y)))
        return x + y


class AttentivePooling(nn.Module):
    """Mean and deviation over time, weighted per channel by attention; ``[B, C, T]`` -> ``[B, 2 C, 1]``."""

    def __init__(self, channels: int, attention_channels: int) -> None:
        super().__init__()
        self.reduce = ReflectConv(3 * channels, attention_channels)
        self.expand = ReflectConv(attention_channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = _moments(x, torch.full_like(x[:1, :1], 1.0 / x.shape[2]))
        features = torch.cat((x, mean.expand_as(x), deviation.expand_as(x)), 1)
        scores: Tensor = self.expand(torch.tanh(functional.relu(self.reduce(features))))
        return torch.cat(_moments(x, scores.softmax(2)), 1)


def _moments(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean and standard deviation over time, ``[B, C, 1]`` each."""
    mean = (weights * x).sum(2, keepdim=True)
    variance = (weights * (x - mean).square()).sum(2, keepdim=True)
    return mean, variance.clamp(min=MIN_VARIANCE).sqrt()


class SpeakerEncoder(nn.Module):
    """The speaker encoder of a Base checkpoint; weights are undefined until :meth:`load_weights`.

    ``stft`` says whether the device has ``torch.stft`` (a capability of the backend).
    """

    def __init__(self, config: SpeakerEncoderConfig, device: torch.device | str, *, stft: bool) -> None:
        super().__init__()
        self.config, self.device = config, torch.device(device)
        channels, kernels, dilations = config.channels, config.kernel_sizes, config.dilations
        last = len(channels) - 1
        with torch.device("meta"):
            self.entry = ReflectConv(config.num_mels, channels[0], kernel=kernels[0], dilation=dilations[0])
            self.stages = nn.ModuleList(ResidualStage(config, stage) for stage in range(1, last))
            self.aggregate = ReflectConv(
                sum(channels[1:last]), channels[last], kernel=kernels[last], dilation=dilations[last]
            )
            self.pooling = AttentivePooling(channels[last], config.attention_channels)
            self.output = ReflectConv(2 * channels[last], config.embedding_size)
        self.to_empty(device=self.device)
        self.to(torch.float32)
        self.mel = MelSpectrogram(config.num_mels, self.device, stft=stft)
        self.requires_grad_(False).eval()

    @property
    def min_samples(self) -> int:
        """Shortest clip that has enough samples, and enough frames, to reflect at its edges."""
        paddings = (module.padding for module in self.modules() if isinstance(module, ReflectConv))
        frames = max(max(padding) for padding in paddings) + 1
        return max(EDGE_SAMPLES + 1, frames * HOP_SAMPLES)

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take ``(name, tensor)`` pairs of the main checkpoint and return the names used.

        Names outside the speaker encoder are passed over. Raises CheckpointError listing every missing, unknown or
        wrongly shaped tensor of it.
        """
        return self._slots().load(tensors, what="speaker encoder", skip=lambda name: not name.startswith(PREFIX))

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the checkpoint tensors that :meth:`load_weights` uses."""
        return self._slots().shapes

    @torch.no_grad()
    def embed(self, audio: Tensor) -> Tensor:
        """Embed mono audio at 24 kHz, ``[L] float32`` in [-1, 1], as ``[H] float32`` on the encoder's device.

        Raises RequestError for a clip shorter than ``min_samples``.
        """
        if audio.dim() != 1:
            raise RequestError("ref_audio", f"expected mono audio [samples], got {list(audio.shape)}")
        if audio.shape[0] < self.min_samples:
            raise RequestError(
                "ref_audio",
                f"the reference audio lasts {1_000 * audio.shape[0] / SAMPLE_RATE_HZ:.0f} ms; at least "
                f"{1_000 * self.min_samples / SAMPLE_RATE_HZ:.0f} ms are needed, and 3 to 15 seconds work well",
            )
        mel = self.mel(audio.to(self.device, torch.float32))
        x = functional.relu(self.entry(mel[None]))
        outputs = []
        for stage in self.stages:
            x = stage(x)
            outputs.append(x)
        x = functional.relu(self.aggregate(torch.cat(outputs, 1)))
        embedding: Tensor = self.output(self.pooling(x))[0, :, 0]
        return embedding

    def _slots(self) -> TensorSlots:
        slots = TensorSlots()
        slots.parameters(f"{PREFIX}blocks.0.conv", self.entry.conv)
        for index, stage in enumerate(self.stages, start=1):
            assert isinstance(stage, ResidualStage)
            block = f"{PREFIX}blocks.{index}"
            slots.parameters(f"{block}.tdnn1.conv", stage.before.conv)
            for group, conv in enumerate(stage.grouped.blocks):
                assert isinstance(conv, ReflectConv)
                slots.parameters(f"{block}.res2net_block.blocks.{group}.conv", conv.conv)
            slots.parameters(f"{block}.tdnn2.conv", stage.after.conv)
            slots.parameters(f"{block}.se_block.conv1", stage.gate.squeeze.conv)
            slots.parameters(f"{block}.se_block.conv2", stage.gate.excite.conv)
        slots.parameters(f"{PREFIX}mfa.conv", self.aggregate.conv)
        slots.parameters(f"{PREFIX}asp.tdnn.conv", self.pooling.reduce.conv)
        slots.parameters(f"{PREFIX}asp.conv", self.pooling.expand.conv)
        slots.parameters(f"{PREFIX}fc", self.output.conv)
        return slots
