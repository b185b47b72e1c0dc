"""Loaded by every Python process of a test bed: switches the Ascend emulator on as soon as torch_npu is imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def _torch_npu(module: ModuleType) -> None:
    from ascend_emulator import activate

    activate.after_torch_npu()


def _vllm_ascend_operators(module: ModuleType) -> None:
    from ascend_emulator import activate

    activate.after_vllm_ascend_operators()


def _triton(module: ModuleType) -> None:
    from ascend_emulator import triton_kernels

    triton_kernels.replace_placeholder(module)


_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "torch_npu": _torch_npu,
    "vllm_ascend.vllm_ascend_C": _vllm_ascend_operators,
    "vllm.triton_utils.importing": _triton,
}


class _Loader(importlib.abc.Loader):
    """The module's own loader, followed by what is to happen after the import."""

    def __init__(self, loader: importlib.abc.Loader, name: str) -> None:
        self._loader, self._name = loader, name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _AFTER[self._name](module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the table the usual way and changes their loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, name)
        return spec


if os.environ.get("ASCEND_EMULATOR_LIBRARIES"):
    sys.meta_path.insert(0, _Finder())
