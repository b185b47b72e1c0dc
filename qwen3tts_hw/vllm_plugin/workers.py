"""Worker classes: each platform's own worker with the speech runner put over its model runner.

The runner's class is replaced after the platform has built it, so nothing of a platform's ``init_device`` is copied.
Worker classes are made on demand (module ``__getattr__``): importing this module imports no platform.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

from qwen3tts_hw.vllm_plugin.driver import SpeechDriver
from qwen3tts_hw.vllm_plugin.payload import Ticket
from qwen3tts_hw.vllm_plugin.runner import SpeechRunnerMixin
from qwen3tts_hw.vllm_plugin.voice_thread import Recording

_MODULE = "qwen3tts_hw.vllm_plugin.workers"


class SpeechWorkerMixin:
    """Hooks around a platform worker: swap the runner, build the speech parts, answer questions, shut down."""

    model_runner: Any
    _speech: SpeechDriver | None = None

    def init_device(self) -> None:
        """Let the platform build its runner, then give it the speech hooks."""
        super().init_device()  # type: ignore[misc]  # the platform worker follows in the MRO
        base = type(self.model_runner)
        mixin = _runner_mixin(v2=getattr(self, "use_v2_model_runner", False))
        self.model_runner.__class__ = type(f"Speech{base.__name__}", (mixin, base), {})

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the weights, then allocate slots, codec state and the audio path."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]  # the platform worker follows in the MRO
        self._speech = self.model_runner.build_speech()

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        """Capture the frame step, then let the platform compile, capture and warm up with it."""
        with nullcontext() if self._speech is None else self._speech.keeping_kernels():
            if self._speech is not None:
                self._speech.capture()
            return super().compile_or_warm_up_model(*args, **kwargs)  # type: ignore[misc]  # as above

    def qwen3tts_facts(self) -> str:
        """The chosen code paths of this worker as JSON, for ``/health``."""
        return json.dumps({} if self._speech is None else self._speech.facts(), default=str)

    def qwen3tts_stats(self) -> str:
        """Counters of this worker as JSON: an object vLLM cannot encode would end its engine's output thread."""
        return json.dumps({} if self._speech is None else self._speech.stats(), default=str)

    def qwen3tts_trace(self, request_id: str) -> bytes:
        """Hidden states of a request's frames, float32 ``[T, H]`` bytes; empty unless the setting ``trace`` is on."""
        return b"" if self._speech is None else self._speech.engine.trace(request_id)

    def qwen3tts_encode_voice(self, samples: bytes, with_codes: bool, address: str, key: bytes) -> bytes:
        """Begin to encode reference audio, float32 mono at 24 kHz in bytes; the answer goes to ``address``.

        What is returned is empty, or the answer already; both are for ``unpack_encoding``.
        """
        if self._speech is None:
            return b""
        return self._speech.encode_voice(Recording(samples, with_codes, Ticket(address, key)))

    def shutdown(self) -> None:
        """Flush and close the audio path, then shut the platform worker down."""
        driver, self._speech = self._speech, None
        if driver is not None:
            driver.close()
        super().shutdown()  # type: ignore[misc]  # the platform worker follows in the MRO


def _runner_mixin(*, v2: bool) -> type:
    """The hooks for vLLM's runner generation; V2's need vLLM 0.24 or later and are imported only where it is used."""
    if not v2:
        return SpeechRunnerMixin
    from qwen3tts_hw.vllm_plugin.model_state import SpeechRunnerV2Mixin

    return SpeechRunnerV2Mixin


def _base(name: str) -> type:
    if name == "CpuSpeechWorker":
        from vllm.v1.worker.cpu_worker import CPUWorker as Base
    elif name == "CudaSpeechWorker":
        from vllm.v1.worker.gpu_worker import Worker as Base
    elif name == "NpuSpeechWorker":
        from vllm_ascend.worker.worker import NPUWorker as Base
    else:
        raise AttributeError(f"module {_MODULE!r} has no attribute {name!r}")
    return Base


def __getattr__(name: str) -> type:
    worker = type(name, (SpeechWorkerMixin, _base(name)), {"__module__": _MODULE})
    globals()[name] = worker
    return worker
