"""The cloning benchmark against a live server: every source of a voice is measured, and it leaves no voice behind."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.bench_clone import parse_options, run
from tests.serving.speech_server import SpeechServer
from tests.serving.test_bench_run import last_line


def test_all_sources_are_measured(
    base_server: SpeechServer, server: SpeechServer, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--url", base_server.url, "--preset-url", server.url, "--requests", "3", "--warmup", "1"]
    measured = asyncio.run(run(parse_options([*arguments, "--ref-seconds", "0.5"])))
    assert [one.failure for one in measured] == [None] * 20
    record = last_line(capsys)
    assert [row["load"] for row in record["rows"]] == ["registered", "known", "new", "embedding", "preset"]
    assert all((row["requests"], row["failed"]) == (3, 0) for row in record["rows"])
    assert len(base_server.service.encoded) == 1 + 1 + 4, "registered, known once, new every time"
    assert base_server.client.get("/v1/audio/voices").json()["voices"] == []
