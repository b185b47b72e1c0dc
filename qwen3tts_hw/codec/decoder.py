"""CodecDecoder: codes ``[B, 16, T]`` to 24 kHz audio, in one pass or exactly the same frame by frame.

A stream decoded in chunks of any sizes equals the one-pass decode of its frames up to float32 rounding, because
every layer keeps what it has seen (:class:`~qwen3tts_hw.codec.state.CodecState`); there is no context to decode again
and no look-ahead. What is written here is the reference; a fast form of kernels may stand in for its streaming step.
Does not decide when to decode which frames.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from qwen3tts_hw.codec.export import codec_weights
from qwen3tts_hw.codec.layers import (
    CausalConv,
    CausalUpsample,
    CodebookSum,
    ConvNeXtBlock,
    DecoderBlock,
    SnakeBeta,
    wide,
)
from qwen3tts_hw.codec.state import CodecState, StateLayout, StateRows
from qwen3tts_hw.codec.transformer import CodecTransformer
from qwen3tts_hw.codec.weights import DecoderSlots, load
from qwen3tts_hw.codec_kernels.base import FastDecoder, FastForm, StreamState
from qwen3tts_hw.config import CodecDecoderConfig
from qwen3tts_hw.errors import RequestError
from qwen3tts_hw.types import NUM_CODEBOOKS

PRE_CONV_KERNEL = 3


class CodecDecoder(nn.Module):
    """The decoder half of the 12 Hz codec.

    ``dtype`` is that of matrix and convolution weights, activations and state. Codebook tables, norms, scales, rotary
    angles, sines and softmax are float32 in any case. Weights are undefined until :meth:`load_weights`.
    """

    def __init__(self, config: CodecDecoderConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        self._layout = StateLayout()
        self._fast: FastDecoder | None = None
        self.form = "plain"
        self.loaded = 0  # how often weights were loaded; states made with others mean nothing
        with torch.device("meta"):
            self._build(config, self._layout)
        self.to(torch.float32)  # modules are made in torch's default dtype, which an engine may have changed
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv1d):
                module.to(dtype)
        self.to_empty(device=self.device)
        self.requires_grad_(False).eval()

    def _build(self, config: CodecDecoderConfig, layout: StateLayout) -> None:
        channels = [config.decoder_dim >> level for level in range(len(config.upsample_rates) + 1)]
        self.codebooks = CodebookSum(config.codebook_dim)
        self.pre_conv = CausalConv(layout, config.codebook_dim, config.latent_dim, kernel=PRE_CONV_KERNEL)
        self.transformer = CodecTransformer(layout, config)
        self.upsamples = nn.ModuleList(
            CausalUpsample(layout, config.latent_dim, config.latent_dim, stride=ratio, taps=1)
            for ratio in config.upsampling_ratios
        )
        self.upsample_blocks = nn.ModuleList(ConvNeXtBlock(layout, config.latent_dim) for _ in config.upsampling_ratios)
        self.entry = CausalConv(layout, config.latent_dim, channels[0])
        self.blocks = nn.ModuleList(
            DecoderBlock(layout, width, stride=rate)
            for width, rate in zip(channels[:-1], config.upsample_rates, strict=True)
        )
        self.exit_activation = SnakeBeta(channels[-1])
        self.exit = CausalConv(layout, channels[-1], 1)

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take ``(name, tensor)`` pairs of the codec checkpoint and return the names used.

        Names of the encoder half and the decoder's unused input projections are passed over. Raises CheckpointError
        listing every missing, unknown or wrongly shaped decoder tensor.
        """
        self.loaded += 1
        return load(self, tensors)

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the checkpoint tensors that :meth:`load_weights` uses."""
        return DecoderSlots.of(self).shapes

    @torch.no_grad()
    def use(self, form: FastForm) -> None:
        """Stream through a fast form from now on; call once the weights are loaded, again after they change."""
        self._fast = form.build(codec_weights(self))
        self.form = f"{form.name} {form.precision}"

    @property
    def is_fast(self) -> bool:
        """Whether a fast form is in use."""
        return self._fast is not None

    def new_state(self, slots: int) -> StreamState:
        """Allocate the state of ``slots`` streams, all at their start; it fits the form in use."""
        return self._plain_state(slots) if self._fast is None else self._fast.new_state(slots)

    def decode(self, codes: Tensor) -> Tensor:
        """Decode whole sequences ``[B, 16, T] int64`` to ``[B, T * 1920] float32`` in [-1, 1]; keep no state.

        Always the plain form.
        """
        _check(codes)
        rows = torch.arange(codes.shape[0], device=self.device)
        return self._plain_step(codes, self._plain_state(codes.shape[0]), rows)

    @torch.no_grad()
    def decode_step(self, codes: Tensor, state: StreamState, slots: Tensor) -> Tensor:
        """Decode the next F frames of R streams: codes ``[R, 16, F] int64`` -> ``[R, F * 1920] float32`` in [-1, 1].

        Row ``r`` continues the stream in ``slots[r]`` ``[R] int64``, whose state is updated in place; a slot may repeat
        only for padding rows. Negative codes count as 0, too large ones as 2047. Never waits for the device.
        """
        _check(codes)
        if self._fast is not None:
            return self._fast.step(codes, state, slots)
        assert isinstance(state, CodecState)
        return self._plain_step(codes, state, slots)

    def _plain_state(self, slots: int) -> CodecState:
        return CodecState(self._layout.shapes, slots, device=self.device, dtype=self.dtype)

    @torch.no_grad()
    def _plain_step(self, codes: Tensor, state: CodecState, slots: Tensor) -> Tensor:
        rows = StateRows(state, slots)
        x = self.pre_conv(self.codebooks(codes).to(self.dtype), rows)
        x = self.transformer(x.transpose(1, 2), rows).transpose(1, 2)
        for upsample, block in zip(self.upsamples, self.upsample_blocks, strict=True):
            x = block(upsample(x, rows), rows)
        x = self.entry(x, rows)
        for block in self.blocks:
            x = block(x, rows)
        x = self.exit(self.exit_activation(x), rows)
        rows.advance(codes.shape[2])
        samples: Tensor = x.squeeze(1).to(wide(self.dtype)).clamp(-1.0, 1.0)
        return samples


def _check(codes: Tensor) -> None:
    """Refuse codes that are not ``[rows, 16, frames]``; the common mistake is ``[rows, frames, 16]``."""
    if codes.dim() != 3 or codes.shape[1] != NUM_CODEBOOKS or codes.shape[2] < 1:
        raise RequestError(
            "codes", f"expected codes [rows, {NUM_CODEBOOKS} codebooks, frames >= 1], got {list(codes.shape)}"
        )
