"""Runs the cells by a real ``vllm serve``: one server per graph mode, asked by 1, 3 and 8 clients at once.

On the emulated device this runs inside the full test bed. One server is alive at a time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qwen3tts_hw.engine.local import LocalEngine
from qwen3tts_hw.prompt.request import build_request
from qwen3tts_hw.settings import Settings
from tests.parity.cell_models import checkpoint as open_tiny
from tests.parity.cell_outcome import Difference, compare_codes, require
from tests.parity.cell_runs import Result
from tests.parity.checkpoints import TinyCheckpoint
from tests.parity.matrix import ALL_BATCHES, BUCKETS, EAGER_CODES, EMULATED, FLOAT32, Cell

Codes = NDArray[np.int64]
Done = Callable[[Cell, "Result | Exception"], None]
# Platform plugins that hardware needs beside this package; names that are not installed are passed over.
PLUGINS = "qwen3tts_hw,ascend,ascend_kv_connector,ascend_model_loader,ascend_service_profiling,ascend_model"


class Served(Protocol):
    """A running server as the cells need it."""

    def speak(self, number: int) -> Codes:
        """Codes ``[T, 16]`` of request ``number``."""

    def worker(self) -> dict[str, Any]:
        """The worker's counters."""

    def evidence(self, mode: str) -> dict[str, Any]:
        """What shows that vLLM runs in this graph mode; raises NotReachedError."""


def run_groups(cells: Iterable[Cell], root: Path, done: Done) -> None:
    """Run cells, those of one server together; ``done`` gets each one's result or error."""
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.device, cell.variant, cell.attention, cell.graphs, cell.dtype), []).append(cell)
    expected = Expected(root)
    for group in groups.values():
        waiting = list(group)
        try:
            wanted = {cell.id: expected.of(cell) for cell in group}
            with server(group[0], root) as running:
                while waiting:
                    cell = waiting[0]
                    result: Result | Exception
                    try:
                        result = run(cell, running, wanted[cell.id])
                    except Exception as error:  # noqa: BLE001 - a failed cell is a result
                        result = error
                    done(waiting.pop(0), result)
        except Exception as error:  # noqa: BLE001 - the server did not start, or its reference could not be made
            for cell in waiting:
                done(cell, error)


def run(cell: Cell, running: Served, expected: list[Codes]) -> Result:
    """Ask for ``batch`` requests at once and compare each one's codes."""
    before = running.worker()
    found = together(running, cell.batch)
    after = running.worker()
    for number, (ours, reference) in enumerate(zip(found, expected, strict=True)):
        compare_codes(ours, reference, name=f"request {number}")
    steps, frames = after["steps"] - before["steps"], sum(len(codes) for codes in found)
    step, earlier = after["frame_step"], before["frame_step"]
    evidence: dict[str, Any] = {"frames": frames, "vLLM steps": steps, "frame step": step["mode"]}
    if step["mode"] == "graph":
        rows = f"replays_{cell.bucket}"
        replays = step[rows] - earlier[rows]
        require(replays > 0, f"the frame step of bucket {cell.bucket} was never replayed: {step}")
        evidence[f"replays of bucket {cell.bucket}"] = replays
    require(
        (step["mode"] == "graph") == (cell.device != "cpu" or cell.graphs == "graph"), f"frame step: {step['mode']}"
    )
    require(cell.batch == 1 or steps < frames, f"{steps} steps for {frames} frames: nothing ran together")
    return Difference(0.0, 0.0), evidence | running.evidence(cell.graphs)


def together(running: Served, count: int) -> list[Codes]:
    """The first ``count`` requests at the same moment; alone there are two, greedy and sampled where that is asked."""
    if count == 1:
        return [running.speak(number) for number in (0, 1)]
    start = threading.Barrier(count)

    def speak(number: int) -> Codes:
        start.wait()
        return running.speak(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(speak, range(count)))


