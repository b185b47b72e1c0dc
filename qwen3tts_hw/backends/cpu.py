"""The host processor as a device: everything is done when the call returns.

Streams and events exist so that callers have one code path; they never have anything to wait for.
"""

from __future__ import annotations

import os
import platform
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from qwen3tts_hw.backends.base import Backend, Capabilities, Event, Stream, StreamPriority
from qwen3tts_hw.errors import UnsupportedError

_MEMINFO = Path("/proc/meminfo")


class ImmediateStream:
    """A stream whose work is always done."""

    def synchronize(self) -> None:
        """Return: there is nothing to wait for."""

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Any) -> None:
        """Return: the other stream's work is done."""


class ImmediateEvent:
    """An event that has happened as soon as it is recorded, and also when it never was, as on a device."""

    def record(self, stream: Any = None) -> None:
        """Return: the work before the mark is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return: there is nothing to wait for."""

    def wait(self, stream: Any = None) -> None:
        """Return: the work before the mark is done."""


class CpuBackend(Backend):
    """Run on the host processor, in float32."""

    name = "cpu"
    default_dtype = torch.float32

    def __init__(self) -> None:
        capabilities = Capabilities(
            graphs=False, compile=False, stft=True, attention_op="sdpa", graph_wrapper="eager", async_copy=False
        )
        super().__init__(torch.device("cpu"), capabilities)
        self._stream = ImmediateStream()

    def prepare_process(self) -> None:
        """Change nothing: float32 is exact by default and the thread count is the caller's choice."""

    def prepare_weights(self, module: torch.nn.Module) -> None:
        """Change nothing: the kernels take the weights as they are."""

    def synchronize(self) -> None:
        """Return: there is nothing to wait for."""

    def free_bytes(self) -> int:
        return _meminfo_bytes("MemAvailable") or self.total_bytes()

    def total_bytes(self) -> int:
        return _meminfo_bytes("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def new_stream(self, *, priority: StreamPriority = "normal") -> Stream:
        return ImmediateStream()

    def current_stream(self) -> Stream:
        return self._stream

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def new_event(self) -> Event:
        return ImmediateEvent()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def device_facts(self) -> dict[str, Any]:
        return {"device_name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}


def create(index: int | None) -> Backend:
    """Make the backend; there is one host, so an index other than 0 raises UnsupportedError."""
    if index:
        raise UnsupportedError(f"the cpu backend has one device, but device index {index} was asked for")
    return CpuBackend()


def _meminfo_bytes(key: str) -> int | None:
    """A figure of the kernel's memory table in bytes, None where there is no such table."""
    if not _MEMINFO.exists():
        return None
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return None
