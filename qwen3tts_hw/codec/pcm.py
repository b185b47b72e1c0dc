"""Conversion of decoded samples to the 16-bit form that is sent."""

from __future__ import annotations

import torch
from torch import Tensor

PCM16_PEAK = 32_767


def to_pcm16(samples: Tensor) -> Tensor:
    """Return float samples in [-1, 1] as int16 of the same shape, on the same device.

    Scales by 32,767, so +1 and -1 are symmetric, and rounds half to even. Larger values saturate; NaN becomes silence.
    """
    scaled = torch.nan_to_num(samples.float(), nan=0.0).clamp(-1.0, 1.0) * PCM16_PEAK
    return scaled.round().to(torch.int16)
