"""A check at load that the sampler's hash has the same bits on this device as everywhere.

One small computation on the device is compared with exact integers, step by step, so that the error can name the
operation that differs: a product that saturates instead of wrapping, a division made in float32. Otherwise such a
device would speak, only with other codes than a request's seed stands for. Knows no device.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from qwen3tts_hw.errors import UnsupportedError
from qwen3tts_hw.model import sampling

_VALUES = (0, 1, 2, 255, 65_535, 65_536, 99_991, 2**24 + 1, 2**30, 2**31 - 1)
_OPERANDS = (*_VALUES, *(-value - 1 for value in _VALUES))  # int32, both ends included
_FACTORS = (0x7FEB352D, 0x846CA68B)
_GOLDEN, _FRAME_STEP = 0x9E3779B9, 0x85EBCA6B


def check_hash(device: torch.device) -> None:
    """Raise UnsupportedError naming the first operation whose result on the device is not the exact one."""
    x = torch.tensor(_OPERANDS, dtype=torch.int32, device=device)
    steps = _steps()
    found = torch.stack([on_device(x) for _, on_device, _ in steps]).tolist()
    for (name, _, exact), row in zip(steps, found, strict=True):
        for operand, value in zip(_OPERANDS, row, strict=True):
            expected = sampling.signed(exact(operand))
            if value != expected:
                raise UnsupportedError(
                    f"{device} computes the sampler's integers differently: {name} of the int32 {operand} is {value}, "
                    f"but exactly {expected}; a seed would give other codes here than on any other device. "
                    f"Check the versions of the device's software"
                )


def _steps() -> list[tuple[str, Callable[[Tensor], Tensor], Callable[[int], int]]]:
    """Every kind of operation the sampler makes, from single ones to the whole: name, on the device, exactly."""
    first, second = _FACTORS
    return [
        ("the sum with 0x9E3779B9", lambda x: x + sampling.signed(_GOLDEN), lambda x: x + _GOLDEN),
        ("the product with 0x7FEB352D", lambda x: x * sampling.signed(first), lambda x: x * first),
        ("the product with 0x846CA68B", lambda x: x * sampling.signed(second), lambda x: x * second),
        ("the exclusive or with 0x9E3779B9", lambda x: x ^ sampling.signed(_GOLDEN), lambda x: x ^ _GOLDEN),
        ("the conjunction with 0xFFFF0000", lambda x: x & -65_536, lambda x: x & -65_536),
        ("the quotient by 65536 of a multiple", lambda x: (x & -65_536) // 65_536, lambda x: x >> 16),
        ("the upper 16 bits", lambda x: sampling.upper_bits(x, 16), lambda x: _unsigned(x) >> 16),
        ("the upper 23 bits", lambda x: sampling.upper_bits(x, 9), lambda x: _unsigned(x) >> 9),
        ("the hash mix", sampling.mix, _mix),
        ("the frame's key", lambda x: sampling.frame_key(x, x, x), _frame_key),
        ("the uniform number", lambda x: sampling.uniform(x).view(torch.int32), _uniform_bits),
    ]


def _unsigned(value: int) -> int:
    return value & 0xFFFFFFFF


def _mix(value: int) -> int:
    x = _unsigned(value)
    x ^= x >> 16
    x = _unsigned(x * _FACTORS[0])
    x ^= x >> 15
    x = _unsigned(x * _FACTORS[1])
    return x ^ (x >> 16)


def _frame_key(value: int) -> int:
    return _mix((_mix(_mix(value + _GOLDEN) ^ _unsigned(value))) + value * _FRAME_STEP)


def _uniform_bits(value: int) -> int:
    """The bits of the float32 that the sampler makes of 32 random ones."""
    number = ((_unsigned(value) >> 9) + 0.5) * 2.0**-23
    return int(struct.unpack("<i", struct.pack("<f", number))[0])
