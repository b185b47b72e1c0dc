"""Ascend devices through torch_npu, which is imported only when this backend is looked for.

Float32 means float32 here: HF32, the counterpart of TF32, is on for convolutions by default and is switched off.
Weights can be packed: kept in FRACTAL_NZ, the layout that the matrix unit reads, instead of being converted in every
product. Follows the documentation of CANN's aclnnNpuFormatCast and aclnnMatmulWeightNz; not measured on hardware.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from qwen3tts_hw.backends.base import AcceleratorBackend, Backend, Capabilities, WeightLayout
from qwen3tts_hw.errors import UnsupportedError
from qwen3tts_hw.settings import variable

logger = logging.getLogger(__name__)

# Numbers of torch.npu.get_soc_version(), as vllm-ascend reads them, and what the families are sold as.
_FAMILIES = (
    (range(200, 206), "310P", "Atlas inference series, 310P"),
    (range(220, 226), "A2", "Atlas A2, 910B"),
    (range(250, 256), "A3", "Atlas A3, 910C"),
    (range(260, 261), "A5", "Atlas A5, 950"),
)
FRACTAL_NZ = 29  # aclFormat
_TILE = 16  # rows, and half-precision columns, of a tile of FRACTAL_NZ
_PACKS_HALVES = 2  # vllm-ascend's weight_nz_mode: 0 packs nothing, 1 quantised weights, 2 half-precision ones too


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
            packed_weights=True,
        )
        super().__init__(torch.device("npu", index), capabilities, torch_npu.npu)
        self._torch_npu = torch_npu
        self._private_formats = False
        self._packed = 0

    def prepare_process(self) -> None:
        # Compile-per-shape is the older default on some products and recompiles in the middle of serving.
        self._module.set_compile_mode(jit_compile=False)
        self._module.matmul.allow_hf32 = False
        self._module.conv.allow_hf32 = False
        # Whether tensors may take private layouts is one switch for the process. vllm-ascend turns it on for its own
        # weights. Without vllm-ascend it is turned off, so that no kernel converts a convolution's weights in every
        # call, and is on only while weights are packed: products look at the tensor, not at the switch.
        self._private_formats = "vllm_ascend" in sys.modules
        if not self._private_formats:
            self._module.config.allow_internal_format = False

    def prepare_weights(self, module: torch.nn.Module) -> None:
        if self.weight_layout != "packed":
            return
        weights = list(matrices(module))
        if weights and not any(packable(weight) for weight in weights):
            logger.warning("no weight of %s can be packed: they are %s", type(module).__name__, weights[0].dtype)
        with self._private_formats_allowed():
            for weight in weights:
                if packable(weight) and not self._is_packed(weight):
                    self._pack(weight)

    def _pack(self, weight: torch.Tensor) -> None:
        weight.data = self._torch_npu.npu_format_cast(weight.data, FRACTAL_NZ)
        if not self._is_packed(weight):
            raise UnsupportedError(
                f"torch_npu {self._torch_npu.__version__} did not bring a weight {list(weight.shape)} into FRACTAL_NZ; "
                f"set weight_layout to plain"
            )
        self._packed += 1

    def _is_packed(self, tensor: torch.Tensor) -> bool:
        return int(self._torch_npu.get_npu_format(tensor)) == FRACTAL_NZ

    def check_reload(self) -> None:
        if self._packed:
            raise UnsupportedError(
                "packed weights cannot be replaced: no part of one can be written, and captured graphs read them where "
                "they are; set weight_layout to plain"
            )

    @contextmanager
    def _private_formats_allowed(self) -> Iterator[None]:
        self._module.config.allow_internal_format = True
        try:
            yield
        finally:
            self._module.config.allow_internal_format = self._private_formats

    def _preferred_layout(self) -> tuple[WeightLayout, str]:
        mode = _vllm_ascend_nz_mode()
        if mode is None:
            return "plain", "not measured yet; under vllm-ascend its weight_nz_mode decides"
        return (
            "packed" if mode == _PACKS_HALVES else "plain",
            f"as vllm-ascend: its weight_nz_mode is {mode}, and {_PACKS_HALVES} packs half-precision weights",
        )

    def _priority_range(self) -> tuple[int, int]:
        # torch_npu refuses to tell it; its streams are made normal (0) or high (-1).
        return 0, -1

    def device_facts(self) -> dict[str, Any]:
        family = device_family(int(self._module.get_soc_version()))
        facts = {
            "device_name": self._module.get_device_name(self.device.index),
            "device_family": family,
            "torch_npu": str(self._torch_npu.__version__),
            "task_queue": task_queue(),
            "private_weight_layouts": self._private_formats,
            "packed_matrices": self._packed,
        }
        mismatch = wheel_mismatch(family, _vllm_ascend_family())
        return facts if mismatch is None else {**facts, "vllm_ascend_mismatch": mismatch}


def task_queue() -> str:
    """How torch_npu hands work to the device: "0", "1" (its default) or "2" of TASK_QUEUE_ENABLE, or "blocking"."""
    return "blocking" if variable("ASCEND_LAUNCH_BLOCKING") == "1" else variable("TASK_QUEUE_ENABLE") or "1"


def matrices(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The parameters of a module that it and its parts allow to be packed."""
    for part in module.modules():
        for name in getattr(part, "matrix_weights", ()):
            yield getattr(part, name)


def packable(weight: torch.Tensor) -> bool:
    """Whether a weight may be in FRACTAL_NZ: a contiguous matrix of half precision in whole tiles.

    Float32 is left out as vllm-ascend does, a side of 1 because the product refuses it. Other sizes would be padded.
    """
    halves = weight.dtype in (torch.float16, torch.bfloat16)
    return halves and weight.dim() == 2 and weight.is_contiguous() and all(size % _TILE == 0 for size in weight.shape)


def _vllm_ascend_nz_mode() -> int | None:
    """What vllm-ascend was told with VLLM_ASCEND_ENABLE_NZ or weight_nz_mode; None where it does not run."""
    module = sys.modules.get("vllm_ascend.ascend_config")
    try:
        return None if module is None else int(module.get_ascend_config().weight_nz_mode)
    except RuntimeError:  # imported, but not set up
        return None


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
