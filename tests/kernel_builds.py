"""Compile the kernels of a served model for a device that need not be there, and print what was built as JSON.

Triton's compilers and caches work as in a server, through the same capture; only the launchers do nothing, so results
are meaningless. Products of the vendor's library run on the CPU. A program of its own because it replaces the process's
device: ``python -m tests.kernel_builds FOLDER``, where FOLDER keeps the kernels.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.bench_codec import codec_config
from benchmarks.bench_predictor import model_config, open_table
from qwen3tts_hw import attention_ops, backends
from qwen3tts_hw.backends.kernels import compiling, keeping
from qwen3tts_hw.codec import CodecDecoder
from qwen3tts_hw.codec_kernels.fused import FusedForm
from qwen3tts_hw.engine.frame_step import FrameStep, frame_step_inputs
from qwen3tts_hw.graph_wrappers import DeviceGraphWrapper, InputSpec
from qwen3tts_hw.model.code_predictor import CodePredictor
from qwen3tts_hw.model.embeddings import CodeEmbedder
from qwen3tts_hw.types import NUM_CODEBOOKS

TARGET = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 232_448  # that one block may have on an H100 or H200
FRAME_ROWS = (1, 8, 128)
CODEC_STEPS = ((1, 1), (16, 8))  # rows, frames: the smallest blocks, and the largest
PRECISION = "medium"


class Device:
    """What Triton asks of a device's driver. Counts what would have been started."""

    utils = SimpleNamespace(
        load_binary=lambda name, kernel, shared, device: (1, 1, 32, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": SHARED_BYTES},
    )

    def __init__(self) -> None:
        self.started: Counter[str] = Counter()

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: self.started.update([metadata.name])

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class GraphDriver:
    """Graphs that hold nothing."""

    def new_pool(self) -> None:
        pass

    def new_graph(self) -> None:
        pass

    def recording(self, graph: None, pool: None) -> AbstractContextManager[object]:
        return nullcontext()

    def rehearsal(self) -> AbstractContextManager[bool]:
        return compiling()

    def replay(self, graph: None) -> None:
        pass

    def is_capturing(self) -> bool:
        return False


def wrap(function: Any, **options: Any) -> DeviceGraphWrapper[None, None]:
    return DeviceGraphWrapper(function, GraphDriver(), device=torch.device("cpu"), **options)


def capture_frame_step() -> None:
    """The frame step of the 1.7B sizes in bfloat16."""
    backend, dtype, rows = backends.resolve("cpu"), torch.bfloat16, max(FRAME_ROWS)
    backend.capabilities = dataclasses.replace(backend.capabilities, compile=True, early_launch=True)
    config = model_config("1.7B")
    codes = CodeEmbedder(config, device=backend.device, dtype=dtype)
    attention = attention_ops.create("auto", backend)
    predictor = CodePredictor(config, codes, attention, max_rows=rows, device=backend.device, dtype=dtype)
    predictor.adopt("fused", backend)
    table = open_table(config, rows, backend)
    inputs = frame_step_inputs(config, table, hidden_dtype=dtype, logits_dtype=dtype)
    wrap(FrameStep(config, table, predictor), buckets=FRAME_ROWS, inputs=inputs, name="frame step").capture()


def capture_codec_steps() -> None:
    """The codec's steps of the published sizes."""
    decoder = CodecDecoder(codec_config("1.7B"), torch.device("cpu"), torch.float32)
    for parameter in decoder.parameters():
        parameter.zero_()
    decoder.use(FusedForm(PRECISION))
    state = decoder.new_state(1 + max(rows for rows, _ in CODEC_STEPS))
    for rows, frames in CODEC_STEPS:
        inputs = InputSpec("codes", (NUM_CODEBOOKS, frames), torch.int64), InputSpec("slots", (), torch.int64)
        step = wrap(
            lambda codes, slots: decoder.decode_step(codes, state, slots),
            buckets=[rows],
            inputs=inputs,
            name=f"codec step of {frames} frames",
        )
        step.capture()


def main(folder: str) -> None:
    device = Device()
    built: list[dict[str, Any]] = []
    driver.set_active(device)
    triton.knobs.compilation.listener = lambda **facts: built.append(facts)
    with keeping(folder), torch.no_grad():
        capture_frame_step()
        frame_step_builds = len(built)
        capture_codec_steps()
    result = {
        "triton": triton.__version__,
        "frame_step": frame_step_builds,
        "codec": len(built) - frame_step_builds,
        "kept": sum(facts["cache_hit"] for facts in built),
        "kernels": sorted(device.started),
        "most_shared_bytes": max(facts["metadata"]["shared"] for facts in built),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