class Expected:
    """The codes each cell must give: the local engine's on the CPU, or the device's own without graphs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._eager: dict[tuple[str, ...], list[Codes]] = {}
        self._local: dict[str, LocalEngine] = {}
        self._answers: dict[tuple[str, int], Codes] = {}
        self._ruled: dict[tuple[str, str], list[Codes]] = {}

    def of(self, cell: Cell) -> list[Codes]:
        """Codes of the requests that the cell asks for."""
        count = max(cell.batch, 2)
        if cell.device == EMULATED:
            return self._by_rules(cell)[:count]
        if cell.comparator != EAGER_CODES:
            return [self._on_cpu(cell.variant, number) for number in range(count)]
        key = (cell.device, cell.variant, cell.attention, cell.dtype)
        if key not in self._eager:
            with server(cell, self._root, mode="eager") as running:
                self._eager[key] = [running.speak(number) for number in range(count)]
        return self._eager[key]

    def _by_rules(self, cell: Cell) -> list[Codes]:
        """What the CPU makes of the emulated bed's requests by the dtype rules of vllm-ascend's operators."""
        from tests.ascend.full import reference
        from tests.ascend.full.server import Wanted

        key = (cell.variant, cell.dtype)
        if key not in self._ruled:
            bodies = [Wanted(number).body for number in range(max(ALL_BATCHES))]
            directory = open_tiny(cell.variant, self._root).directory
            self._ruled[key] = [one.codes for one in reference.synthesize(directory, cell.dtype, bodies)]
        return self._ruled[key]

    def _on_cpu(self, variant: str, number: int) -> Codes:
        if variant not in self._local:
            directory = open_tiny(variant, self._root).directory
            settings = Settings(graphs="off", attention_op="sdpa", predictor="plain")
            self._local[variant] = LocalEngine.load(directory, device="cpu", dtype=FLOAT32, settings=settings)
        if (variant, number) not in self._answers:
            engine, body = self._local[variant], http_body(variant, number)
            names = {"input": "text", "instructions": "instruct"}
            kept = {
                names.get(name, name): value
                for name, value in body.items()
                if name not in ("response_format", "stream_format", "include_codes")
            }
            self._answers[variant, number] = engine.synthesize(build_request(engine.config, Settings(), **kept)).codes
        return self._answers[variant, number]


def http_fields(variant: str, number: int) -> dict[str, Any]:
    """Request ``number`` of the eight that all other servers are asked, every other one sampled."""
    from tests.plugin.reference import eight_requests

    return eight_requests(tiny(variant), seeded=bool(number % 2))[number]


def http_body(variant: str, number: int) -> dict[str, Any]:
    """The same as it is sent."""
    from tests.plugin.server import speech_body

    return speech_body(**http_fields(variant, number))


def tiny(variant: str) -> TinyCheckpoint:
    """The description of a checkpoint by its name in the matrix."""
    kind, size = variant.split("-", 1)
    return TinyCheckpoint(kind, size, end_of_speech=False)


@contextmanager
def server(cell: Cell, root: Path, mode: str | None = None) -> Iterator[Served]:
    """The server of a cell, in its graph mode or another."""
    directory, mode = open_tiny(cell.variant, root).directory, mode or cell.graphs
    if cell.device == EMULATED:
        from tests.ascend.full import server as full

        allowed = {"ASCEND_EMULATOR_ALLOW_FLOAT32": "1"} if cell.dtype == FLOAT32 else {}
        chosen = {"QWEN3TTS_ATTENTION_OP": cell.attention}
        with full.Server(directory, mode, cell.dtype, **allowed, **chosen) as running:
            yield EmulatedServed(running)
        return
    from tests.plugin.server import SpeechServer

    arguments = ["--max-num-seqs", str(BUCKETS[-1]), "--max-model-len", "512", "--dtype", cell.dtype]
    environment = {"QWEN3TTS_ATTENTION_OP": cell.attention}
    if cell.device == "cpu":
        environment["QWEN3TTS_GRAPHS"] = "recording" if mode == "graph" else "off"
    else:
        environment["VLLM_PLUGINS"] = PLUGINS
        arguments += ["--gpu-memory-utilization", "0.3"]
        if mode != "eager":
            graphs = {"cudagraph_mode": mode, "cudagraph_capture_sizes": list(BUCKETS)}
            arguments += ["--no-enforce-eager", "--compilation-config", json.dumps(graphs)]
    with SpeechServer(directory, *arguments, environment=environment) as running:
        yield HttpServed(running, cell)


class EmulatedServed:
    """``vllm serve`` over vllm-ascend on the emulated device."""

    def __init__(self, running: Any) -> None:
        self._running = running

    def speak(self, number: int) -> Codes:
        from tests.ascend.full.server import Wanted

        codes: Codes = self._running.speak(Wanted(number)).codes
        return codes

    def worker(self) -> dict[str, Any]:
        found: dict[str, Any] = self._running.worker()
        return found

    def evidence(self, mode: str) -> dict[str, Any]:
        counts = self._running.device_counts()
        refused = [name for name in counts if name.startswith("refused")]
        require(not refused, f"the emulated device refused: {refused}")
        log = self._running.log.read_text(errors="replace")
        require(mode == "eager" or f"CUDAGraphMode.{mode}" in log, f"vLLM's log does not name CUDAGraphMode.{mode}")
        captured = sum(n for name, n in counts.items() if name.startswith("captured npu::npu_fused_infer"))
        require(bool(captured) == mode.startswith("FULL"), f"{captured} attention operators in vLLM's graphs")
        fusion = sum(n for name, n in counts.items() if name == "captured npu::npu_fusion_attention_v3")
        require(fusion > 0, "no npu_fusion_attention_v3 was captured for the frame step")
        return {
            "graph mode of vLLM": mode,
            "replays counted by the emulator": counts["graph_replays"],
            "npu_fused_infer_attention_score in vLLM's graphs": captured,
            "npu_fusion_attention_v3 in the frame step's graphs": fusion,
        }


class HttpServed:
    """``vllm serve`` in this environment."""

    def __init__(self, running: Any, cell: Cell) -> None:
        self._running, self._cell = running, cell

    def speak(self, number: int) -> Codes:
        codes: Codes = self._running.speak(**http_fields(self._cell.variant, number)).codes
        return codes

    def worker(self) -> dict[str, Any]:
        found: dict[str, Any] = self._running.worker()
        return found

    def evidence(self, mode: str) -> dict[str, Any]:
        log = self._running.log
        if self._cell.device != "cpu":
            require(mode == "eager" or mode in log, f"vLLM's log does not name the graph mode {mode}")
            return {"graph mode of vLLM": mode}
        return {"graph mode of vLLM": "eager"}
