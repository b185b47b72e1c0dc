"""Copies between host and device that do not make the host wait where the device can copy by itself."""

from __future__ import annotations

from torch import Tensor

from qwen3tts_hw.backends import Backend


def to_device(backend: Backend, tensor: Tensor) -> Tensor:
    """Start copying a host tensor to the device; the source may be reused at once."""
    if not backend.capabilities.async_copy:
        return tensor.to(backend.device)
    staged = backend.pinned(tuple(tensor.shape), tensor.dtype).copy_(tensor)
    return staged.to(backend.device, non_blocking=True)


def to_host(backend: Backend, tensor: Tensor) -> Tensor:
    """Start copying a device tensor to the host; valid once an event recorded after this call has happened."""
    return backend.pinned(tuple(tensor.shape), tensor.dtype).copy_(tensor, non_blocking=backend.capabilities.async_copy)
