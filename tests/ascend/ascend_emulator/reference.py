"""How a reference kernel is written down: a function of one :class:`Call` on CPU tensors, under the operator's name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

Kernel = Callable[["Call"], Any]


class RefusedError(RuntimeError):
    """What the device's documentation says it would refuse."""


def require(condition: bool, message: str) -> None:
    """Raise RefusedError unless the condition holds."""
    if not condition:
        raise RefusedError(f"[ascend emulator] {message}")


class Call(SimpleNamespace):
    """The arguments of one call by their names in the operator's schema, defaults filled in."""

    @classmethod
    def bind(cls, schema: torch.FunctionSchema, arguments: tuple[Any, ...], options: dict[str, Any]) -> Call:
        """Match what was passed with the schema."""
        values = {argument.name: argument.default_value for argument in schema.arguments}
        values |= {argument.name: value for argument, value in zip(schema.arguments, arguments, strict=False)}
        call = cls(**{**values, **options})
        call.schema = schema
        return call

    def uses_only(self, *names: str) -> None:
        """Raise RefusedError if an argument beside ``names`` differs from its default: nothing is ignored silently."""
        for argument in self.schema.arguments:
            value = getattr(self, argument.name)
            if argument.name not in names and value is not None:
                same = not torch.is_tensor(value) and value == argument.default_value
                require(same, f"{self.schema.name}: argument {argument.name} is not emulated")


class References:
    """Reference kernels of one operator namespace; :meth:`register` hands them to torch's dispatcher."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.kernels: dict[str, Kernel] = {}
        self._library: torch.library.Library | None = None

    def kernel(self, name: str) -> Callable[[Kernel], Kernel]:
        """Name the operator (with its overload) that the decorated function is the reference of."""

        def note(function: Kernel) -> Kernel:
            self.kernels[name] = function
            return function

        return note

    def register(self) -> None:
        """Register those whose operator exists in the installed version; the list of operators grows over versions."""
        self._library = torch.library.Library(self.namespace, "IMPL")
        known = schemas()
        for name, kernel in self.kernels.items():
            schema = known.get(f"{self.namespace}::{name}")
            if schema is not None:
                self._library.impl(name, _bound(kernel, schema), "CPU")


def _bound(kernel: Kernel, schema: torch.FunctionSchema) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        return kernel(Call.bind(schema, arguments, options))

    return run


def schemas() -> dict[str, torch.FunctionSchema]:
    """All operators known now, by full name: "npu::npu_rms_norm", with an overload "npu::x.out"."""
    found = torch._C._jit_get_all_schemas()
    return {f"{one.name}.{one.overload_name}" if one.overload_name else one.name: one for one in found}
