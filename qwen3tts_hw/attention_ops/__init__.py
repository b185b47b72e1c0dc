"""Attention implementations behind one interface; :func:`create` is the only place where one is chosen by name.

An implementation that needs a platform's software is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable

from qwen3tts_hw.attention_ops.base import AttentionOp, check_lengths
from qwen3tts_hw.backends import Backend
from qwen3tts_hw.registry import Registry

__all__ = ["ATTENTION_OPS", "AttentionOp", "check_lengths", "create"]


def _sdpa(backend: Backend) -> AttentionOp:
    from qwen3tts_hw.attention_ops.sdpa import SdpaAttention

    return SdpaAttention()


def _npu(name: str, operator: str) -> Callable[[Backend], AttentionOp]:
    def factory(backend: Backend) -> AttentionOp:
        from qwen3tts_hw.attention_ops.npu_fusion import NpuFusionAttention, load_kernel

        return NpuFusionAttention(load_kernel(operator, backend.device), backend.device, name=name)

    return factory


def _npu_reference(backend: Backend) -> AttentionOp:
    from qwen3tts_hw.attention_ops.npu_fusion import NpuFusionAttention
    from qwen3tts_hw.attention_ops.npu_reference import npu_fusion_attention

    return NpuFusionAttention(npu_fusion_attention, backend.device, name="npu_reference")


ATTENTION_OPS: Registry[Callable[[Backend], AttentionOp]] = Registry("attention op")
ATTENTION_OPS.register("sdpa", _sdpa)
ATTENTION_OPS.register("npu_fusion", _npu("npu_fusion", "npu_fusion_attention"))
ATTENTION_OPS.register("npu_fusion_v3", _npu("npu_fusion_v3", "npu_fusion_attention_v3"))
ATTENTION_OPS.register("npu_fused_infer", _npu("npu_fused_infer", "npu_fused_infer_attention_score"))
ATTENTION_OPS.register("npu_reference", _npu_reference)


def create(name: str, backend: Backend) -> AttentionOp:
    """Build the attention op of that name on the backend's device; "auto" takes the one the backend prefers.

    Raises UnsupportedError if the name is unknown or the device cannot run it.
    """
    return ATTENTION_OPS.get(backend.capabilities.attention_op if name == "auto" else name)(backend)
