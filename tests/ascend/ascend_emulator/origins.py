"""Who asked the emulated device for something: the package whose function is innermost on the asking thread's stack.

Counters then exist twice: "graph_replays" is everybody's, "package: graph_replays" what this project's code asked for
while it ran in the engine's thread. Work that a graph repeats belongs to whom replays it. What a thread beside the
engine's asks for, such as the wait of one that sends audio, is counted apart: it does not hold the engine up.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
from collections import Counter
from importlib import util

from ascend_emulator import layer

PACKAGE = "package"
_FOLDERS = {"qwen3tts_hw": PACKAGE, "vllm_ascend": "vllm-ascend", "vllm": "vllm"}
OWNERS = ("other", *_FOLDERS.values())
BESIDE = ", thread beside the engine's"
_NAMES = (*OWNERS, *(owner + BESIDE for owner in OWNERS))
_Ask = ctypes.CFUNCTYPE(ctypes.c_int)
_kept: list[object] = []  # what the runtime calls must stay alive


def attribute() -> None:
    """Count by origin from now on; costs some microseconds per request to the device."""
    roots = [
        (folder + "/", OWNERS.index(_FOLDERS[name]))
        for name in _FOLDERS
        if (spec := util.find_spec(name)) is not None
        for folder in spec.submodule_search_locations or ()
    ]
    owners: dict[str, int] = {}
    engine = threading.main_thread().ident

    def owner_of(path: str) -> int:
        found = next((owner for root, owner in roots if path.startswith(root)), 0)
        owners[path] = found
        return found

    def ask() -> int:
        frame, owner = sys._getframe().f_back, 0
        while frame is not None and not owner:
            path = frame.f_code.co_filename
            owner = owners[path] if path in owners else owner_of(path)
            frame = frame.f_back
        return owner if threading.get_ident() == engine else owner + len(OWNERS)

    callback = _Ask(ask)
    names = (ctypes.c_char_p * len(_NAMES))(*(name.encode() for name in _NAMES))
    _kept.extend((callback, names))
    layer.ask_origin(callback, names)
    atexit.register(layer.ask_origin, None, None)


def of(counts: Counter[str], *owners: str) -> Counter[str]:
    """What these owners asked for, under the plain names."""
    found: Counter[str] = Counter()
    for name, number in counts.items():
        owner, separator, plain = name.partition(": ")
        if separator and owner in owners:
            found[plain] += number
    return found
