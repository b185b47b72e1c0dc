"""The serving benchmark against a live server: it finishes, reports every load, and its last line is JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from benchmarks.bench_serving import parse_options, run
from qwen3tts_hw.errors import CapacityError
from tests.serving.fake_service import Script
from tests.serving.speech_server import MODEL, SpeechServer


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(capsys.readouterr().out.rstrip("\n").rsplit("\n", 1)[-1])
    return record


@pytest.mark.parametrize("audio_format", ["pcm", "wav"])
def test_all_loads_are_reported(server: SpeechServer, capsys: pytest.CaptureFixture[str], audio_format: str) -> None:
    arguments = ["--url", f"{server.url}/v1", "--model", MODEL, "--voice", "ryan", "--format", audio_format]
    loads = ["--requests", "5", "--warmup", "1", "--concurrency", "1,3", "--rate", "200"]
    measured = asyncio.run(run(parse_options(arguments + loads + ["--body", '{"language": "english"}'])))
    assert {one.arrivals[-1][1] for one in measured} == {7 * 1_920}
    record = last_line(capsys)
    assert [row["load"] for row in record["rows"]] == ["closed 1", "closed 3", "poisson 200/s"]
    assert all((row["requests"], row["failed"], row["finish"]) == (5, 0, "stop:5") for row in record["rows"])
    assert record["failures"] == {}
    assert len(server.service.streams) == 16
    assert {stream.request.language for stream in server.service.streams} == {"english"}
    seeds = [stream.request.sampling.seed for stream in server.service.streams[1:6]]
    assert len(set(seeds)) == 5


def test_failures_are_reported_with_their_reason(server: SpeechServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.service.script = Script(submit_failure=CapacityError("full"))
    arguments = ["--url", server.url, "--model", MODEL, "--requests", "2", "--warmup", "0", "--concurrency", "1"]
    measured = asyncio.run(run(parse_options([*arguments, "--voice", "ryan"])))
    assert all(one.failure is not None and one.failure.startswith("HTTP 503") for one in measured)
    record = last_line(capsys)
    assert record["rows"] == [{"load": "closed 1", "requests": 2, "failed": 2}]
    assert sum(record["failures"].values()) == 2
