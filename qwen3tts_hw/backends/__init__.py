"""Device families behind one interface; :func:`resolve` is the only place where one is chosen.

A family is a module with ``create(index)``; it is imported when asked for, so that nothing here needs its software.
"""

from __future__ import annotations

from collections.abc import Callable

from qwen3tts_hw.backends.base import Backend, Capabilities, Event, Stream
from qwen3tts_hw.errors import UnsupportedError
from qwen3tts_hw.registry import Registry

__all__ = ["BACKENDS", "Backend", "Capabilities", "Event", "Stream", "resolve", "resolve_device"]


def _cpu(index: int | None) -> Backend:
    from qwen3tts_hw.backends import cpu

    return cpu.create(index)


def _cuda(index: int | None) -> Backend:
    from qwen3tts_hw.backends import cuda

    return cuda.create(index)


def _npu(index: int | None) -> Backend:
    from qwen3tts_hw.backends import npu

    return npu.create(index)


BACKENDS: Registry[Callable[[int | None], Backend]] = Registry("backend")
BACKENDS.register("cpu", _cpu)
BACKENDS.register("cuda", _cuda)
BACKENDS.register("npu", _npu)


def resolve(name: str = "auto", *, index: int | None = None) -> Backend:
    """Return the backend of that name, or the best one present for "auto": npu, then cuda, then cpu.

    ``index`` picks a device of the family; None takes the process's current one. Raises UnsupportedError if the name is
    unknown or the device is not there, saying what was found.
    """
    return BACKENDS.get(_best() if name == "auto" else name)(index)


def resolve_device(device: str) -> Backend:
    """Return the backend for a device as torch spells it, such as "cuda:1"; raises UnsupportedError."""
    name, _, number = device.partition(":")
    if number and not number.isdecimal():
        raise UnsupportedError(f"{device!r} is no device; expected a form such as cuda:1")
    return resolve(name, index=int(number) if number else None)


def _best() -> str:
    from qwen3tts_hw.backends import cuda, npu

    if npu.missing() is None:
        return "npu"
    return "cuda" if cuda.missing() is None else "cpu"
