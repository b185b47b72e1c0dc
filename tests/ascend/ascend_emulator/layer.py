"""The compiled operator layer and runtime as Python sees them: counters, rules, and the switch."""

from __future__ import annotations

import ctypes
import functools
import os
from collections import Counter
from pathlib import Path
from typing import Any

LIBRARIES_VARIABLE = "ASCEND_EMULATOR_LIBRARIES"  # folder made by build.py; set by the test bed


@functools.cache
def _operators() -> ctypes.CDLL:
    library = ctypes.CDLL(str(Path(os.environ[LIBRARIES_VARIABLE]) / "libascend_emulator_ops.so"))
    library.ascend_emulator_install.restype = ctypes.c_long
    library.ascend_emulator_add_rule.argtypes = [
        ctypes.c_char_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p,
    ]  # fmt: skip
    return library


@functools.cache
def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(Path(os.environ[LIBRARIES_VARIABLE]) / "libascendcl.so"))
    library.ascend_emulator_counters.restype = ctypes.c_long
    library.ascend_emulator_attribute.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    return library


def install() -> int:
    """Lay the emulator over all device kernels that are registered by now; returns how many were new."""
    return int(_operators().ascend_emulator_install())


def add_rule(name: str, flags: int, *, dtypes: int, ai_core: int, reason: str) -> None:
    """State a documented limit of an operator; see :class:`ascend_emulator.rules.Rule`.

    ``flags``: 1 = makes the host wait, 2 = never captured. ``dtypes`` and ``ai_core`` have a bit per torch ScalarType.
    """
    _operators().ascend_emulator_add_rule(name.encode(), flags, dtypes, ai_core, reason.encode())


def shape_pass() -> bool:
    """Whether a reference kernel runs for its result shapes alone; contents are meaningless then."""
    return bool(_operators().ascend_emulator_shape_pass())


def counters() -> Counter[str]:
    """What happened since the last reset: replays, syncs, copies, "eager <op>", "captured <op>", "viewed <op>"."""
    size = 1 << 16
    while True:
        buffer = ctypes.create_string_buffer(size)
        needed = _runtime().ascend_emulator_counters(buffer, ctypes.c_long(size))
        if needed <= size:
            break
        size = 2 * needed
    lines = (line.rsplit("\t", 1) for line in buffer.value.decode().splitlines())
    return Counter({name: int(number) for name, number in lines})


def ask_origin(callback: Any, names: Any) -> None:
    """Have a C function say who makes a request, as an index into an array of C strings; None: nobody is asked."""
    number = 0 if names is None else len(names)
    _runtime().ascend_emulator_attribute(
        ctypes.cast(callback, ctypes.c_void_p), ctypes.cast(names, ctypes.c_void_p), number
    )


def reset_counters() -> None:
    """Start counting from zero."""
    _runtime().ascend_emulator_reset_counters()
