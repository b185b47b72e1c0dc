"""The check of the sampler's integers at load: passes here, and names the operation that a wrong device gets wrong."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qwen3tts_hw import backends
from qwen3tts_hw.engine.local import LocalEngine
from qwen3tts_hw.errors import UnsupportedError
from qwen3tts_hw.model.sampling_check import check_hash

CPU = torch.device("cpu")
INT32 = torch.iinfo(torch.int32)
aten = torch.ops.aten


class WrongDevice(TorchDispatchMode):
    """Every call of one operator on int32 values gives what ``wrong`` makes of its two operands."""

    def __init__(self, operator, wrong):
        super().__init__()
        self.operator, self.wrong = operator, wrong

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is self.operator and args[0].dtype == torch.int32:
            return self.wrong(*args[:2]).to(torch.int32)
        return function(*args, **(kwargs or {}))


def saturating(operation):
    """The operation without wrap-around."""
    return lambda a, b: operation(a.to(torch.int64), b).clamp(INT32.min, INT32.max)


WRONG = {
    "saturating sum": (aten.add.Tensor, saturating(torch.add), "the sum with 0x9E3779B9"),
    "saturating product": (aten.mul.Tensor, saturating(torch.mul), "the product with 0x7FEB352D"),
    "product in float32": (aten.mul.Tensor, lambda a, b: (a.float() * b).clamp(-2e9, 2e9), "the product with"),
    "or for exclusive or": (aten.bitwise_xor.Scalar, torch.bitwise_or, "the exclusive or"),
    "unsigned quotient": (aten.floor_divide.default, lambda a, b: (a.to(torch.int64) % 2**32) // b, "the quotient by"),
}


@pytest.mark.parametrize(
    "name", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda), pytest.param("npu", marks=pytest.mark.npu)]
)
def test_devices_pass(name):
    check_hash(backends.resolve(name).device)


@pytest.mark.parametrize(("operator", "wrong", "message"), list(WRONG.values()), ids=list(WRONG))
def test_a_wrong_operation_is_named_with_operand_and_both_results(operator, wrong, message):
    with WrongDevice(operator, wrong), pytest.raises(UnsupportedError, match=message) as raised:
        check_hash(CPU)
    assert "but exactly" in str(raised.value)
    assert "cpu computes" in str(raised.value)


def test_an_engine_does_not_start_on_a_wrong_device(tiny_checkpoint):
    operator, wrong, message = WRONG["saturating product"]
    with WrongDevice(operator, wrong), pytest.raises(UnsupportedError, match=message):
        LocalEngine.load(tiny_checkpoint(), device="cpu")
