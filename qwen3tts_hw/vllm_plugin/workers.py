"""Worker classes: each platform's own worker with the speech runner put over its model runner.

The runner's class is replaced after the platform has built it, so nothing of a platform's ``init_device`` is copied.
Worker classes are made on demand (module ``__getattr__``): importing this module imports no platform.
"""

from __future__ import annotations

from typing import Any

from qwen3tts_hw.vllm_plugin.runner import SpeechRunnerMixin

_MODULE = "qwen3tts_hw.vllm_plugin.workers"


class SpeechWorkerMixin:
    """Hooks around a platform worker: swap the runner, build the speech parts, answer questions, shut down."""

    model_runner: Any

    def init_device(self) -> None:
        """Let the platform build its runner, then give it the speech hooks."""
        super().init_device()  # type: ignore[misc]  # the platform worker follows in the MRO
        base = type(self.model_runner)
        self.model_runner.__class__ = type(f"Speech{base.__name__}", (SpeechRunnerMixin, base), {})

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the weights, then allocate slots, codec state and the audio path."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]  # the platform worker follows in the MRO
        self.model_runner.build_speech()

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        """Let the platform compile and capture, then capture the frame step."""
        result = super().compile_or_warm_up_model(*args, **kwargs)  # type: ignore[misc]  # as above
        self.model_runner.capture_speech()
        return result

    def qwen3tts_stats(self) -> dict[str, Any]:
        """Counters of this worker, for ``/v1/audio/stats``."""
        return self.model_runner.speech_stats()

    def qwen3tts_trace(self, request_id: str) -> bytes:
        """Hidden states of a request's frames, float32 ``[T, H]`` bytes; empty unless the setting ``trace`` is on."""
        return self.model_runner.speech_trace(request_id)

    def shutdown(self) -> None:
        """Flush and close the audio path, then shut the platform worker down."""
        runner = getattr(self, "model_runner", None)
        if isinstance(runner, SpeechRunnerMixin):
            runner.close_speech()
        super().shutdown()  # type: ignore[misc]  # the platform worker follows in the MRO


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
