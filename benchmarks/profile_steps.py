"""Where does the time of a serving step go, and does the host ever wait for the device?

Puts load on a server that was started with vLLM's profiler configured (but not running), lets it record some of the
engine's steps, and reads the trace that the worker writes. What recording costs is part of every figure, so times here
tell shares, not speed.

    vllm serve … --profiler-config '{"profiler": "torch", "torch_profiler_dir": "/tmp/trace", "ignore_frontend": true}'
    python -m benchmarks.profile_steps --url http://127.0.0.1:8000 --traces /tmp/trace --voice ryan --concurrency 64

A row per part of a step: kernels of the frame step and of the codec are known by the graph or the stream they ran in,
everything else is the talker's and vLLM's. ``busy_ms`` counts overlapping work once, ``kernel_ms`` each kernel in full.
Behind the parts come the kernels that take most time, and every call in which the host waited, with the line of this
package that made it if there is one (``torch_profiler_with_stack``, on by default in vLLM).
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import sys
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.bench_serving import Target, closed_loop, request_set, served_model, speak
from benchmarks.harness import report

Event = Mapping[str, Any]

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CALLS = ("cuda_runtime", "cuda_driver")
FRAME_MARK = "begin_frame"  # once per frame step
CODEC_MARK = "look_up"  # once per codec step
WAITS = ("Synchronize", "StreamWaitValue")
PACKAGE = "qwen3tts_hw/"
TOP_KERNELS = 12


def read_trace(path: Path) -> list[Event]:
    """The complete events of a trace in Chrome's format, gzipped or not."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def busy_us(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans ``(start, end)``."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


class Trace:
    """What one worker did between its first and its last frame step; times in microseconds."""

    def __init__(self, events: Sequence[Event]) -> None:
        device = [event for event in events if event.get("cat") in DEVICE_WORK]
        marks = sorted(event["ts"] for event in device if FRAME_MARK in event["name"])
        if len(marks) < 2:
            raise ValueError(f"the trace holds {len(marks)} frame steps; let the profiler record at least two")
        self.first, self.last, self.steps = marks[0], marks[-1], len(marks) - 1
        self.device = [event for event in device if self.first <= event["ts"] < self.last]
        self.host = [e for e in events if e.get("cat") in HOST_CALLS and self.first <= e["ts"] < self.last]
        self._frames = {e["args"].get("correlation") for e in device if FRAME_MARK in e["name"]}
        self._codecs = {e["args"].get("stream") for e in device if CODEC_MARK in e["name"]}
        self._lines: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
        for event in sorted(events, key=lambda event: event["ts"]):
            if event.get("cat") == "python_function" and PACKAGE in event["name"]:
                self._lines[event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))

    def part(self, event: Event) -> str:
        """Which part of a step a piece of device work belongs to."""
        if event["args"].get("stream") in self._codecs:
            return "codec"
        if event["args"].get("correlation") in self._frames:
            return "frame step"
        return "talker and the rest"

    def parts(self) -> list[dict[str, Any]]:
        """One row per part, one for all, and one for the time in which the device did nothing."""
        groups: dict[str, list[Event]] = defaultdict(list)
        for event in self.device:
            groups[self.part(event)].append(event)
        rows = [self._row(name, groups[name]) for name in sorted(groups)]
        rows.append(self._row("all", self.device))
        step_ms = (self.last - self.first) / self.steps / 1e3
        rows.append({"what": "step", "busy_ms": step_ms})
        rows.append({"what": "idle", "busy_ms": step_ms - rows[-2]["busy_ms"]})
        return rows

    def top_kernels(self, count: int = TOP_KERNELS) -> list[dict[str, Any]]:
        """The kernels of each part that take most time, all runs of one name together."""
        groups: dict[tuple[str, str], list[Event]] = defaultdict(list)
        for event in self.device:
            groups[self.part(event), event["name"].split("(")[0][:80]].append(event)
        parts: Counter[str] = Counter()
        rows = []
        for (part, name), events in sorted(groups.items(), key=lambda item: -sum(e["dur"] for e in item[1])):
            parts[part] += 1
            if parts[part] <= count:
                rows.append(self._row(f"{part}: {name}", events))
        return rows

    def waits(self) -> list[dict[str, Any]]:
        """Calls in which the host waited for the device, by name and by this package's line, if one made them."""
        groups: dict[tuple[str, str], list[Event]] = defaultdict(list)
        for event in self.host:
            if any(word in event["name"] for word in WAITS) and "Query" not in event["name"]:
                groups[event["name"], self._line(event)].append(event)
        return [
            {"what": name, "line": line, "calls": len(found) / self.steps, "busy_ms": self._ms(found)}
            for (name, line), found in sorted(groups.items())
        ]

    def unpinned_copies(self) -> list[dict[str, Any]]:
        """Copies from or to memory that is not pinned: the host waits for these, too."""
        groups: dict[str, list[Event]] = defaultdict(list)
        for event in self.device:
            if "Pageable" in event["name"]:
                groups[event["name"]].append(event)
        return [self._row(name, found) for name, found in sorted(groups.items())]

    def _line(self, event: Event) -> str:
        """The innermost function of this package around a host call."""
        lines = self._lines.get(event["tid"], [])
        for start, end, name in reversed(lines[: bisect_right(lines, (event["ts"], float("inf"), ""))]):
            if start <= event["ts"] < end:
                return name[name.index(PACKAGE) :]
        return ""

    def _row(self, what: str, events: Sequence[Event]) -> dict[str, Any]:
        spans = [(event["ts"], event["ts"] + event["dur"]) for event in events]
        return {
            "what": what,
            "calls": len(events) / self.steps,
            "busy_ms": busy_us(spans) / self.steps / 1e3,
            "kernel_ms": self._ms(events),
        }

    def _ms(self, events: Iterable[Event]) -> float:
        return sum(event["dur"] for event in events) / self.steps / 1e3


