"""Runs vLLM's Model Runner V2 on a CPU, for tests: found by every Python process that has this folder on its path.

V2 needs Triton. Its kernels run here in Triton's interpreter, which vLLM accepts once Triton lists an active backend
for the CPU; the interpreter compiles nothing, so the backend is a name only. Slow (tens of ms per step), but the same
runner as on an NVIDIA device.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import triton.backends
from triton.backends.compiler import GPUTarget


class CpuDriver:
    """What Triton asks of an active driver."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        import torch

        return torch.cpu


triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=CpuDriver)
