"""Kernels written in Triton: how they are started, compiled ahead of time and kept from one start to the next.

Compilers need a second or more for the larger kernels, and a server has more than a hundred of them. So before anything
is captured, the work to capture is rehearsed: every :func:`launch` inside of :func:`compiling` hands its kernel to a
pool of compilers instead of starting it. The results are kept in a folder of this package's own, because programs
around it redirect Triton's folder while they run, and not the same way in every start. Imports Triton only where it is
used.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_rehearsing = ContextVar("qwen3tts_rehearsing", default=False)  # kernels are compiled rather than started


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start ``kernel`` (a Triton function) on the current stream; inside of :func:`compiling`, only have it compiled.

    ``args`` and ``options`` are the kernel's own and Triton's (``num_warps`` and the like). Products and sums are fused
    unless ``enable_fp_fusion`` is False: Triton's default depends on its version.
    """
    options.setdefault("enable_fp_fusion", True)
    if _rehearsing.get():
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)


@contextmanager
def compiling() -> Iterator[bool]:
    """Compile the kernels that the block launches, as many at a time as there are processors, and start none of them.

    Yields False, and changes nothing, where there is no Triton: the block has no reason to run then. An error of the
    compiler is raised at the end of the block.
    """
    if importlib.util.find_spec("triton") is None:
        yield False
        return
    import triton

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "qwen3tts-compile") as pool:
        before = _rehearsing.set(True)
        try:
            with triton.AsyncCompileMode(pool):
                yield True
        finally:
            _rehearsing.reset(before)


@contextmanager
def keeping(folder: str) -> Iterator[None]:
    """Let Triton keep what it compiles in ``folder``, and look for it there first, whatever it used before.

    Warns and leaves Triton's own folder in place if ``folder`` cannot be written. Not for two threads at once.
    """
    if importlib.util.find_spec("triton") is None or not _writable(folder):
        yield
        return
    from triton import knobs

    with knobs.cache.scope():
        knobs.cache.dir = folder
        yield


def _writable(folder: str) -> bool:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = str(error)
    else:
        if os.access(folder, os.W_OK):
            return True
        reason = f"{folder} is not writable"
    logger.warning(
        "compiled kernels cannot be kept (%s), so every start may compile them again; make the folder writable, or "
        "name another one in the setting kernels_dir",
        reason,
    )
    return False
