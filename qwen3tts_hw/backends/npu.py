"""Ascend devices through torch_npu, which is imported only when this backend is looked for.

Float32 means float32 here: HF32, the counterpart of TF32, is on for convolutions by default and is switched off.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from qwen3tts_hw.backends.base import AcceleratorBackend, Backend, Capabilities
from qwen3tts_hw.errors import UnsupportedError

# Numbers of torch.npu.get_soc_version(), as vllm-ascend reads them, and what the families are sold as.
_FAMILIES = (
    (range(200, 206), "310P", "Atlas inference series, 310P"),
    (range(220, 226), "A2", "Atlas A2, 910B"),
    (range(250, 256), "A3", "Atlas A3, 910C"),
    (range(260, 261), "A5", "Atlas A5, 950"),
)


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
        self._private_formats = False

    def prepare_process(self) -> None:
        # Compile-per-shape is the older default on some products and recompiles in the middle of serving.
        self._module.set_compile_mode(jit_compile=False)
        self._module.matmul.allow_hf32 = False
        self._module.conv.allow_hf32 = False
        # Whether tensors may take private layouts is one switch for the process. vllm-ascend turns it on for its own
        # weights and by default packs quantised ones only; ours stay plain, as its half-precision ones do. Without
        # vllm-ascend the switch is turned off, so that no kernel converts a convolution's weights in every call.
        self._private_formats = "vllm_ascend" in sys.modules
        if not self._private_formats:
            self._module.config.allow_internal_format = False

    def _priority_range(self) -> tuple[int, int]:
        # torch_npu refuses to tell it; its streams are made normal (0) or high (-1).
        return 0, -1

    def device_facts(self) -> dict[str, Any]:
        family = device_family(int(self._module.get_soc_version()))
        facts = {
            "device_name": self._module.get_device_name(self.device.index),
            "device_family": family,
            "torch_npu": self._version,
            "private_weight_layouts": self._private_formats,
        }
        mismatch = wheel_mismatch(family, _vllm_ascend_family())
        return facts if mismatch is None else {**facts, "vllm_ascend_mismatch": mismatch}


def device_family(soc_version: int) -> str:
    """Name the family behind torch_npu's number of a chip, such as "A2 (Atlas A2, 910B)"."""
    for numbers, short, full in _FAMILIES:
        if soc_version in numbers:
            return f"{short} ({full})"
    return f"unknown (SoC version {soc_version})"


def wheel_mismatch(family: str, built_for: str | None) -> str | None:
    """Say what is wrong if vllm-ascend was built for another family than the device is of; None if nothing is."""
    if built_for is None or family.startswith(("unknown", built_for)):
        return None
    return (
        f"the device is {family}, but the installed vllm-ascend was built for {built_for} and its worker will refuse "
        f"to start; the wheels on PyPI are for A2: on other devices use vllm-ascend's image for them, or build it there"
    )


def _vllm_ascend_family() -> str | None:
    """The family named in vllm-ascend's build record, which is read without importing the package; None without one."""
    spec = importlib.util.find_spec("vllm_ascend")
    if spec is None or spec.origin is None:
        return None
    record = Path(spec.origin).with_name("_build_info.py")
    found = re.search(r"__device_type__\s*=\s*['\"]_?(\w+)", record.read_text("utf-8")) if record.exists() else None
    return found.group(1) if found else None


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
