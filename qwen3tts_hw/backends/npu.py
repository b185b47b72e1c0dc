"""Ascend devices through torch_npu, which is imported only when this backend is looked for.

Float32 means float32 here: HF32, the counterpart of TF32, is on for convolutions by default and is switched off.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

import torch

from qwen3tts_hw.backends.base import AcceleratorBackend, Backend, Capabilities
from qwen3tts_hw.errors import UnsupportedError


class NpuBackend(AcceleratorBackend):
    """One Ascend device; bfloat16 by default. ``torch_npu`` is the imported module."""

    name = "npu"

    def __init__(self, torch_npu: ModuleType, index: int) -> None:
        capabilities = Capabilities(
            graphs=True,
            compile=False,
            stft=True,
            # The form of the fused kernel that may be captured; the plain form is documented as eager only.
            attention_op="npu_fusion_v3",
            graph_wrapper="npu",
            async_copy=True,
        )
        super().__init__(torch.device("npu", index), capabilities, torch_npu.npu)
        self._version = str(torch_npu.__version__)

    def prepare_process(self) -> None:
        # Compile-per-shape is the older default on some products and recompiles in the middle of serving.
        self._module.set_compile_mode(jit_compile=False)
        self._module.matmul.allow_hf32 = False
        self._module.conv.allow_hf32 = False

    def _priority_range(self) -> tuple[int, int]:
        # torch_npu refuses to tell it; its streams are made normal (0) or high (-1).
        return 0, -1

    def device_facts(self) -> dict[str, Any]:
        return {"device_name": self._module.get_device_name(self.device.index), "torch_npu": self._version}


def missing() -> str | None:
    """Why no such device can be used here; None if one can."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    try:
        torch_npu = _import()
    except (ImportError, OSError) as error:  # a wheel without the CANN libraries fails to load
        return f"torch_npu cannot be imported: {error}"
    if not torch_npu.npu.is_available():
        return f"torch_npu {torch_npu.__version__} sees no Ascend device or driver"
    return None


def create(index: int | None) -> Backend:
    """Make the backend for a device, by default the current one; raises UnsupportedError if there is none."""
    reason = missing()
    if reason is not None:
        raise UnsupportedError(f"the npu backend was asked for, but {reason}")
    torch_npu = _import()
    count = torch_npu.npu.device_count()
    index = torch_npu.npu.current_device() if index is None else index
    if index >= count:
        raise UnsupportedError(f"device npu:{index} was asked for, but there are {count} Ascend devices")
    return NpuBackend(torch_npu, index)


def _import() -> ModuleType:
    return importlib.import_module("torch_npu")
