"""Reading a trace: whose work is whose, what overlaps, and who made the host wait."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.profile_steps import Trace, busy_us, parse_options, read_trace


def work(name: str, at: float, length: float, *, stream: int = 7, correlation: int = 0) -> dict[str, Any]:
    arguments = {"stream": stream, "correlation": correlation}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": at, "dur": length, "tid": stream, "args": arguments}


def call(name: str, at: float, length: float, tid: int = 1, cat: str = "cuda_runtime") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": at, "dur": length, "tid": tid, "args": {}}


@pytest.fixture
def trace() -> Trace:
    """Two steps of 1 ms: talker 300 us, frame step 200 us, codec 400 us of which 100 us beside the talker."""
    events = []
    for start in (0.0, 1_000.0, 2_000.0):
        events += [
            work("begin_frame", start, 50, correlation=int(start) + 1),
            work("linear_few", start + 50, 150, correlation=int(start) + 1),
            work("look_up", start + 300, 400, stream=9, correlation=int(start) + 2),
            work("gemm", start + 600, 300, correlation=int(start) + 3),
            call("cudaGraphLaunch", start + 10, 5),
            call("cudaStreamSynchronize", start + 500, 60),
            call("qwen3tts_hw/engine/audio.py(10): send", start + 690, 100, 2, "python_function"),
            call("cudaEventSynchronize", start + 700, 20, 2),
            call("cudaEventSynchronize", start + 700, 20, 3),
        ]
    events.append(work("Memcpy DtoH (Device -> Pageable)", 950, 10) | {"cat": "gpu_memcpy"})
    return Trace(events)


def test_work_is_given_to_the_part_that_did_it(trace: Trace) -> None:
    rows = {row["what"]: row for row in trace.parts()}
    assert trace.steps == 2
    assert rows["frame step"]["busy_ms"] == pytest.approx(0.2)
    assert rows["frame step"]["calls"] == 2
    assert rows["codec"]["busy_ms"] == pytest.approx(0.4)
    assert rows["talker and the rest"]["busy_ms"] == pytest.approx(0.305)  # with the copy
    assert rows["all"]["kernel_ms"] == pytest.approx(0.905)
    assert rows["all"]["busy_ms"] == pytest.approx(0.805)  # 100 us of talker and codec at the same time
    assert rows["step"]["busy_ms"] == pytest.approx(1.0)
    assert rows["idle"]["busy_ms"] == pytest.approx(0.195)


def test_waits_are_told_apart_by_the_line_that_made_them(trace: Trace) -> None:
    waits = {(row["what"], row["line"]): row for row in trace.waits()}
    assert set(waits) == {
        ("cudaEventSynchronize", ""),
        ("cudaEventSynchronize", "qwen3tts_hw/engine/audio.py(10): send"),
        ("cudaStreamSynchronize", ""),
    }
    assert waits["cudaStreamSynchronize", ""]["busy_ms"] == pytest.approx(0.06)
    assert [row["what"] for row in trace.unpinned_copies()] == ["Memcpy DtoH (Device -> Pageable)"]


def test_kernels_are_listed_by_time(trace: Trace) -> None:
    names = [row["what"] for row in trace.top_kernels(1)]
    assert names == ["codec: look_up", "talker and the rest: gemm", "frame step: linear_few"]


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="holds 1 frame steps"):
        Trace([work("begin_frame", 0, 1)])


def test_overlapping_spans_count_once() -> None:
    assert busy_us([(5, 7), (0, 4), (1, 2), (3, 6)]) == 7


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_traces_are_read_packed_or_not(tmp_path: Path, name: str) -> None:
    events = [work("begin_frame", 0, 1), {"ph": "M", "name": "process_name"}]
    text = json.dumps({"traceEvents": events}).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert read_trace(tmp_path / name) == events[:1]


def test_a_server_or_a_trace_must_be_named() -> None:
    with pytest.raises(SystemExit):
        parse_options(["--url", "http://127.0.0.1:1"])
