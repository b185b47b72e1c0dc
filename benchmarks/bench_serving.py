"""How soon, how fast and how smoothly does a speech server answer under load?

Drives any server with OpenAI's ``POST /v1/audio/speech`` from outside, by the client's clock. Closed loop: a fixed
number of requests in flight (``--concurrency``). Open loop: Poisson arrivals (``--rate``, requests/s), timed from when
a request was due, so that a server that falls behind cannot hide it.

    python -m benchmarks.bench_serving --url http://127.0.0.1:8000 --voice ryan --concurrency 1,8 --rate 2,4

ttfa            time to first audio: the first 20 ms of samples are here, the WAV header not counted [ms]
ttfb            time to the first byte of the body [ms]
rtf             request time / duration of its audio; below 1 is faster than real time
audio_s_per_s   seconds of audio made per second, all requests together
underrun        requests whose play-out, started at first audio, ran dry at least once
cont0, cont50   continuity: share of requests without any gap, and without a gap above 50 ms
gap_max_ms      the longest gap of all requests

The texts, their order, the seeds and the arrival times follow from ``--seed``. Fields other than model, voice, input,
response_format and seed are given, overridden or (null) removed by ``--body``, for example for a server that streams
only when told to: ``--body '{"stream": true}'``. Exits with 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.harness import percentile, report
from benchmarks.playout import AudioMeter, largest_gap_s, time_to_first_audio

TEXTS = (
    "Hello there, how can I help you today?",
    "The train to the coast leaves in twelve minutes from platform four.",
    "Please remember to bring your umbrella, because it will rain in the afternoon.",
    "Once the water boils, add the noodles and let them cook for about eight minutes.",
    "I am not sure that I understand the question; could you say it in other words?",
    "Good morning.",
    "The museum opens at nine, but the new exhibition on the second floor can only be visited after ten o'clock.",
    "她每天早上都会在公园里跑步。",
    "请问最近的地铁站怎么走？我想在六点以前到达机场。",  # noqa: RUF001  Chinese punctuation
    "今天的天气非常好，我们一起去爬山吧。",  # noqa: RUF001
)
CONTINUITY_S = 0.05


@dataclass(frozen=True, slots=True)
class Target:
    """The server and what every request to it has in common."""

    url: str
    fields: dict[str, Any]
    sample_rate_hz: int = 24_000


@dataclass(slots=True)
class Measurement:
    """One request by the client's clock; times in seconds after it was due, ``due_s`` and ``end_s`` absolute."""

    due_s: float
    first_byte_s: float | None = None
    end_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, samples so far)
    sample_rate_hz: int = 24_000
    request_id: str | None = None
    finish_reason: str = "unknown"
    failure: str | None = None

    @property
    def audio_s(self) -> float:
        """Duration of the audio received."""
        return self.arrivals[-1][1] / self.sample_rate_hz if self.arrivals else 0.0


def request_set(count: int, seed: int, texts: Sequence[str] = TEXTS) -> list[dict[str, Any]]:
    """Return ``count`` requests, always the same for the same seed; a longer set begins with the shorter one."""
    rng = random.Random(seed)
    return [{"input": rng.choice(texts), "seed": rng.getrandbits(31)} for _ in range(count)]


def poisson_times_s(count: int, rate: float, seed: int) -> list[float]:
    """Return when each request of an open loop is due: the first at 0, then at exponential distances."""
    rng = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:count]


async def speak(client: aiohttp.ClientSession, target: Target, request: dict[str, Any], due_s: float) -> Measurement:
    """Send one request and time its answer; a failure is recorded, not raised."""
    measured = Measurement(due_s, sample_rate_hz=target.sample_rate_hz)
    body = {name: value for name, value in (request | target.fields).items() if value is not None}
    try:
        async with client.post(f"{target.url}/v1/audio/speech", json=body) as response:
            measured.request_id = response.headers.get("x-request-id")
            measured.finish_reason = response.headers.get("x-finish-reason", "unknown")
            if response.status != 200:
                measured.failure = f"HTTP {response.status}: {(await response.text())[:200]}"
            else:
                await _receive(response, body["response_format"], measured)
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
        measured.failure = f"{type(error).__name__}: {error}"
    measured.end_s = time.perf_counter()
    if measured.failure is None and measured.audio_s == 0.0:
        measured.failure = "no audio"
    return measured


