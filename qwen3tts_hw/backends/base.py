"""What a device family must offer: facts about it, streams, events, memory figures and process set-up.

Owns the :class:`Backend` contract and the part that accelerators share. Knows no device by name: an accelerator passes
the torch module that drives it. Callers branch on :class:`Capabilities`, never on :attr:`Backend.name`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch

from qwen3tts_hw.errors import UnsupportedError

StreamPriority = Literal["low", "normal", "high"]
WeightLayout = Literal["plain", "packed"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Facts about a device family.

    graphs: work can be captured once and replayed. compile: torch.compile makes kernels for it. stft: torch.stft runs
    on it. attention_op: the attention op chosen by "auto". graph_wrapper: the graph driver, "eager" if it has no
    graphs. async_copy: a copy to pinned memory returns before it is done, so an event must be awaited. predictor,
    codec: the forms of code predictor and codec decoder chosen by "auto". packed_weights: matrices that are only ever
    multiplied by can be kept in a layout of the device's own. early_launch: a kernel can start before its predecessor
    has ended, and wait for it when it has to (programmatic dependent launch).
    """

    graphs: bool
    compile: bool
    stft: bool
    attention_op: str
    graph_wrapper: str
    async_copy: bool
    predictor: str = "plain"
    codec: str = "plain"
    packed_weights: bool = False
    early_launch: bool = False


class Stream(Protocol):
    """A queue of device work."""

    def synchronize(self) -> None:
        """Block the host until everything queued so far is done."""

    def query(self) -> bool:
        """Whether everything queued so far is done."""

    def wait_stream(self, stream: Any) -> None:
        """Let later work of this stream wait for what ``stream`` has queued so far; the host does not wait."""


class Event(Protocol):
    """A mark in a stream. ``stream`` None means the current one."""

    def record(self, stream: Any = None) -> None:
        """Set the mark behind what the stream has queued so far."""

    def query(self) -> bool:
        """Whether the work before the mark is done."""

    def synchronize(self) -> None:
        """Block the host until the work before the mark is done."""

    def wait(self, stream: Any = None) -> None:
        """Let later work of the stream wait for the mark; the host does not wait."""


class Backend(ABC):
    """One device family in this process, bound to one device."""

    name: str
    default_dtype: torch.dtype

    def __init__(self, device: torch.device, capabilities: Capabilities) -> None:
        self.device = device
        self.capabilities = capabilities
        self.weight_layout: WeightLayout = "plain"
        kernels = f"the device has {'a' if capabilities.compile else 'no'} compiler for the fused kernels"
        graphs = f"the device has {'graphs' if capabilities.graphs else 'none'}"
        # Why the settings of these names, left at "auto", mean what they do here; for people to read.
        self.reasons = {"graphs": graphs, "predictor": kernels, "codec_kernels": kernels}

    @abstractmethod
    def prepare_process(self) -> None:
        """Set process-wide numerics and kernel choices; call once, before any weights are made."""

    def choose_weight_layout(self, asked: str = "auto") -> tuple[WeightLayout, str]:
        """Layout of weights from now on for the setting ``weight_layout``, and why; call before weights are prepared.

        Raises UnsupportedError for "packed" where the device has no such layout.
        """
        if asked == "packed" and not self.capabilities.packed_weights:
            raise UnsupportedError(
                f"packed weights were asked for, but the {self.name} backend has no layout of its own; "
                f"set weight_layout to auto or plain"
            )
        preferred, why = self._preferred_layout()
        self.weight_layout = preferred if asked == "auto" else cast(WeightLayout, asked)
        return self.weight_layout, why if asked == "auto" else "as asked for"

    def _preferred_layout(self) -> tuple[WeightLayout, str]:
        return "plain", "the device has no other"

    @abstractmethod
    def prepare_weights(self, module: torch.nn.Module) -> None:
        """Bring loaded weights into the chosen layout, in place; what is in it already stays as it is.

        A module names the parameters that may be packed in ``matrix_weights``: those that are nothing but the right
        operand of products, neither looked up nor sliced.
        """

    def check_reload(self) -> None:  # noqa: B027  most devices have nothing to object
        """Raise UnsupportedError if other weights can no longer be loaded into modules whose weights are prepared."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until all queued work of the device is done."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory of the device that nobody holds, in bytes."""

    @abstractmethod
    def total_bytes(self) -> int:
        """Memory of the device, in bytes."""

    @abstractmethod
    def new_stream(self, *, priority: StreamPriority = "normal") -> Stream:
        """Make a stream. Where a device has no level below normal, "low" is normal: raise the other streams instead."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream that work of this thread goes to."""

    @abstractmethod
    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Send the work of the block to ``stream``. Orders nothing: use events or ``wait_stream``."""

    @abstractmethod
    def new_event(self) -> Event:
        """Make an event; ``synchronize`` on it sleeps rather than spins."""

    @abstractmethod
    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialised host tensor that the device can copy to and from asynchronously."""

    @abstractmethod
    def device_facts(self) -> dict[str, Any]:
        """Name of the device and versions of what drives it, as plain values."""

    def keeping_kernels(self, folder: str) -> AbstractContextManager[None]:
        """Keep kernels that the block compiles in ``folder`` for the next start; nothing where none are compiled."""
        return nullcontext()

    def describe(self) -> dict[str, Any]:
        """The device and everything chosen by it, as plain values for logs, health reports and benchmark results."""
        return {
            "backend": self.name,
            "device": str(self.device),
            "default_dtype": str(self.default_dtype).removeprefix("torch."),
            "total_bytes": self.total_bytes(),
            "free_bytes": self.free_bytes(),
            "torch": str(torch.__version__),  # a TorchVersion, which message encoders refuse
            "capabilities": dataclasses.asdict(self.capabilities),
            "weight_layout": self.weight_layout,
            **self.device_facts(),
        }


class AcceleratorBackend(Backend):
    """The part that devices with streams share: they offer one interface under different torch modules."""

    default_dtype = torch.bfloat16

    def __init__(self, device: torch.device, capabilities: Capabilities, module: Any) -> None:
        super().__init__(device, capabilities)
        self._module = module

    def prepare_weights(self, module: torch.nn.Module) -> None:
        """Change nothing: the kernels take the weights as they are."""

    def synchronize(self) -> None:
        self._module.synchronize(self.device)

    def free_bytes(self) -> int:
        return int(self._module.mem_get_info(self.device)[0])

    def total_bytes(self) -> int:
        return int(self._module.mem_get_info(self.device)[1])

    def new_stream(self, *, priority: StreamPriority = "normal") -> Stream:
        lowest, highest = self._priority_range()
        level = {"low": lowest, "normal": 0, "high": highest}[priority]
        return cast(Stream, self._module.Stream(device=self.device, priority=level))

    def current_stream(self) -> Stream:
        return cast(Stream, self._module.current_stream(self.device))

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        return cast("AbstractContextManager[object]", self._module.stream(stream))

    def new_event(self) -> Event:
        return cast(Event, self._module.Event(blocking=True))

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def _priority_range(self) -> tuple[int, int]:
        """Lowest and highest priority of a stream; a smaller number is more urgent."""
        lowest, highest = self._module.Stream.priority_range()
        return int(lowest), int(highest)
