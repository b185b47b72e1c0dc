"""Ascend's fused attention kernels, with the mask they need and the guard against feeding them another.

The compressed mask is a template: ``torch.triu(torch.ones(2048, 2048), 1)`` with True for masked, exactly that size
whatever the sequence lengths are; the kernel slides a window over it. So sequences longer than 2048 are fine, while a
mask of the sequence's own size, or one of the other polarity, gives wrong results or a refusal from deep inside.
Follows the operator documentation of Ascend/op-plugin and the tiling code of CANN's flash_attention_score.

The kernel is a constructor argument, so that the same calls run against :mod:`.npu_reference` on any machine.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypedDict

import torch

from qwen3tts_hw.attention_ops.base import check_lengths
from qwen3tts_hw.errors import AttentionMaskError, UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Unpack

MASK_SIZE = 2048
NO_MASK, TOP_LEFT_CAUSAL, BOTTOM_RIGHT_CAUSAL = 0, 2, 3  # the operator's sparse_mode


class KernelOptions(TypedDict):
    """The options that are always given; the operator's own default scale is 1.0."""

    atten_mask: torch.Tensor | None
    scale: float
    sparse_mode: int


class FusionKernel(Protocol):
    """A call of the fused operator, reduced to the arguments that are used; returns the attention output alone."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        head_num: int,
        input_layout: str,
        **options: Unpack[KernelOptions],
    ) -> torch.Tensor:
        """Attend in layout BNSD with ``head_num`` query heads."""


class NpuFusionAttention:
    """Attention by a fused kernel, with one mask kept on the device for the life of the op."""

    def __init__(self, kernel: FusionKernel, device: torch.device, *, name: str) -> None:
        self.name = name
        self._kernel = kernel
        self._mask = compressed_causal_mask(device)
        check_mask_content(self._mask)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float) -> torch.Tensor:
        num_queries, num_keys = query.shape[2], key.shape[2]
        check_lengths(num_queries, num_keys)
        sparse_mode = sparse_mode_for(num_queries, num_keys)
        mask = None if sparse_mode == NO_MASK else self._mask
        check_compressed_mask(mask, sparse_mode, num_queries, num_keys)
        return self._kernel(
            query, key, value, query.shape[1], "BNSD", atten_mask=mask, scale=scale, sparse_mode=sparse_mode
        )


def compressed_causal_mask(device: torch.device) -> torch.Tensor:
    """Make the kernels' causal template: bool ``[2048, 2048]``, True above the diagonal = masked."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(diagonal=1)


def sparse_mode_for(num_queries: int, num_keys: int) -> int:
    """The operator's causal mode for these lengths; its modes 2 and 3 differ in where the diagonal starts."""
    if num_queries == 1:
        return NO_MASK
    return TOP_LEFT_CAUSAL if num_queries == num_keys else BOTTOM_RIGHT_CAUSAL


