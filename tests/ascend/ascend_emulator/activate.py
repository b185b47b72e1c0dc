"""Switch the emulator on in this process, right after torch_npu or a library with more operators is imported."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

from ascend_emulator import attention_kernels, layer, layer_kernels, origins, rules
from ascend_emulator import triton_kernels as _triton_kernels  # noqa: F401  # defines operators that install() covers

REPORT_VARIABLE = "ASCEND_EMULATOR_REPORT"  # a folder: each process keeps a file of its counters there
REPORT_EVERY_S = 0.2
_active = False


def after_torch_npu() -> None:
    """Register reference kernels of torch_npu's own operators, state the rules, lay the emulator over everything."""
    global _active  # one switch per process
    if _active:
        return
    attention_kernels.register()
    layer_kernels.register()
    rules.register()
    layer.install()
    _active = True
    if REPORT_VARIABLE in os.environ:
        origins.attribute()
        folder = Path(os.environ[REPORT_VARIABLE])
        threading.Thread(target=_keep_report, args=(folder / f"{os.getpid()}.json",), daemon=True).start()


def _keep_report(path: Path) -> None:
    """Write the counters again and again: a server's processes are often killed, so nothing would run at their end."""
    partial = path.with_suffix(".partial")
    while True:
        partial.write_text(json.dumps(layer.counters()))
        partial.rename(path)
        time.sleep(REPORT_EVERY_S)


def after_vllm_ascend_operators() -> None:
    """Do the same for the operators that vllm-ascend's compiled library adds."""
    from ascend_emulator import vllm_kernels

    after_torch_npu()
    vllm_kernels.register()
    layer.install()
