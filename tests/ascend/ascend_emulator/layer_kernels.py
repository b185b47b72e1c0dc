"""Reference kernels of norms, activations, rotary embedding, cache writes and sampling operators of torch_npu."""

from __future__ import annotations

import torch
from torch.nn import functional

from ascend_emulator.reference import Call, References, require

NPU, ATB = References("npu"), References("atb")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@NPU.kernel("npu_rms_norm")
def npu_rms_norm(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    return rms_norm(call.input, call.gamma, call.epsilon)


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the last dimension in float32; also returns the factors."""
    require(x.dtype in FLOATS, f"npu_rms_norm: input is {x.dtype}")
    wider = gamma.dtype == torch.float32 and x.dtype != torch.float32
    require(x.dtype == gamma.dtype or wider, f"npu_rms_norm: input is {x.dtype}, gamma {gamma.dtype}")
    require(x.shape[x.dim() - gamma.dim() :] == gamma.shape, "npu_rms_norm: gamma is not of the last dimensions")
    wide = x.float()
    factors = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * factors * gamma.float()).to(x.dtype), factors


@NPU.kernel("npu_add_rms_norm")
def npu_add_rms_norm(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    require(call.x1.dtype == call.x2.dtype, f"npu_add_rms_norm: {call.x1.dtype} and {call.x2.dtype}")
    total = (call.x1.float() + call.x2.float()).to(call.x1.dtype)
    normed, factors = rms_norm(total, call.gamma, call.epsilon)
    return normed, factors, total


@NPU.kernel("npu_swiglu")
def npu_swiglu(call: Call) -> torch.Tensor:
    require(call.input.shape[call.dim] % 2 == 0, f"npu_swiglu: dimension {call.dim} of {list(call.input.shape)} is odd")
    gate, up = call.input.chunk(2, call.dim)
    return (functional.silu(gate.float()) * up.float()).to(call.input.dtype)


def half_rotated(x: torch.Tensor) -> torch.Tensor:
    """Swap the halves of the last dimension and negate the new first."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


@NPU.kernel("npu_rotary_mul")
def npu_rotary_mul(call: Call) -> torch.Tensor:
    call.uses_only("input", "r1", "r2")
    require(call.input.dtype == call.r1.dtype == call.r2.dtype, "npu_rotary_mul: dtypes differ")
    wide = call.input.float()
    return (wide * call.r1.float() + half_rotated(wide) * call.r2.float()).to(call.input.dtype)


@ATB.kernel("_npu_rotary_embedding")
def npu_rotary_embedding(call: Call) -> None:
    require(call.is_neox_style, "_npu_rotary_embedding: only the half-split style is emulated")
    cos, sin = (part[:, None].float() for part in call.cos_sin_cache[call.positions.flatten().long()].chunk(2, -1))
    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    for tensor in (call.query, call.key):
        heads = tensor.view(call.positions.numel(), -1, call.head_size)
        wide = heads.float()
        heads.copy_((wide * cos + half_rotated(wide) * sin).to(heads.dtype))


def _write_rows(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    kept = slots >= 0
    flat = cache.view(-1, *cache.shape[2:])
    flat[slots[kept].long()] = rows[kept].reshape(-1, *cache.shape[2:])


@ATB.kernel("_npu_reshape_and_cache")
def npu_reshape_and_cache(call: Call) -> None:
    slots = call.slot_indices
    require(slots.dtype == torch.int32, f"_npu_reshape_and_cache: slot_indices is {slots.dtype}")
    _write_rows(call.key_cache, call.key, slots)
    _write_rows(call.value_cache, call.value, slots)


@NPU.kernel("npu_scatter_pa_kv_cache")
def npu_scatter_pa_kv_cache(call: Call) -> None:
    call.uses_only("key", "value", "key_cache", "value_cache", "slot_mapping", "cache_mode")
    _write_rows(call.key_cache, call.key, call.slot_mapping)
    _write_rows(call.value_cache, call.value, call.slot_mapping)


@NPU.kernel("npu_linear")
def npu_linear(call: Call) -> torch.Tensor:
    return functional.linear(call.input, call.weight, call.bias)


@NPU.kernel("npu_dtype_cast")
def npu_dtype_cast(call: Call) -> torch.Tensor:
    return call.input.to(call.dtype)


@NPU.kernel("npu_top_k_top_p")
def npu_top_k_top_p(call: Call) -> torch.Tensor:
    values, order = call.logits.sort(-1)
    if call.k is not None:
        limit = call.k.long().clamp(1, values.shape[-1])
        values = values.masked_fill(values < values.gather(-1, (values.shape[-1] - limit)[:, None]), float("-inf"))
    if call.p is not None:
        outside = values.softmax(-1).cumsum(-1) <= 1 - call.p[:, None]
        outside[:, -1] = False
        values = values.masked_fill(outside, float("-inf"))
    return torch.empty_like(values).scatter_(-1, order, values)


@ATB.kernel("_npu_matmul_add_fp32")
def npu_matmul_add_fp32(call: Call) -> None:
    call.C.add_(call.x.float().T @ call.weight.float())


def register() -> None:
    """Register the kernels of this file."""
    NPU.register()
    ATB.register()
