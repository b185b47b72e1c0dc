"""Documented limits of operators, as a table that the operator layer enforces.

Sources: the operator documentation of Ascend/op-plugin (fused attention), and the public host code of CANN's basic
operators (hicann/ops-math, hicann/ops-nn), which lists the dtypes that run on the AI Core of Atlas A2 and A3. What is
not listed takes every dtype but float64. A limit that real devices have and this table lacks stays unseen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ascend_emulator import layer

_SCALAR_TYPES = {  # c10::ScalarType
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5,
    torch.float32: 6, torch.float64: 7, torch.complex64: 9, torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Rule:
    """One limit; ``dtypes`` are those of all device arguments, empty = the default set.

    ``ai_core`` are the dtypes that run on the AI Core, empty = all; others run on the slow AI CPU and are counted as
    "ai_cpu <operator>".
    """

    waits: bool = False
    never_captured: bool = False
    dtypes: tuple[torch.dtype, ...] = ()
    ai_core: tuple[torch.dtype, ...] = ()
    reason: str = ""


_SHIFT = Rule(
    never_captured=True,
    dtypes=INTEGERS,
    ai_core=FLOATS,
    reason="RightShift and LeftShift run on the AI CPU, and their scalar operand is a host-to-device copy per call",
)
_MASKED = Rule(waits=True, reason="the result's size depends on values")

RULES: dict[str, Rule] = {
    # Operators that make the host wait.
    **dict.fromkeys(
        ("aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_consecutive",
         "aten::unique_dim", "aten::bincount", "aten::is_nonzero"), _MASKED),
    # Fused attention: the plain form is documented for training, "not for graph mode, not for aclgraph".
    "npu::npu_fusion_attention": Rule(
        never_captured=True, reason="documented as unsupported in graph mode and aclgraph; use npu_fusion_attention_v3"
    ),
    # Integer arithmetic and scans: the AI Core lists of ops-math math/{floor_div,mul,sort,cumsum}.
    **dict.fromkeys(("aten::floor_divide", "aten::floor_divide.Scalar", "aten::floor_divide_.Scalar"),
                    Rule(ai_core=(*FLOATS, torch.int32, torch.int8, torch.uint8))),
    **dict.fromkeys(("aten::mul.Tensor", "aten::mul_.Tensor"),
                    Rule(ai_core=(*FLOATS, torch.int32, torch.int64, torch.int8, torch.uint8, torch.bool))),
    **dict.fromkeys(("aten::sort", "aten::sort.stable", "aten::argsort"), Rule(ai_core=FLOATS)),
    "aten::cumsum": Rule(ai_core=(*FLOATS, torch.int32)),
    # Shifts: ops-math math/right_shift is an AI CPU task, op-plugin's BitwiseRightShift calls copy_scalar_to_device.
    **dict.fromkeys(
        ("aten::__rshift__.Scalar", "aten::__rshift__.Tensor", "aten::__irshift__.Scalar", "aten::__irshift__.Tensor",
         "aten::bitwise_right_shift.Tensor_Scalar", "aten::bitwise_right_shift.Tensor",
         "aten::__lshift__.Scalar", "aten::__lshift__.Tensor", "aten::bitwise_left_shift.Tensor_Scalar",
         "aten::bitwise_left_shift.Tensor"), _SHIFT),
    # Convolution kernels of A2 and A3 take floats.
    "aten::convolution_overrideable": Rule(dtypes=FLOATS),
    "aten::convolution": Rule(dtypes=FLOATS),
    "aten::mm": Rule(dtypes=FLOATS),
    "aten::bmm": Rule(dtypes=FLOATS),
    "aten::addmm": Rule(dtypes=FLOATS),
    "aten::matmul": Rule(dtypes=FLOATS),
    # Moving, creating and casting works for float64 too.
    **dict.fromkeys(
        ("aten::fill_.Scalar", "aten::fill_.Tensor", "aten::zero_", "aten::cat", "aten::clone", "aten::index_select"),
        Rule(dtypes=(*_SCALAR_TYPES,)),
    ),
}  # fmt: skip


def register() -> None:
    """Hand the table to the operator layer."""
    for name, rule in RULES.items():
        dtypes, ai_core = (sum(1 << _SCALAR_TYPES[dtype] for dtype in group) for group in (rule.dtypes, rule.ai_core))
        flags = rule.waits + 2 * rule.never_captured
        layer.add_rule(name, flags, dtypes=dtypes, ai_core=ai_core, reason=rule.reason)
