"""The in-process benchmark, over a package that is made up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks.bench_in_process import measure, parse_options, run

FRAMES, SAMPLES = 4, 1_920


def speak(text: str, chunk: int) -> Iterator[tuple[Any, int, dict[str, Any]]]:
    for _ in range(FRAMES // chunk):
        yield np.zeros(chunk * SAMPLES, np.float32), 24_000, {}


def refuse(text: str, chunk: int) -> Iterator[tuple[Any, int, dict[str, Any]]]:
    raise ValueError(f"cannot say {text}")
    yield  # a generator, as the package's


def test_chunks_are_counted_as_they_come() -> None:
    measured = measure(speak, "Hello.", 2)
    assert [samples for _, samples in measured.arrivals] == [2 * SAMPLES, 4 * SAMPLES]
    assert measured.audio_s == pytest.approx(0.32)
    assert measured.failure is None and measured.end_s > measured.due_s


def test_failures_are_told() -> None:
    assert measure(refuse, "Hello.", 1).failure == "ValueError: cannot say Hello."
    assert measure(lambda text, chunk: iter(()), "Hello.", 1).failure == "no audio"


def test_each_chunk_size_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse_options(["--model", "M", "--voice", "ryan", "--chunks", "1", "4", "--requests", "3"])
    assert len(run(options, speak)) == 6
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["load"] for row in result["rows"]] == ["in process, chunks of 1", "in process, chunks of 4"]
    assert [row["requests"] for row in result["rows"]] == [3, 3]
    assert result["failures"] == []