def newest_trace(folder: Path, since_s: float, timeout_s: float = 120.0) -> Path:
    """Wait for a worker's trace that is younger than ``since_s`` and complete; raise TimeoutError if none comes."""
    deadline, size = time.time() + timeout_s, -1
    while time.time() < deadline:
        found = [path for path in folder.glob("*.json*") if path.stat().st_mtime > since_s]
        found = [path for path in found if "async_llm" not in path.name]
        if found:
            newest = max(found, key=lambda path: path.stat().st_mtime)
            if newest.stat().st_size == size:
                return newest
            size = newest.stat().st_size
        time.sleep(1.0)
    raise TimeoutError(f"no trace appeared in {folder}; was the server started with --profiler-config?")


async def record(options: argparse.Namespace) -> Path:
    """Put load on the server, record for a while in the middle of it, and return the trace's path."""
    url, started_s = options.url.rstrip("/"), time.time()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        fields = {"model": await served_model(client, url), "voice": options.voice, "response_format": "pcm"}
        target = Target(url, fields | options.body)
        requests = request_set(2 * options.concurrency, options.seed)
        load = asyncio.create_task(
            closed_loop(lambda r, due_s: speak(client, target, r, due_s), requests, options.concurrency)
        )
        await asyncio.sleep(options.after_s)
        async with client.post(f"{url}/start_profile") as response:
            response.raise_for_status()
        await asyncio.sleep(options.seconds)
        async with client.post(f"{url}/stop_profile") as response:
            response.raise_for_status()
        await load
    return newest_trace(options.traces, started_s)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that was started with --profiler-config")
    parser.add_argument("--traces", type=Path, help="its torch_profiler_dir")
    parser.add_argument("--read", type=Path, help="only read this trace")
    parser.add_argument("--voice", help="voice of every request")
    parser.add_argument("--body", type=json.loads, default={}, help="JSON object of further fields")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--after-s", type=float, default=1.0, help="load before recording starts")
    parser.add_argument("--seconds", type=float, default=0.3, help="how long to record")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.read is None and (options.url is None or options.traces is None):
        parser.error("name a trace to read, or a server (--url) and its folder of traces (--traces)")
    return options


def main() -> int:
    """Record, read, report."""
    options = parse_options()
    path = options.read or asyncio.run(record(options))
    trace = Trace(read_trace(path))
    rows = [*trace.parts(), *trace.top_kernels(), *trace.waits(), *trace.unpinned_copies()]
    settings = {name: value for name, value in vars(options).items() if name not in ("url", "traces", "read")}
    report("steps of the engine", rows, {"steps": trace.steps, "settings": settings})
    return 0


if __name__ == "__main__":
    sys.exit(main())
