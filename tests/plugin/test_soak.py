"""After hundreds of requests, many of them left half-way, a server holds what it held at the start."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from benchmarks.bench_soak import held_by
from tests.plugin.answers import assert_equal_codes
from tests.plugin.pool import SERVERS
from tests.plugin.reference import LocalReference
from tests.plugin.server import SpeechServer

pytestmark = pytest.mark.vllm

REQUESTS, AT_ONCE = 200, 8
DIFFERENT = REQUESTS // 2  # each twice: what libraries keep for every new shape is there after the first time
MOST_GROWTH_BYTES = 16 << 20
MIB = 1 << 20


def one_request(server: SpeechServer, number: int) -> bool:
    """Ask for speech, every third time only for a part of it; return whether it was left."""
    chance = random.Random(number)
    frames = chance.randint(4, 30)
    fields: dict[str, Any] = {"text": f"Request {number}." * chance.randint(1, 4), "max_new_tokens": frames}
    if number % 2:
        fields |= {"temperature": 0.9, "seed": number}
    if number % 3 == 0:
        server.speak_some(chance.randint(0, 4), **fields | {"max_new_tokens": 400})
        return True
    answer = server.speak(**fields, include_codes=number % 5 == 0 or None)
    assert len(answer.pcm) == frames * 1_920
    assert answer.finish_reason == "length"
    return False


def resident_bytes(server: SpeechServer) -> tuple[int, int]:
    """Return the memory of the worker and of the process that answers HTTP."""
    stats = server.stats()
    return int(stats["workers"][0]["rss_bytes"]), int(psutil.Process(stats["pid"]).memory_info().rss)


@pytest.mark.server("standard")
def test_slots_queues_and_memory_stay_flat(
    server: SpeechServer, local: LocalReference, figure: Callable[[str], None]
) -> None:
    fields = {"text": "The same as before.", "max_new_tokens": 24, "seed": 9, "temperature": 0.8}
    start = server.wait_until_idle()
    first = server.speak(**fields)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        left = sum(threads.map(lambda number: one_request(server, number), range(DIFFERENT)))
        server.wait_until_idle()
        warm = resident_bytes(server)
        left += sum(threads.map(lambda number: one_request(server, number), range(DIFFERENT)))
    end = server.wait_until_idle()
    grown = [after - before for after, before in zip(resident_bytes(server), warm, strict=True)]
    worker_mib, http_mib = (
        f"{more / MIB:+.1f} MiB of {all_ / MIB:.0f}" for more, all_ in zip(grown, warm, strict=True)
    )
    figure(f"after {REQUESTS} requests, {left} of them left, memory since request {DIFFERENT}:")
    figure(f"  worker {worker_mib}, HTTP server {http_mib}; still held: {held_by(end)}")
    assert left >= REQUESTS // 3
    assert max(grown) <= MOST_GROWTH_BYTES
    worker, worker_before = end["workers"][0], start["workers"][0]
    assert worker["slots_free"] == worker_before["slots_free"] == worker["slots"]
    assert worker["finished"] - worker_before["finished"] == worker["admitted"] - worker_before["admitted"]
    assert worker["packets_dropped"] == 0
    assert end["submitted"] - start["submitted"] == REQUESTS + 1
    last = server.speak(**fields)
    assert_equal_codes(last.codes, first.codes)
    local.assert_equal(last, SERVERS["standard"].checkpoint, fields)