async def _receive(response: aiohttp.ClientResponse, audio_format: str, measured: Measurement) -> None:
    meter = AudioMeter(audio_format, measured.sample_rate_hz)
    async for part in response.content.iter_any():
        now = time.perf_counter() - measured.due_s
        if measured.first_byte_s is None:
            measured.first_byte_s = now
        meter.feed(part)
        if meter.samples:
            measured.arrivals.append((now, meter.samples))
    measured.sample_rate_hz = meter.sample_rate_hz


Speak = Callable[[dict[str, Any], float], Awaitable[Measurement]]


async def closed_loop(speak_one: Speak, requests: Sequence[dict[str, Any]], concurrency: int) -> list[Measurement]:
    """Keep ``concurrency`` requests in flight until all are answered."""
    waiting = iter(requests)

    async def worker() -> list[Measurement]:
        return [await speak_one(request, time.perf_counter()) for request in waiting]

    answered = await asyncio.gather(*(worker() for _ in range(concurrency)))
    return [measured for worker_measured in answered for measured in worker_measured]


async def open_loop(
    speak_one: Speak, requests: Sequence[dict[str, Any]], times_s: Sequence[float]
) -> list[Measurement]:
    """Send each request when it is due, whatever became of those before."""
    start_s = time.perf_counter()

    async def one(request: dict[str, Any], due_s: float) -> Measurement:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        return await speak_one(request, due_s)

    pairs = zip(requests, times_s, strict=True)
    return list(await asyncio.gather(*(one(request, start_s + after_s) for request, after_s in pairs)))


async def add_finish_reasons(client: aiohttp.ClientSession, url: str, measured: Sequence[Measurement]) -> None:
    """Ask the server how each request ended, where no header said so; it stays "unknown" if the server cannot tell."""
    for one in measured:
        if one.failure is None and one.finish_reason == "unknown" and one.request_id:
            async with client.get(f"{url}/v1/audio/speech/{one.request_id}") as response:
                if response.status == 200 and response.content_type == "application/json":
                    one.finish_reason = str((await response.json()).get("finish_reason", "unknown"))


def summarise(load: str, measured: Sequence[Measurement]) -> dict[str, Any]:
    """Return one row of the table."""
    good = [one for one in measured if one.failure is None]
    row: dict[str, Any] = {"load": load, "requests": len(measured), "failed": len(measured) - len(good)}
    if not good:
        return row
    wall_s = max(one.end_s for one in measured) - min(one.due_s for one in measured)
    gaps_s = [largest_gap_s(one.arrivals, one.sample_rate_hz) for one in good]
    row |= _percentiles("ttfa", [time_to_first_audio(one.arrivals, one.sample_rate_hz) * 1e3 for one in good], "_ms")
    row |= _percentiles("ttfb", [one.first_byte_s * 1e3 for one in good if one.first_byte_s is not None], "_ms")
    row |= _percentiles("rtf", [(one.end_s - one.due_s) / one.audio_s for one in good], "")
    row |= {
        "audio_s_per_s": sum(one.audio_s for one in good) / wall_s,
        "underrun": sum(gap > 0.0 for gap in gaps_s),
        "cont0": sum(gap <= 0.0 for gap in gaps_s) / len(good),
        "cont50": sum(gap <= CONTINUITY_S for gap in gaps_s) / len(good),
        "gap_max_ms": max(gaps_s) * 1e3,
    }
    reasons = Counter(one.finish_reason for one in good)
    row["finish"] = ",".join(f"{reason}:{count}" for reason, count in sorted(reasons.items()))
    return row


