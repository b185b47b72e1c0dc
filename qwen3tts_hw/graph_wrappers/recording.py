"""A graph driver without a graph device: what a function does to tensors is recorded and done again.

For tests and debugging of captured code on any machine. Like a device graph, a replay runs none of the function's
Python, reads and writes the very tensors of the recording, and has all scalars baked in. Operations that would make the
host wait for the device, or build a tensor from host values, are refused, and so is every boolean mask as an index,
although some devices can capture a few such forms. Unlike a device graph, the recording itself executes, and
intermediate results keep their memory. Slower than eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qwen3tts_hw.errors import GraphCaptureError

# Operations whose result's shape or value must reach the host.
_REFUSED = (
    "item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim", "_unique2",
    "unique_consecutive", "bincount",
)  # fmt: skip
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")


@dataclass(slots=True)
class Operation:
    """One recorded call. ``results`` are its outputs that do not share memory with an input."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    results: tuple[tuple[int, torch.Tensor], ...]  # position among the outputs, tensor


@dataclass(slots=True)
class Recording:
    """A graph: operations in order. Holding their arguments keeps every tensor of the recording alive."""

    operations: list[Operation] = field(default_factory=list)


class RecordingDriver:
    """Record by intercepting every operation below autograd."""

    def __init__(self) -> None:
        self._capturing = False

    def new_pool(self) -> None:
        """Return nothing: memory comes from torch's usual allocator."""

    def new_graph(self) -> Recording:
        return Recording()

    @contextmanager
    def recording(self, graph: Recording, pool: None) -> Iterator[None]:
        self._capturing = True
        try:
            with _Recorder(graph.operations):
                yield
        finally:
            self._capturing = False

    def rehearsal(self) -> AbstractContextManager[bool]:
        return nullcontext(False)

    def replay(self, graph: Recording) -> None:
        with torch.inference_mode():
            for operation in graph.operations:
                outputs = tree_leaves(operation.function(*operation.args, **operation.kwargs))
                for position, result in operation.results:
                    result.copy_(outputs[position])

    def is_capturing(self) -> bool:
        return self._capturing


class _Recorder(TorchDispatchMode):
    """Execute each operation and append it to the list."""

    def __init__(self, operations: list[Operation]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._operations = operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        _check_capturable(func, args)
        if torch.is_inference_mode_enabled() and func.has_kernel_for_dispatch_key(
            torch._C.DispatchKey.CompositeImplicitAutograd
        ):  # inference mode does not take such operations apart by itself, which would hide what they are made of
            with self:
                return func.decompose(*args, **kwargs)
        outputs = func(*args, **kwargs)
        inputs = {_memory(leaf) for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)}
        results = tuple(
            (position, leaf)
            for position, leaf in enumerate(tree_leaves(outputs))
            if isinstance(leaf, torch.Tensor) and _memory(leaf) not in inputs
        )
        self._operations.append(Operation(func, args, kwargs, results))
        return outputs


def _check_capturable(func: Any, args: Sequence[Any]) -> None:
    name = func.overloadpacket.__name__
    if name in _REFUSED or (name == "repeat_interleave" and func._overloadname == "Tensor"):
        raise GraphCaptureError(f"the operation {func} cannot be captured: it makes the host wait for the device")
    if name == "lift_fresh" and args[0].dim() > 0:  # torch.tensor or a list index; a scalar may end as a fill
        raise GraphCaptureError(
            f"a tensor of shape {list(args[0].shape)} made from host values cannot be captured; make it beforehand"
        )
    if name in _INDEXING and any(
        isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_leaves(args[1])
    ):
        raise GraphCaptureError(
            f"the operation {func} cannot be captured: a boolean mask as an index has a result of unknown size; "
            f"use torch.where or masked_fill"
        )


def _memory(tensor: torch.Tensor) -> int:
    """Identity of the memory that a tensor lives in."""
    return int(tensor.untyped_storage()._cdata)
