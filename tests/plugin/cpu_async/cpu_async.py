"""A vLLM plugin for tests: asynchronous scheduling on the CPU, where vLLM switches it off.

Scheduler and runner then do what they do on an accelerator: tokens are placeholders on the host, a step is scheduled
before the last one's result is known, and a request runs one step past its end. Only the overlap is missing: streams
and events of the device are stand-ins, since everything has happened when a CPU call returns.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class DoneEvent:
    """An event whose work is done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class IdleStream:
    """A stream that has nothing queued."""

    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def register() -> None:
    """Called by vLLM in each of its processes, before it makes its configuration or a worker."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    torch.Event = torch.cuda.Event = DoneEvent  # type: ignore[misc, assignment]
    torch.cuda.Stream = IdleStream  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda *_: IdleStream()  # type: ignore[assignment, return-value]
    torch.cuda.stream = lambda *_: contextlib.nullcontext()  # type: ignore[assignment, return-value]