def _percentiles(name: str, values: Sequence[float], unit: str) -> dict[str, float]:
    ordered = sorted(values)
    return {f"{name}_p{percent}{unit}": percentile(ordered, percent) for percent in (50, 95, 99)}


async def run(options: argparse.Namespace) -> list[Measurement]:
    """Warm up, run every load, report, and return all measurements."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=options.timeout_s, sock_connect=options.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
        target = await _target(client, options)
        texts = _texts(options.texts)
        requests = request_set(options.requests, options.seed, texts)

        async def speak_one(request: dict[str, Any], due_s: float) -> Measurement:
            return await speak(client, target, request, due_s)

        warmup = request_set(options.warmup, options.seed + 1, texts)
        everything = await closed_loop(speak_one, warmup, max([1, *options.concurrency]))
        rows = []
        loads: list[tuple[str, Callable[[], Awaitable[list[Measurement]]]]] = []
        for concurrency in options.concurrency:
            loads.append((f"closed {concurrency}", lambda n=concurrency: closed_loop(speak_one, requests, n)))
        for rate in options.rate:
            times_s = poisson_times_s(len(requests), rate, options.seed)
            loads.append((f"poisson {rate:g}/s", lambda times_s=times_s: open_loop(speak_one, requests, times_s)))
        for load, start in loads:
            print(f"{load}: {len(requests)} requests ...", file=sys.stderr, flush=True)
            measured = await start()
            await add_finish_reasons(client, target.url, measured)
            rows.append(summarise(load, measured))
            everything += measured
    failures = Counter(one.failure for one in everything if one.failure is not None)
    settings = {name: value for name, value in vars(options).items() if name != "url"}
    report("serving", rows, {"url": options.url, "settings": settings, "fields": target.fields, "failures": failures})
    return everything


async def served_model(client: aiohttp.ClientSession, url: str) -> str:
    """Name of the server's first model."""
    async with client.get(f"{url}/v1/models") as response:
        response.raise_for_status()
        return str((await response.json())["data"][0]["id"])


async def _target(client: aiohttp.ClientSession, options: argparse.Namespace) -> Target:
    url = options.url.rstrip("/").removesuffix("/v1")
    model = await served_model(client, url) if options.model is None else options.model
    fields = {"model": model, "voice": options.voice, "response_format": options.format}
    return Target(url, fields | options.body, options.sample_rate_hz)


def _texts(path: Path | None) -> Sequence[str]:
    if path is None:
        return TEXTS
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",") if part]


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server, with or without /v1")
    parser.add_argument("--model", help="served model name; default: the first of /v1/models")
    parser.add_argument("--voice", help="voice of every request")
    parser.add_argument("--format", choices=("pcm", "wav"), default="pcm", help="response_format")
    parser.add_argument("--sample-rate-hz", type=int, default=24_000, help="of pcm, which does not say it")
    parser.add_argument("--body", type=json.loads, default={}, help="JSON object of further fields; null removes one")
    parser.add_argument("--requests", type=int, default=16, help="requests per load")
    parser.add_argument("--concurrency", type=_list_of(int), default=[1, 8], help="closed loops, for example 1,8")
    parser.add_argument("--rate", type=_list_of(float), default=[], help="open loops in requests/s, for example 2,4")
    parser.add_argument("--warmup", type=int, default=2, help="requests before the first load, not reported")
    parser.add_argument("--texts", type=Path, help="file with one text per line instead of the built-in ones")
    parser.add_argument("--seed", type=int, default=0, help="of texts, request seeds and arrival times")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="longest wait for the next bytes")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the benchmark; 1 if a request failed."""
    measured = asyncio.run(run(parse_options()))
    return int(any(one.failure is not None for one in measured))


if __name__ == "__main__":
    sys.exit(main())
