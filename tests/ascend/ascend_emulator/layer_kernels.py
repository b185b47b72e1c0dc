"""Reference kernels of norms, activations, rotary embedding, cache writes and sampling operators of torch_npu."""

from __future__ import annotations

import torch
from ascend_emulator.reference import References, require
from torch.nn import functional

NPU, ATB = References("npu"), References("atb")
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@NPU.kernel("npu_rms_norm")
def npu_rms_norm(input, gamma, epsilon=1e-6):  # noqa: A002  # the operator's name for it
    require(input.dtype in FLOATS, f"npu_rms_norm: input is {input.dtype}")
    require(input.dtype == gamma.dtype or (gamma.dtype == torch.float32 and input.dtype in FLOATS[:2]),
            f"npu_rms_norm: input is {input.dtype}, gamma {gamma.dtype}")  # fmt: skip
    require(input.shape[input.dim() - gamma.dim() :] == gamma.shape, "npu_rms_norm: gamma is not of the last dimensions")
    wide = input.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * scale * gamma.float()).to(input.dtype), scale


@NPU.kernel("npu_add_rms_norm")
def npu_add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    require(x1.dtype == x2.dtype, f"npu_add_rms_norm: {x1.dtype} and {x2.dtype}")
    total = (x1.float() + x2.float()).to(x1.dtype)
    normed, scale = npu_rms_norm(total, gamma, epsilon)
    return normed, scale, total


@NPU.kernel("npu_swiglu")
def npu_swiglu(input, dim=-1):  # noqa: A002
    require(input.shape[dim] % 2 == 0, f"npu_swiglu: dimension {dim} of {list(input.shape)} is odd")
    gate, up = input.chunk(2, dim)
    return (functional.silu(gate.float()) * up.float()).to(input.dtype)


def half_rotated(x: torch.Tensor) -> torch.Tensor:
    """Swap the halves of the last dimension and negate the new first."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


@NPU.kernel("npu_rotary_mul")
def npu_rotary_mul(input, r1, r2, rotary_mode="half", rotate=None):  # noqa: A002
    require(rotary_mode == "half" and rotate is None, f"npu_rotary_mul: rotary_mode {rotary_mode!r} is not emulated")
    require(input.dtype == r1.dtype == r2.dtype, f"npu_rotary_mul: {input.dtype}, {r1.dtype}, {r2.dtype}")
    wide = input.float()
    return (wide * r1.float() + half_rotated(wide) * r2.float()).to(input.dtype)


@ATB.kernel("_npu_rotary_embedding")
def npu_rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style):
    require(is_neox_style, "_npu_rotary_embedding: only the half-split style is emulated")
    cos, sin = (part[:, None].float() for part in cos_sin_cache[positions.flatten().long()].chunk(2, -1))
    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    for tensor in (query, key):
        heads = tensor.view(positions.numel(), -1, head_size)
        wide = heads.float()
        heads.copy_((wide * cos + half_rotated(wide) * sin).to(heads.dtype))


def _write_rows(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    kept = slots >= 0
    flat = cache.view(-1, *cache.shape[2:])
    flat[slots[kept].long()] = rows[kept].reshape(-1, *cache.shape[2:])


@ATB.kernel("_npu_reshape_and_cache")
def npu_reshape_and_cache(key, value, key_cache, value_cache, slot_indices):
    require(slot_indices.dtype == torch.int32, f"_npu_reshape_and_cache: slot_indices is {slot_indices.dtype}")
    _write_rows(key_cache, key, slot_indices)
    _write_rows(value_cache, value, slot_indices)


@NPU.kernel("npu_scatter_pa_kv_cache")
def npu_scatter_pa_kv_cache(key, value, key_cache, value_cache, slot_mapping, *, compress_lens=None,
                            compress_seq_offsets=None, seq_lens=None, cache_mode="PA_NZ"):  # fmt: skip
    require(compress_lens is None and compress_seq_offsets is None and seq_lens is None, "compression is not emulated")
    _write_rows(key_cache, key, slot_mapping)
    _write_rows(value_cache, value, slot_mapping)


@NPU.kernel("npu_linear")
def npu_linear(input, weight, bias=None):  # noqa: A002
    return functional.linear(input, weight, bias)


@NPU.kernel("npu_dtype_cast")
def npu_dtype_cast(input, dtype, input_dtype=None):  # noqa: A002
    return input.to(dtype)


@NPU.kernel("npu_top_k_top_p")
def npu_top_k_top_p(logits, p=None, k=None):
    values, order = logits.sort(-1)
    if k is not None:
        lowest = values.gather(-1, (values.shape[-1] - k.long().clamp(1, values.shape[-1]))[:, None])
        values = values.masked_fill(values < lowest, float("-inf"))
    if p is not None:
        outside = values.softmax(-1).cumsum(-1) <= 1 - p[:, None]
        outside[:, -1] = False
        values = values.masked_fill(outside, float("-inf"))
    return torch.empty_like(values).scatter_(-1, order, values)


@ATB.kernel("_npu_matmul_add_fp32")
def npu_matmul_add_fp32(x, weight, c):
    c.add_(x.float().T @ weight.float())


def register() -> None:
    """Register the kernels of this file."""
    NPU.register()
    ATB.register()
