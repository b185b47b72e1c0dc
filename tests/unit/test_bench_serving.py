"""The serving benchmark's arithmetic: play-out, sample counting, percentiles, loads. No server, no clock."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from benchmarks.bench_serving import (
    Measurement,
    closed_loop,
    open_loop,
    parse_options,
    poisson_times_s,
    request_set,
    summarise,
)
from benchmarks.playout import AudioMeter, gaps_s, largest_gap_s, time_to_first_audio
from qwen3tts_hw.serving.wav import wav_header

RATE = 24_000


def seconds(*pairs: tuple[float, float]) -> list[tuple[float, int]]:
    """Arrivals from (time, seconds of audio so far)."""
    return [(time_s, round(audio_s * RATE)) for time_s, audio_s in pairs]


def test_audio_that_arrives_before_it_is_needed_has_no_gap() -> None:
    assert gaps_s(seconds((0.1, 0.08), (0.15, 0.16), (0.2, 1.0)), RATE) == []


def test_audio_that_arrives_just_in_time_has_no_gap() -> None:
    assert gaps_s(seconds((0.0, 0.5), (0.5, 1.0), (1.0, 1.5)), RATE) == []


def test_a_late_chunk_is_a_gap_of_its_lateness() -> None:
    assert gaps_s(seconds((0.1, 0.08), (0.28, 0.16)), RATE) == pytest.approx([0.1])


def test_a_gap_delays_everything_after_it() -> None:
    # 80 ms are played from 0.0; the next 80 ms come at 0.2 (gap 120 ms) and last until 0.28, when the rest is there.
    assert gaps_s(seconds((0.0, 0.08), (0.2, 0.16), (0.28, 0.24)), RATE) == pytest.approx([0.12])
    assert gaps_s(seconds((0.0, 0.08), (0.2, 0.16), (0.3, 0.24)), RATE) == pytest.approx([0.12, 0.02])


def test_an_arrival_without_samples_neither_ends_nor_makes_a_gap() -> None:
    assert gaps_s(seconds((0.0, 0.08), (0.5, 0.08), (0.6, 0.16), (0.9, 0.16)), RATE) == pytest.approx([0.52])


def test_play_out_waits_for_twenty_milliseconds() -> None:
    arrivals = [(0.1, 479), (0.3, 480), (0.31, 4_800)]
    assert time_to_first_audio(arrivals, RATE) == 0.3
    assert gaps_s(arrivals, RATE) == []


def test_audio_shorter_than_twenty_milliseconds_starts_when_it_is_all_there() -> None:
    assert time_to_first_audio([(0.1, 100), (0.2, 200)], RATE) == 0.2
    assert largest_gap_s([(0.1, 100), (0.2, 200)], RATE) == 0.0


@pytest.mark.parametrize("step", [1, 7, 44, 1_000])
def test_samples_of_a_wav_are_counted_behind_its_header_however_it_is_cut(step: int) -> None:
    body = wav_header(sample_rate_hz=16_000) + bytes(2 * 960)
    meter = AudioMeter("wav", RATE)
    for at in range(0, len(body), step):
        meter.feed(body[at : at + step])
        assert meter.samples == max(0, min(at + step, len(body)) - 44) // 2
    assert (meter.samples, meter.sample_rate_hz) == (960, 16_000)


def test_further_wav_chunks_before_the_data_are_skipped() -> None:
    header = wav_header()
    meter = AudioMeter("wav", RATE)
    meter.feed(header[:36] + b"LIST\x03\x00\x00\x00abc\x00" + header[36:] + bytes(10))
    assert meter.samples == 5


def test_pcm_is_all_samples_and_half_a_sample_is_none() -> None:
    meter = AudioMeter("pcm", RATE)
    meter.feed(bytes(5))
    assert meter.samples == 2
    meter.feed(bytes(1))
    assert meter.samples == 3


def test_a_body_that_is_no_wav_is_refused() -> None:
    with pytest.raises(ValueError, match="not a WAV file"):
        AudioMeter("wav", RATE).feed(b'{"error": {}}')


def measurement(first_audio_s: float, audio_s: float = 1.0, total_s: float = 0.5, gap_s: float = 0.0) -> Measurement:
    """A request whose second half comes ``gap_s`` too late (0: early)."""
    second_s = first_audio_s + audio_s / 2 + gap_s if gap_s else first_audio_s
    arrivals = seconds((first_audio_s, audio_s / 2), (second_s, audio_s))
    return Measurement(10.0, first_byte_s=first_audio_s / 2, end_s=10.0 + total_s, arrivals=arrivals)


def test_a_row_of_the_table() -> None:
    measured = [measurement(index / 1_000) for index in range(1, 101)]
    for one in measured[:25]:
        one.finish_reason = "stop"
    row = summarise("closed 8", measured)
    assert (row["load"], row["requests"], row["failed"]) == ("closed 8", 100, 0)
    assert row["ttfa_p50_ms"] == pytest.approx(50.5)
    assert row["ttfa_p95_ms"] == pytest.approx(95.05)
    assert row["ttfa_p99_ms"] == pytest.approx(99.01)
    assert row["ttfb_p50_ms"] == pytest.approx(25.25)
    assert row["rtf_p50"] == pytest.approx(0.5)
    assert row["audio_s_per_s"] == pytest.approx(100 / 0.5)
    assert row["finish"] == "stop:25,unknown:75"


def test_continuity_counts_requests_by_their_largest_gap() -> None:
    measured = [measurement(0.1), measurement(0.1, gap_s=0.03), measurement(0.1, gap_s=0.06), measurement(0.1)]
    row = summarise("poisson 2/s", measured)
    assert (row["underrun"], row["cont0"], row["cont50"]) == (2, 0.5, 0.75)
    assert row["gap_max_ms"] == pytest.approx(60.0)


def test_failures_are_counted_and_left_out_of_the_figures() -> None:
    failed = Measurement(10.0, end_s=10.2, failure="HTTP 503")
    row = summarise("closed 1", [measurement(0.1), failed])
    assert (row["requests"], row["failed"], row["cont0"]) == (2, 1, 1.0)
    assert row["ttfa_p99_ms"] == pytest.approx(100.0)
    assert summarise("closed 1", [failed]) == {"load": "closed 1", "requests": 1, "failed": 1}


def test_the_request_set_follows_from_the_seed() -> None:
    assert request_set(8, 3) == request_set(8, 3)
    assert request_set(8, 3)[:4] == request_set(4, 3)
    assert request_set(8, 3) != request_set(8, 4)


def test_poisson_arrivals_have_the_rate_and_follow_from_the_seed() -> None:
    times_s = poisson_times_s(4_000, 20.0, 1)
    assert times_s[0] == 0.0
    assert times_s == sorted(times_s) == poisson_times_s(4_000, 20.0, 1)
    assert 4_000 / times_s[-1] == pytest.approx(20.0, rel=0.1)
    assert poisson_times_s(0, 1.0, 0) == []


def test_a_closed_loop_keeps_its_number_in_flight_and_answers_all() -> None:
    in_flight = [0]
    seen: list[int] = []

    async def speak_one(request: dict[str, Any], due_s: float) -> Measurement:
        in_flight[0] += 1
        seen.append(in_flight[0])
        await asyncio.sleep(0)
        in_flight[0] -= 1
        return Measurement(due_s, request_id=request["input"])

    requests = [{"input": str(index)} for index in range(20)]
    measured = asyncio.run(closed_loop(speak_one, requests, 4))
    assert sorted(int(one.request_id or "") for one in measured) == list(range(20))
    assert max(seen) == 4


def test_an_open_loop_does_not_wait_for_answers() -> None:
    started: list[str] = []
    all_started = asyncio.Event()

    async def speak_one(request: dict[str, Any], due_s: float) -> Measurement:
        started.append(request["input"])
        if len(started) == 3:
            all_started.set()
        await all_started.wait()
        return Measurement(due_s)

    measured = asyncio.run(open_loop(speak_one, [{"input": text} for text in "abc"], [0.0, 0.001, 0.002]))
    assert started == ["a", "b", "c"]
    assert measured[2].due_s - measured[0].due_s == pytest.approx(0.002)


def test_options() -> None:
    options = parse_options(["--concurrency", "1,2,4", "--rate", "0.5,2", "--body", json.dumps({"seed": None})])
    assert (options.concurrency, options.rate, options.body) == ([1, 2, 4], [0.5, 2.0], {"seed": None})
