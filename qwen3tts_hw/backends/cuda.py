"""NVIDIA devices through torch.cuda: graphs, streams with priorities, Triton where it is installed.

Float32 means float32 here: TF32 is switched off for the process, because the codec's float32 bounds are stated without.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from typing import Any

import torch

from qwen3tts_hw.backends.base import AcceleratorBackend, Backend, Capabilities
from qwen3tts_hw.backends.kernels import keeping
from qwen3tts_hw.errors import UnsupportedError

FAST_MEMORY_BYTES = 212_992  # of a multiprocessor, for the fused kernels' tiles: Hopper and Blackwell servers have it

EARLY_LAUNCH_SINCE = (9, 0)  # compute capability: Hopper


class CudaBackend(AcceleratorBackend):
    """One NVIDIA device; bfloat16 by default."""

    name = "cuda"

    def __init__(self, index: int) -> None:
        has_triton = importlib.util.find_spec("triton") is not None
        fast_bytes = _fast_memory_bytes(index)
        fuses = has_triton and fast_bytes >= FAST_MEMORY_BYTES
        capabilities = Capabilities(
            graphs=True,
            compile=has_triton,
            stft=True,
            attention_op="sdpa",
            graph_wrapper="cuda",
            async_copy=True,
            predictor="fused" if fuses else "compiled" if has_triton else "plain",
            codec="fused" if fuses else "plain",
            early_launch=torch.cuda.get_device_capability(index) >= EARLY_LAUNCH_SINCE,
        )
        super().__init__(torch.device("cuda", index), capabilities, torch.cuda)
        if not has_triton:
            self.reasons.update(dict.fromkeys(("predictor", "codec_kernels"), "Triton is not installed"))
        elif not fuses:
            reason = (
                f"a multiprocessor has {fast_bytes} bytes of fast memory, the fused kernels need {FAST_MEMORY_BYTES}"
            )
            self.reasons.update(dict.fromkeys(("predictor", "codec_kernels"), reason))

    def prepare_process(self) -> None:
        # The older pair of switches sets every newer per-operator switch consistently; the reverse does not hold.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        _multiply_exactly_in_triton()

    def keeping_kernels(self, folder: str) -> AbstractContextManager[None]:
        return keeping(folder)

    def device_facts(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "device_name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "tf32": torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32,
        }


def _fast_memory_bytes(index: int) -> int:
    """Shared memory that one block of threads can have; 0 if torch does not say."""
    return int(getattr(torch.cuda.get_device_properties(index), "shared_memory_per_block_optin", 0))


def missing() -> str | None:
    """Why no such device can be used here; None if one can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no CUDA device or driver"
    return None


def _multiply_exactly_in_triton() -> None:
    """Keep float32 products of Triton kernels, such as vLLM's attention, from being rounded to TF32.

    With TF32 one of ten golden cases differed in a code when served in float32 on an H200; without it none did.
    Products of 16-bit values are not concerned, nor kernels that name their precision.
    """
    try:
        from triton import knobs
    except ImportError:  # no Triton, no Triton kernels
        return
    knobs.language.fp32_default = "ieee"


def create(index: int | None) -> Backend:
    """Make the backend for a device, by default the current one; raises UnsupportedError if there is none."""
    reason = missing()
    if reason is not None:
        raise UnsupportedError(f"the cuda backend was asked for, but {reason}")
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if index is None else index
    if index >= count:
        raise UnsupportedError(f"device cuda:{index} was asked for, but there are {count} CUDA devices")
    return CudaBackend(index)
