"""Does a speech server keep anything of the requests it has served, finished, or lost?

Sends ``--requests`` requests, ``--concurrency`` at a time; a share of the clients (``--leave``) hang up, each after a
random part of the audio it could get. Reports the memory of the workers and what they still hold after each tenth, when
all clients of that tenth are gone.

held            slots, streams, chunks and inboxes that are not free although nothing runs; must be 0
worker_mib      resident memory of the first worker [MiB]
device_free_mib memory of its device that nobody has taken [MiB]
grown_mib       how much less of that there is than after the first tenth [MiB]; memory that stays flat does not leak

    python -m benchmarks.bench_soak --url http://127.0.0.1:8000 --voice ryan --requests 2000

Which clients leave, and when, follows from ``--seed``. Exits with 1 if a request failed that nobody left, or if
something is held at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.bench_serving import request_set
from benchmarks.harness import report

PARTS = 10
HELD_PER_WORKER = ("requests_open", "streams_open", "chunks_queued", "tickets_open", "voices_open")
IDLE_S = 30.0
BYTES_PER_FRAME = 3_840


@dataclass(frozen=True, slots=True)
class Plan:
    """One request, and after how many bytes its client leaves; None: it stays."""

    body: dict[str, Any]
    leaves_after: int | None


def plans(options: argparse.Namespace) -> list[Plan]:
    """All requests in order; the same for the same seed."""
    rng = random.Random(options.seed)
    fields = {"voice": options.voice, "response_format": "pcm", "max_new_tokens": options.frames} | options.body
    most = options.frames * BYTES_PER_FRAME
    bodies = [{k: v for k, v in (one | fields).items() if v is not None} for one in request_set(options.requests, 0)]
    return [Plan(body, rng.randrange(most) if rng.random() < options.leave else None) for body in bodies]


async def speak(client: aiohttp.ClientSession, url: str, plan: Plan) -> str | None:
    """Send one request and read until its client has enough; what went wrong, or None."""
    received = 0
    try:
        async with client.post(f"{url}/v1/audio/speech", json=plan.body) as response:
            if response.status != 200:
                return f"HTTP {response.status}: {(await response.text())[:200]}"
            async for part in response.content.iter_any():
                received += len(part)
                if plan.leaves_after is not None and received >= plan.leaves_after:
                    response.close()
                    return None
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return None if received else "no audio"


async def serve(client: aiohttp.ClientSession, options: argparse.Namespace, part: Sequence[Plan]) -> list[str]:
    """Run a part of the plans, some at a time; returns failures."""
    waiting = iter(part)

    async def worker() -> list[str | None]:
        return [await speak(client, options.url, plan) for plan in waiting]

    answered = await asyncio.gather(*(worker() for _ in range(options.concurrency)))
    return [failure for failures in answered for failure in failures if failure]


def held_by(stats: Mapping[str, Any]) -> dict[str, int]:
    """Every counter of a server that must be zero when no request runs."""
    counters = {name: stats[name] for name in ("running", "inboxes_open")}
    for index, worker in enumerate(stats["workers"]):
        for name in HELD_PER_WORKER:
            counters[f"worker {index} {name}"] = worker[name]
        counters[f"worker {index} slots taken"] = worker["slots"] - worker["slots_free"]
    return counters


def held(stats: Mapping[str, Any]) -> int:
    """How much is held that should be free while nothing runs."""
    return sum(held_by(stats).values())


async def idle_stats(client: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """The server's counters once it holds nothing, or after a while in any case."""
    deadline = time.monotonic() + IDLE_S
    while True:
        async with client.get(f"{url}/v1/audio/stats") as response:
            response.raise_for_status()
            stats: dict[str, Any] = await response.json()
        if not held(stats) or time.monotonic() > deadline:
            return stats
        await asyncio.sleep(0.1)


async def run(options: argparse.Namespace) -> bool:
    """Run all parts and report; whether all is well."""
    everything = plans(options)
    size = max(1, len(everything) // PARTS)
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    timeout = aiohttp.ClientTimeout(total=None, sock_read=options.timeout_s)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as client:
        for first in range(0, len(everything), size):
            part = everything[first : first + size]
            begun = time.perf_counter()
            failures += await serve(client, options, part)
            seconds = time.perf_counter() - begun
            stats = await idle_stats(client, options.url)
            worker = stats["workers"][0]
            free = worker["free_device_bytes"] / 2**20
            rows.append(
                {
                    "requests": first + len(part),
                    "left": sum(plan.leaves_after is not None for plan in part),
                    "failed": len(failures),
                    "requests_per_s": len(part) / seconds,
                    "held": held(stats),
                    "worker_mib": worker["rss_bytes"] / 2**20,
                    "device_free_mib": free,
                    "grown_mib": (rows[0]["device_free_mib"] if rows else free) - free,
                }
            )
    report("soak", rows, {"url": options.url, "settings": vars(options), "failures": sorted(set(failures))})
    return not failures and not rows[-1]["held"]


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--voice", help="voice of every request")
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--leave", type=float, default=0.4, help="share of clients that hang up early")
    parser.add_argument("--frames", type=int, default=60, help="longest answer, in frames of 80 ms")
    parser.add_argument("--body", type=json.loads, default={}, help="JSON object of further fields; null removes one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=120.0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(run(parse_options())) else 1)
