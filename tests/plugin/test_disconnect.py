"""A client that leaves takes its request along: slot, stream and address are free at once, however it was asked for."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.plugin.server import SpeechServer, speech_body, wait_for

pytestmark = pytest.mark.vllm

ENDLESS = {"text": "It would speak for long.", "max_new_tokens": 2_000}  # some 40 s of work, alone


@contextmanager
def raw_request(server: SpeechServer, **fields: Any) -> Iterator[socket.socket]:
    """Send a request over a plain connection, which closes with the block, whatever has been answered."""
    body = json.dumps(speech_body(**fields)).encode()
    head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        yield connection


def assert_freed(server: SpeechServer, before: dict[str, Any]) -> None:
    """Nothing is held any more, long before the request would have ended by itself."""
    after = server.wait_until_idle()["workers"][0]
    admitted, steps = after["admitted"] - before["admitted"], after["steps"] - before["steps"]
    assert after["finished"] - before["finished"] == admitted
    assert steps < ENDLESS["max_new_tokens"] // 2
    assert len(server.speak("And on it goes.", max_new_tokens=3).codes) == 3


@pytest.mark.server("standard")
@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_leaving_a_stream(server: SpeechServer, stream_format: str) -> None:
    before = server.worker()
    with raw_request(server, **ENDLESS, stream_format=stream_format) as connection:
        assert b"200 OK" in connection.recv(100)
        assert server.worker()["requests_open"] == 1
    assert_freed(server, before)


@pytest.mark.server("standard")
def test_leaving_before_a_whole_answer(server: SpeechServer) -> None:
    before = server.worker()
    with raw_request(server, **ENDLESS, stream_format="audio", stream=False):
        wait_for(lambda: server.worker()["requests_open"] == 1, seconds=30.0, message="the request did not start")
    assert_freed(server, before)


@pytest.mark.server("standard")
def test_leaving_at_once(server: SpeechServer) -> None:
    before = server.worker()
    with raw_request(server, **ENDLESS):
        pass
    server.speak(max_new_tokens=2)  # comes after the other, which may never have started
    assert_freed(server, before)


@pytest.mark.server("standard")
def test_many_leave_at_the_same_time(server: SpeechServer) -> None:
    before = server.worker()
    with ThreadPoolExecutor(8) as threads:
        received = list(threads.map(lambda chunks: server.speak_some(chunks, **ENDLESS), range(1, 9)))
    assert min(received) > 0
    assert_freed(server, before)


@pytest.mark.server("recording")
def test_leaving_while_waiting_for_a_slot(server: SpeechServer) -> None:
    slots = server.worker()["slots"]
    before = server.worker()
    with ThreadPoolExecutor(slots) as threads:
        running = [threads.submit(server.speak, **ENDLESS | {"max_new_tokens": 60}) for _ in range(slots)]
        wait_for(lambda: server.worker()["slots_free"] == 0, seconds=60.0, message="the slots are not taken")
        with raw_request(server, **ENDLESS):
            wait_for(lambda: server.stats()["running"] == slots + 1, seconds=30.0, message="nobody waits")
        wait_for(lambda: server.stats()["running"] <= slots, seconds=30.0, message="it still waits")
        assert [len(one.result().codes) for one in running] == [60] * slots
    after = server.wait_until_idle()["workers"][0]
    assert after["steps"] - before["steps"] < 300, "the request that was left has run"
