"""Reference kernels of vllm-ascend's own operators on the dense text path, and shapes for those only traced.

vllm-ascend traces fusion patterns for quantised models at start-up whatever model is served. Operators that only occur
there get a stand-in that makes results of the right shape full of NaN, and counts; no value of theirs is ever used.
"""

from __future__ import annotations

from typing import Any

import torch
from ascend_emulator import layer, layer_kernels
from ascend_emulator.reference import References, exists
from torch.utils._pytree import tree_map

OWN = References("_C_ascend")
TRACED_ONLY = ("npu_dynamic_quant", "npu_quantize", "npu_add_rms_norm_quant", "npu_rms_norm_quant")
shape_only_calls: dict[str, int] = {}
_traced = torch.library.Library("npu", "IMPL")


@OWN.kernel("npu_add_rms_norm_bias")
def npu_add_rms_norm_bias(x1, x2, gamma, beta=None, epsilon=1e-6):
    normed, scale, total = layer_kernels.npu_add_rms_norm(x1, x2, gamma, epsilon)
    return (normed if beta is None else normed + beta), scale, total


def _shapes_of(name: str) -> Any:
    """A kernel that asks the Meta kernel for shapes and returns poison."""
    operator = getattr(torch.ops.npu, name).default

    def kernel(*arguments: Any, **options: Any) -> Any:
        shape_only_calls[name] = shape_only_calls.get(name, 0) + 1
        to_meta = lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731  # one use
        results = operator(*tree_map(to_meta, arguments), **tree_map(to_meta, options))
        return tree_map(_poisoned, results)

    return kernel


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
        if exists(full) and has_kernel(full, "Meta") and not has_kernel(full, "CPU"):
            _traced.impl(name, _shapes_of(name), "CPU")
    layer.install()
