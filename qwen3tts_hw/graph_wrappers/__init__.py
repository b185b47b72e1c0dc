"""Ways to call a function of static shapes; :func:`create` is the only place where one is chosen.

A driver is imported when it is asked for, so that nothing here needs a platform's software.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from qwen3tts_hw.backends import Backend
from qwen3tts_hw.backends.base import StreamPriority
from qwen3tts_hw.errors import UnsupportedError
from qwen3tts_hw.graph_wrappers.base import GraphWrapper, GraphWrapperFactory, InputSpec, RowFunction
from qwen3tts_hw.graph_wrappers.device_graph import DeviceGraphWrapper, GraphDriver
from qwen3tts_hw.graph_wrappers.eager import EagerWrapper
from qwen3tts_hw.registry import Registry

__all__ = [
    "GRAPH_DRIVERS",
    "DeviceGraphWrapper",
    "EagerWrapper",
    "GraphDriver",
    "GraphWrapper",
    "GraphWrapperFactory",
    "InputSpec",
    "RowFunction",
    "create",
]

AnyDriver = GraphDriver[Any, Any]  # graph and pool are the driver's own; nobody else looks into them


def _cuda(backend: Backend, priority: StreamPriority) -> AnyDriver:
    from qwen3tts_hw.graph_wrappers.cuda import CudaGraphDriver

    return CudaGraphDriver(backend.device, urgent=priority == "high")


def _npu(backend: Backend, priority: StreamPriority) -> AnyDriver:
    from qwen3tts_hw.graph_wrappers.npu import NpuGraphDriver

    return NpuGraphDriver(backend.device)


def _recording(backend: Backend, priority: StreamPriority) -> AnyDriver:
    from qwen3tts_hw.graph_wrappers.recording import RecordingDriver

    return RecordingDriver()


GRAPH_DRIVERS: Registry[Callable[[Backend, StreamPriority], AnyDriver]] = Registry("graph driver")
GRAPH_DRIVERS.register("cuda", _cuda)
GRAPH_DRIVERS.register("npu", _npu)
GRAPH_DRIVERS.register("recording", _recording)


def create(mode: str, backend: Backend, *, priority: StreamPriority = "normal") -> GraphWrapperFactory:
    """Return the factory of wrappers for the setting ``graphs``: "auto", "on", "off" or "recording".

    ``priority`` is that of the captured work, where a device's graphs keep one. All wrappers of one factory share its
    driver. Raises UnsupportedError for "on" where the device has no graphs, and for an unknown mode.
    """
    if mode not in ("auto", "on", "off", "recording"):
        raise UnsupportedError(f"unknown graph mode {mode!r}; supported: auto, on, off, recording")
    if mode == "on" and not backend.capabilities.graphs:
        raise UnsupportedError(f"graphs are on, but the {backend.name} backend has none; set graphs to auto or off")
    if mode == "off" or (mode == "auto" and not backend.capabilities.graphs):
        return EagerWrapper
    driver = GRAPH_DRIVERS.get("recording" if mode == "recording" else backend.capabilities.graph_wrapper)(
        backend, priority
    )

    def wrap(
        function: RowFunction, *, buckets: Sequence[int], inputs: Sequence[InputSpec], name: str
    ) -> DeviceGraphWrapper[Any, Any]:
        return DeviceGraphWrapper(function, driver, buckets=buckets, inputs=inputs, device=backend.device, name=name)

    return wrap
