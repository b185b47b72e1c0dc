"""Reference kernels of vllm-ascend's own operators on the dense text path, and shapes for those only traced.

vllm-ascend traces fusion patterns for quantised models at start-up whatever model is served. Operators that only occur
there get a stand-in that makes results of the right shape full of NaN, and counts; no value of theirs is ever used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from ascend_emulator import layer, layer_kernels
from ascend_emulator.reference import Call, References, schemas

OWN = References("_C_ascend")
TRACED_ONLY = ("npu_dynamic_quant", "npu_quantize", "npu_add_rms_norm_quant", "npu_rms_norm_quant")
shape_only_calls: dict[str, int] = {}
_traced = torch.library.Library("npu", "IMPL")


@OWN.kernel("npu_add_rms_norm_bias")
def npu_add_rms_norm_bias(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    normed, factors, total = layer_kernels.npu_add_rms_norm(call)
    return (normed if call.beta is None else normed + call.beta), factors, total


def _shapes_of(name: str) -> Any:
    """A kernel that asks the Meta kernel for shapes and returns poison."""
    operator = getattr(torch.ops.npu, name).default

    def kernel(*arguments: Any, **options: Any) -> Any:
        shape_only_calls[name] = shape_only_calls.get(name, 0) + 1
        results = operator(*tree_map(_on_meta, arguments), **tree_map(_on_meta, options))
        return tree_map(_poisoned, results)

    return kernel


def _on_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _poisoned(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensor = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
    return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-1)


def register() -> None:
    """Register the kernels of this file; vllm-ascend's compiled library must have been imported."""
    OWN.register()
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in TRACED_ONLY:
        full = f"npu::{name}"
        if full in schemas() and has_kernel(full, "Meta") and not has_kernel(full, "CPU"):
            _traced.impl(name, _shapes_of(name), "CPU")
    layer.install()
