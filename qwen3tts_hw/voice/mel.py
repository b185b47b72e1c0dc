"""The mel spectrogram that the speaker encoder listens to: 128 bands of 24 kHz audio, every 256 samples.

Everything is computed in code, in float32, from the definitions (Slaney's mel scale and area normalisation, a periodic
Hann window). A device without a Fourier transform gets the same by a matrix product.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from qwen3tts_hw.types import SAMPLE_RATE_HZ

FFT_SAMPLES = 1_024
HOP_SAMPLES = 256
EDGE_SAMPLES = (FFT_SAMPLES - HOP_SAMPLES) // 2  # reflected on both sides
HIGHEST_HZ = SAMPLE_RATE_HZ / 2
MAGNITUDE_FLOOR = 1e-9  # added to the squared magnitude
MEL_FLOOR = 1e-5
_BINS = FFT_SAMPLES // 2 + 1
# Slaney's scale is linear up to 1 kHz, 15 mel, and logarithmic from there on, 27 mel per factor of 6.4.
_LINEAR_HZ_PER_MEL = 200.0 / 3.0
_CORNER_HZ, _CORNER_MEL = 1_000.0, 15.0
_LOG_STEP = math.log(6.4) / 27.0


def mel_filter_bank(bands: int) -> NDArray[np.float32]:
    """Triangular filters of equal area, ``[bands, 513]``, from 0 to 12,000 Hz."""
    corners = _hz_of(np.linspace(0.0, _mel_of(HIGHEST_HZ), bands + 2))
    frequencies = np.linspace(0.0, HIGHEST_HZ, _BINS)
    distance = corners[:, None] - frequencies  # [bands + 2, 513]
    width = np.diff(corners)[:, None]
    rising, falling = -distance[:-2] / width[:-1], distance[2:] / width[1:]
    triangles = np.maximum(0.0, np.minimum(rising, falling)).astype(np.float32)
    bank: NDArray[np.float32] = (triangles * (2.0 / (corners[2:] - corners[:-2]))[:, None]).astype(np.float32)
    return bank


def _mel_of(hz: float) -> float:
    if hz < _CORNER_HZ:
        return hz / _LINEAR_HZ_PER_MEL
    return _CORNER_MEL + math.log(hz / _CORNER_HZ) / _LOG_STEP


def _hz_of(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    linear = mel * _LINEAR_HZ_PER_MEL
    logarithmic = _CORNER_HZ * np.exp(_LOG_STEP * (mel - _CORNER_MEL))
    return np.where(mel < _CORNER_MEL, linear, logarithmic)


def hann_window() -> NDArray[np.float64]:
    """The periodic Hann window ``[1024]``."""
    window: NDArray[np.float64] = 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(FFT_SAMPLES) / FFT_SAMPLES)
    return window


def fourier_matrix() -> NDArray[np.float32]:
    """Windowed cosines, then windowed sines: ``[1024, 2 * 513]``; a product with it is a Fourier transform."""
    # Reducing the product of the two counters first keeps the angles small, so their cosines exact.
    turns = np.outer(np.arange(FFT_SAMPLES), np.arange(_BINS)) % FFT_SAMPLES
    angles = 2.0 * np.pi * turns / FFT_SAMPLES
    basis = np.concatenate([np.cos(angles), -np.sin(angles)], axis=1)
    matrix: NDArray[np.float32] = (hann_window()[:, None] * basis).astype(np.float32)
    return matrix


class MelSpectrogram(nn.Module):
    """Audio ``[L] float32`` to log-mel frames ``[bands, floor(L / 256)]``; L must be above 384.

    ``stft`` says whether the device has ``torch.stft``; both ways differ by rounding alone.
    """

    bank: Tensor
    window: Tensor
    matrix: Tensor

    def __init__(self, bands: int, device: torch.device | str, *, stft: bool) -> None:
        super().__init__()
        self.stft = stft
        self.register_buffer("bank", torch.from_numpy(mel_filter_bank(bands)).to(device))
        if stft:
            self.register_buffer("window", torch.from_numpy(hann_window()).to(device, torch.float32))
        else:
            self.register_buffer("matrix", torch.from_numpy(fourier_matrix()).to(device))

    def forward(self, audio: Tensor) -> Tensor:
        edge = (EDGE_SAMPLES, EDGE_SAMPLES)
        padded = functional.pad(audio[None, None], edge, mode="reflect")[0, 0]
        squared = self._transform(padded) if self.stft else self._multiply(padded)
        magnitude = torch.sqrt(squared + MAGNITUDE_FLOOR)
        return torch.log(torch.clamp(self.bank @ magnitude, min=MEL_FLOOR))

    def _transform(self, padded: Tensor) -> Tensor:
        """Squared magnitudes ``[513, frames]`` by the device's Fourier transform."""
        spectrum = torch.stft(padded, FFT_SAMPLES, HOP_SAMPLES, window=self.window, center=False, return_complex=True)
        return torch.view_as_real(spectrum).square().sum(-1)

    def _multiply(self, padded: Tensor) -> Tensor:
        """Squared magnitudes ``[513, frames]`` by a matrix product."""
        parts = padded.unfold(0, FFT_SAMPLES, HOP_SAMPLES) @ self.matrix  # [frames, 2 * 513]
        return parts.square().view(-1, 2, _BINS).sum(1).T
