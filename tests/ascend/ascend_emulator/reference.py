"""How a reference kernel is written down: a plain function on CPU tensors under the operator's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


class References:
    """Reference kernels of one operator namespace; :meth:`register` hands them to torch's dispatcher."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.functions: dict[str, Callable[..., Any]] = {}
        self._library: torch.library.Library | None = None

    def kernel(self, name: str) -> Callable[[Function], Function]:
        """Name the operator (with its overload) that the decorated function is the reference of."""

        def note(function: Function) -> Function:
            self.functions[name] = function
            return function

        return note

    def register(self) -> None:
        """Register those whose operator exists in the installed version; the list of operators grows over versions."""
        self._library = torch.library.Library(self.namespace, "IMPL")
        known = _schemas()  # read now: libraries add operators when they are imported
        for name, function in self.functions.items():
            if f"{self.namespace}::{name}" in known:
                self._library.impl(name, function, "CPU")


def exists(name: str) -> bool:
    """Whether an operator of that full name is known to the dispatcher."""
    return name in _schemas()


def schema_of(name: str) -> torch.FunctionSchema:
    """The schema of an operator, "npu::npu_rms_norm" or with an overload "npu::x.out"."""
    return _schemas()[name]


def _schemas() -> dict[str, torch.FunctionSchema]:
    return {_full(schema): schema for schema in torch._C._jit_get_all_schemas()}


def _full(schema: torch.FunctionSchema) -> str:
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


class Refused(RuntimeError):
    """What the device's documentation says it would refuse."""


def require(condition: bool, message: str) -> None:
    """Raise Refused unless the condition holds."""
    if not condition:
        raise Refused(f"[ascend emulator] {message}")