def check_compressed_mask(mask: torch.Tensor | None, sparse_mode: int, num_queries: int, num_keys: int) -> None:
    """Raise AttentionMaskError unless the kernel reads this mask as causal attention over these lengths.

    Looks at shape, dtype, mode and lengths only, so it costs nothing per call and may run under capture; what the mask
    contains is checked once, by :func:`check_mask_content`.
    """
    if sparse_mode == NO_MASK:
        if mask is not None or num_queries != 1:
            raise AttentionMaskError(
                f"sparse_mode 0 without a mask lets every query see every key; it is used for one query only, "
                f"got {num_queries} queries, mask {'given' if mask is not None else 'absent'}"
            )
        return
    if sparse_mode not in (TOP_LEFT_CAUSAL, BOTTOM_RIGHT_CAUSAL):
        raise AttentionMaskError(f"sparse_mode is {sparse_mode}; the compressed causal mask is used with modes 2 and 3")
    if mask is None:
        raise AttentionMaskError(f"sparse_mode {sparse_mode} needs the compressed causal mask, but none was given")
    if tuple(mask.shape) != (MASK_SIZE, MASK_SIZE):
        raise AttentionMaskError(
            f"the compressed mask has shape {list(mask.shape)}; it must be [{MASK_SIZE}, {MASK_SIZE}] "
            f"whatever the sequence lengths are (here {num_queries} queries, {num_keys} keys)"
        )
    if mask.dtype not in (torch.bool, torch.uint8):
        raise AttentionMaskError(f"the compressed mask has dtype {mask.dtype}; it must be torch.bool or torch.uint8")
    if sparse_mode == TOP_LEFT_CAUSAL and num_queries != num_keys:
        raise AttentionMaskError(
            f"sparse_mode 2 aligns the diagonal at the top left and needs as many keys as queries, got {num_queries} "
            f"queries and {num_keys} keys; use mode 3 when the keys include earlier positions"
        )
    if sparse_mode == BOTTOM_RIGHT_CAUSAL and num_keys < num_queries:
        raise AttentionMaskError(
            f"sparse_mode 3 aligns the diagonal at the bottom right, so {num_queries} queries over {num_keys} keys "
            f"would leave queries that see nothing"
        )


def check_mask_content(mask: torch.Tensor) -> None:
    """Raise AttentionMaskError unless the mask is the strict upper triangle; reads the tensor back, so call it once."""
    masked = mask.to("cpu", torch.bool)
    expected = compressed_causal_mask(torch.device("cpu"))
    if masked.shape != expected.shape:
        raise AttentionMaskError(f"the compressed mask has shape {list(mask.shape)}; it must be {list(expected.shape)}")
    if torch.equal(masked, expected):
        return
    if torch.equal(masked, ~expected):
        found = "it is inverted: True must mean masked, as opposed to scaled_dot_product_attention's True for kept"
    elif torch.equal(masked, expected.T):
        found = "it is the lower triangle, which masks the past instead of the future"
    elif torch.equal(masked, expected | torch.eye(MASK_SIZE, dtype=torch.bool)):
        found = "its diagonal is masked, so that no position would see itself; build it with diagonal=1"
    else:
        found = f"{int((masked != expected).sum())} of its entries differ"
    raise AttentionMaskError(f"the compressed mask is not torch.triu(torch.ones(2048, 2048), diagonal=1): {found}")


def load_kernel(operator: str, device: torch.device) -> FusionKernel:
    """Wrap ``torch.ops.npu.<operator>``; raises UnsupportedError if the device or the operator is not there."""
    if device.type != "npu":
        raise UnsupportedError(f"attention by {operator} needs an npu device, but the backend's device is {device}")
    torch_npu = importlib.import_module("torch_npu")
    function: Callable[..., Sequence[torch.Tensor]] | None = getattr(torch.ops.npu, operator, None)
    if function is None:
        raise UnsupportedError(f"torch_npu {torch_npu.__version__} has no operator {operator}")
    if operator == "npu_fused_infer_attention_score":
        return fused_infer_kernel(function)
    return lambda *tensors, **options: function(*tensors, **options)[0]  # not the statistics behind the output


def fused_infer_kernel(function: Callable[..., Sequence[torch.Tensor]]) -> FusionKernel:
    """Put npu_fused_infer_attention_score behind the signature of the fusion family.

    The inference operator wants contiguous tensors, half precision, and the number of key/value heads.
    """

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        head_num: int,
        input_layout: str,
        **options: Unpack[KernelOptions],
    ) -> torch.Tensor:
        if query.dtype not in (torch.float16, torch.bfloat16):
            raise UnsupportedError(
                f"npu_fused_infer_attention_score takes float16 and bfloat16, got {query.dtype}; "
                f"use the attention op npu_fusion_v3 for float32"
            )
        return function(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            num_heads=head_num,
            num_key_value_heads=key.shape[1],
            input_layout=input_layout,
            **options,
        )[0]

    return kernel
