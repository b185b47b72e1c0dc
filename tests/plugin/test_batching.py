"""A request gets the same codes alone and among others, whatever vLLM does to the batch meanwhile.

The local engine, which runs one request after the other, says what is right. Each kind of server asserts that what it
is there for has really happened: chunks, preemption, graph replays, both engines at work.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest

from tests.parity.checkpoints import TinyCheckpoint
from tests.plugin.answers import Speech, assert_equal_codes
from tests.plugin.pool import BATCHED_ROWS, SERVERS
from tests.plugin.reference import LocalReference, eight_requests
from tests.plugin.server import SpeechServer

pytestmark = pytest.mark.vllm

BATCH = 8
SAMPLING = pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])


def speak_at_once(server: SpeechServer, requests: list[dict[str, Any]]) -> list[Speech]:
    """Send all requests at the same moment and return their answers."""
    start = threading.Barrier(len(requests))

    def speak(fields: dict[str, Any]) -> Speech:
        start.wait()
        return server.speak(**fields)

    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(speak, requests))


def speak_among_others(server: SpeechServer, requests: list[dict[str, Any]], *, within_s: float = 1.0) -> list[Speech]:
    """Send the requests one by one within some time, while others come and leave before their end."""
    leaving, chance = threading.Event(), random.Random(5)

    def others(number: int) -> None:
        while not leaving.is_set():
            fields = requests[number % len(requests)] | {"max_new_tokens": 200, "seed": number, "temperature": 1.0}
            server.speak_some(1 + number % 4, **fields)
            number += 3

    def speak(delay_s: float, fields: dict[str, Any]) -> Speech:
        time.sleep(delay_s)
        return server.speak(**fields)

    with ThreadPoolExecutor(len(requests) + 3) as threads:
        crowd = [threads.submit(others, number) for number in range(3)]
        try:
            delays = [chance.uniform(0.0, within_s) for _ in requests]
            answers = list(threads.map(speak, delays, requests))
        finally:
            leaving.set()
        for one in crowd:
            one.result()
    return answers


def growing_at_once(checkpoint: TinyCheckpoint, frames: int, *, seeded: bool) -> list[dict[str, Any]]:
    """Return eight requests whose prompts take a block of cache each and whose speech takes more than that."""
    requests = eight_requests(checkpoint, seeded=seeded)
    return [fields | {"text_mode": "streaming", "max_new_tokens": frames} for fields in requests]


def assert_right(name: str, answers: list[Speech], requests: list[dict[str, Any]], local: LocalReference) -> None:
    for fields, answer in zip(requests, answers, strict=True):
        local.assert_equal(answer, SERVERS[name].checkpoint, fields)


@pytest.mark.server("standard")
@SAMPLING
def test_alone_and_at_once_are_equal(server: SpeechServer, local: LocalReference, seeded: bool) -> None:
    requests = eight_requests(SERVERS["standard"].checkpoint, seeded=seeded)
    alone = [server.speak(**fields) for fields in requests]
    assert_right("standard", alone, requests, local)
    steps = server.worker()["steps"]
    for one, other in zip(alone, speak_at_once(server, requests), strict=True):
        assert_equal_codes(other.codes, one.codes)
        assert np.abs(other.pcm.astype(np.int32) - one.pcm).max() <= 1  # the codec rounds differently in a batch
    assert server.worker()["steps"] - steps < sum(len(one.codes) for one in alone), "they were not batched"


@pytest.mark.server("standard")
@SAMPLING
def test_others_may_come_and_leave(server: SpeechServer, local: LocalReference, seeded: bool) -> None:
    requests = eight_requests(SERVERS["standard"].checkpoint, seeded=seeded)
    assert_right("standard", speak_among_others(server, requests), requests, local)
    server.wait_until_idle()


@pytest.mark.server("standard")
def test_a_seed_gives_the_same_codes_in_any_company(server: SpeechServer, local: LocalReference) -> None:
    fields = {"text": "A seed is a promise.", "temperature": 1.0, "seed": 2**63 - 1, "max_new_tokens": 32}
    one, again = server.speak(**fields), server.speak(**fields)
    company = [fields | {"seed": seed, "max_new_tokens": 8 * seed} for seed in (1, 2, 3, 4)]
    small, *_ = speak_at_once(server, [fields, *company[:1]])
    *_, large = speak_at_once(server, [*company, fields])
    for other in (again, small, large):
        assert_equal_codes(other.codes, one.codes)
    local.assert_equal(one, SERVERS["standard"].checkpoint, fields)
    different = server.speak(**fields | {"seed": 2**63 - 2})
    assert (different.codes != one.codes).any()


@pytest.mark.server("standard")
def test_a_drawn_seed_is_told_and_can_be_used_again(server: SpeechServer) -> None:
    drawn = {"text": "Any seed will do.", "temperature": 1.0, "max_new_tokens": 16}
    one, other = server.speak(**drawn), server.speak(**drawn)
    assert one.seed != other.seed
    assert (one.codes != other.codes).any()
    assert_equal_codes(server.speak(**drawn, seed=one.seed).codes, one.codes)


@pytest.mark.server("recording")
@SAMPLING
def test_the_captured_frame_step_gives_the_same_codes(
    server: SpeechServer, local: LocalReference, seeded: bool
) -> None:
    before = server.worker()["frame_step"]
    requests = eight_requests(SERVERS["recording"].checkpoint, seeded=seeded)
    assert_right("recording", speak_at_once(server, requests), requests, local)
    after = server.worker()["frame_step"]
    assert after["mode"] == "graph"
    replayed = {name: after[name] - before[name] for name in after if name.startswith("replays_")}
    assert replayed[f"replays_{BATCH}"] > 0, replayed  # the requests differ in length: smaller buckets follow
    assert sum(count > 0 for count in replayed.values()) > 2, replayed
    assert after["replays"] - before["replays"] == after["calls"] - before["calls"]


@pytest.mark.server("tight")
def test_long_prompts_are_read_in_chunks(server: SpeechServer, local: LocalReference) -> None:
    fields = eight_requests(SERVERS["tight"].checkpoint, seeded=False)[3]
    before = server.worker()["steps"]
    answer = server.speak(**fields | {"text_mode": "whole"})
    rows = local.answer(SERVERS["tight"].checkpoint, fields | {"text_mode": "whole"}).prompt_rows
    assert rows > 2 * BATCHED_ROWS
    assert server.worker()["steps"] - before == -(-rows // BATCHED_ROWS) + len(answer.codes) - 1


@pytest.mark.server("tight")
@SAMPLING
def test_chunks_and_preemption_change_nothing(
    server: SpeechServer, local: LocalReference, figure: Callable[[str], None], seeded: bool
) -> None:
    requests = growing_at_once(SERVERS["tight"].checkpoint, 40, seeded=seeded)
    before = server.worker()["preempted"]
    assert_right("tight", speak_at_once(server, requests), requests, local)
    preempted = server.worker()["preempted"] - before
    assert preempted > 0, "the cache was large enough for all"
    figure(f"preemptions of {len(requests)} requests with little cache: {preempted}")


@pytest.mark.server("tight")
@SAMPLING
def test_preemption_among_others_that_come_and_leave(server: SpeechServer, local: LocalReference, seeded: bool) -> None:
    requests = growing_at_once(SERVERS["tight"].checkpoint, 40, seeded=seeded)
    before = server.worker()["preempted"]
    # So close together that all of them run at the same time, which the cache has no room for.
    assert_right("tight", speak_among_others(server, requests, within_s=0.1), requests, local)
    assert server.worker()["preempted"] > before
    server.wait_until_idle()


@pytest.mark.server("async")
@SAMPLING
def test_asynchronous_scheduling_changes_nothing(
    server: SpeechServer, local: LocalReference, figure: Callable[[str], None], seeded: bool
) -> None:
    # Each twice: of eight that end by themselves, one may be the only long one.
    requests = 2 * growing_at_once(SERVERS["async"].checkpoint, 80, seeded=seeded)
    before = server.worker()["preempted"]
    answers = speak_at_once(server, requests)
    assert_right("async", answers, requests, local)
    preempted = server.worker()["preempted"] - before
    reasons = [answer.finish_reason for answer in answers]
    assert preempted > 0
    assert "stop" in reasons, "the case is that speech ends before the host knows"
    figure(f"asynchronous scheduling: {preempted} preemptions, {reasons.count('stop')} of {len(reasons)} stopped")


@pytest.mark.server("async")
def test_asynchronous_scheduling_with_others_that_come_and_leave(server: SpeechServer, local: LocalReference) -> None:
    checkpoint = SERVERS["async"].checkpoint
    requests = growing_at_once(checkpoint, 80, seeded=False)
    assert_right("async", speak_among_others(server, requests), requests, local)
    server.wait_until_idle()


@pytest.mark.server("async")
def test_scheduling_is_really_asynchronous(server: SpeechServer) -> None:
    before = server.worker()["steps"]
    answer = server.speak("It ends by itself.", max_new_tokens=150)
    assert answer.finish_reason == "stop"
    # One step per frame, one that finds the end, and one that was scheduled before that was known.
    assert server.worker()["steps"] - before == len(answer.codes) + 2


@pytest.mark.server("two_by_two")
@SAMPLING
def test_two_engines_behind_two_servers(server: SpeechServer, local: LocalReference, seeded: bool) -> None:
    requests = eight_requests(SERVERS["two_by_two"].checkpoint, seeded=seeded)
    assert_right("two_by_two", speak_at_once(server, requests), requests, local)


@pytest.mark.server("two_by_two")
def test_both_engines_and_both_servers_work(server: SpeechServer, local: LocalReference) -> None:
    requests = eight_requests(SERVERS["two_by_two"].checkpoint, seeded=False)
    speak_at_once(server, requests)
    first = server.stats()
    asleep = psutil.Process(first["pid"])  # of two that listen, which may well take every connection
    asleep.suspend()
    try:
        answers = speak_at_once(server, requests)
        second = server.stats()
    finally:
        asleep.resume()
    assert_right("two_by_two", answers, requests, local)
    assert second["pid"] != first["pid"]
    assert min(first["submitted"], second["submitted"]) > 0
    counters = re.findall(r"^vllm:request_success_total{(.*)} ([0-9.]+)$", server.client.get("/metrics").text, re.M)
    finished: dict[str, float] = {}
    for labels, count in counters:
        engine = re.findall('engine="([0-9]+)"', labels)[0]
        finished[engine] = finished.get(engine, 0.0) + float(count)
    assert len(finished) == 2
    assert min(finished.values()) > 0, finished
