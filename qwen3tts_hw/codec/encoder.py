"""CodecEncoder: 24 kHz audio to the codes of 16 codebooks, for reference audio of voice cloning.

Float32 throughout: codes are choices among near neighbours. Clips are encoded one by one, because padding one to the
length of another would change its last frame. Knows no files, sample rates or requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from qwen3tts_hw.codec.encoder_layers import ConvolutionStack, ResidualQuantizer, StridedConv
from qwen3tts_hw.codec.encoder_transformer import EncoderTransformer
from qwen3tts_hw.codec.encoder_weights import EncoderSlots, load
from qwen3tts_hw.encoder_config import DOWNSAMPLE_STRIDE, CodecEncoderConfig
from qwen3tts_hw.errors import RequestError
from qwen3tts_hw.types import NUM_CODEBOOKS

# The first convolutions hold 64 channels at 24 kHz, about 30 MB per second of audio: long clips run in parts.
SEGMENT_SAMPLES = 240_000


class CodecEncoder(nn.Module):
    """The encoder half of the 12 Hz codec.

    ``windowed`` limits attention to the configured window of 10 s. The official package does not, newer releases of
    the library below it do; for clips of up to 10 s it makes no difference. Weights are undefined until
    :meth:`load_weights`.
    """

    def __init__(self, config: CodecEncoderConfig, device: torch.device | str, *, windowed: bool = False) -> None:
        super().__init__()
        self.config, self.device = config, torch.device(device)
        width = config.hidden_size
        with torch.device("meta"):
            self.convolutions = ConvolutionStack(config)
            self.transformer = EncoderTransformer(config, windowed=windowed)
            self.downsample = StridedConv(
                width,
                width,
                kernel=2 * DOWNSAMPLE_STRIDE,
                stride=DOWNSAMPLE_STRIDE,
                bias=False,
                pad_mode="replicate",
            )
            self.semantic = ResidualQuantizer(width, config.vector_dim, 1)
            self.acoustic = ResidualQuantizer(width, config.vector_dim, NUM_CODEBOOKS - 1)
        self.to_empty(device=self.device)
        self.to(torch.float32)
        self.requires_grad_(False).eval()

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take ``(name, tensor)`` pairs of the codec checkpoint and return the names used.

        Names of the decoder half, of codebooks beyond the sixteenth and of the quantizers' output projections are
        passed over. Raises CheckpointError listing every missing, unknown or wrongly shaped encoder tensor.
        """
        return load(self, tensors)

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the checkpoint tensors that :meth:`load_weights` uses."""
        return EncoderSlots.of(self).shapes

    @torch.no_grad()
    def encode(self, audio: Tensor) -> Tensor:
        """Encode mono audio at 24 kHz, ``[L] float32`` in [-1, 1], to codes ``[ceil(L / 1920), 16] int64``.

        The result is on the encoder's device.
        """
        if audio.dim() != 1 or audio.shape[0] < 1:
            raise RequestError("ref_audio", f"expected mono audio [samples >= 1], got {list(audio.shape)}")
        features = self._features(audio.to(self.device, torch.float32))
        x = self.transformer(features.transpose(1, 2)).transpose(1, 2)
        frames = self.downsample(x)[0].T  # [frames, C]
        return torch.cat((self.semantic(frames), self.acoustic(frames)), -1)

    def encode_all(self, clips: Sequence[Tensor]) -> list[Tensor]:
        """Encode several clips, each exactly as alone."""
        return [self.encode(clip) for clip in clips]

    def _features(self, audio: Tensor) -> Tensor:
        """Run the convolutions ``[L]`` -> ``[1, C, ceil(L / 960)]`` in parts that overlap by what they look back."""
        step = self.config.samples_per_position
        overlap = -(-self.convolutions.past_samples // step) * step
        parts = []
        for first in range(0, audio.shape[0], SEGMENT_SAMPLES):
            start = max(0, first - overlap)
            part = self.convolutions(audio[None, None, start : first + SEGMENT_SAMPLES])
            parts.append(part[..., (first - start) // step :])
        return torch.cat(parts, -1)
