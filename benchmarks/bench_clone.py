"""What does a cloned voice cost until the first audio, by how the server comes to know it?

Drives one server of a Base checkpoint from outside, one request after the other, by the client's clock, with the same
texts for every source of the voice:

registered  a voice of the registry: reference text and codes in the prompt, nothing to encode
known       the recording is sent with the request, and the server has encoded it before
new         the recording is sent with the request, and it is a different one every time
embedding   a list of numbers: no reference in the prompt
preset      a preset voice of another server (``--preset-url``, ``--preset-voice``), for comparison

    python -m benchmarks.bench_clone --url http://127.0.0.1:8000 --ref-seconds 3 --requests 16

ttfa  time to first audio: the first 20 ms of samples are here [ms]
ttfb  time to the first byte of the body [ms]

The recordings are synthetic. The voice that is registered for the measurement is deleted afterwards. Exits with 1 if a
request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import sys
import time
import wave
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import numpy as np

from benchmarks.bench_serving import Measurement, Target, request_set, speak, summarise
from benchmarks.harness import report

RATE_HZ = 24_000
NAME = "bench-clone"
REF_TEXT = "Good morning, this is the reference."
SHOWN = ("load", "requests", "failed", "ttfa_p50_ms", "ttfa_p95_ms", "ttfb_p50_ms", "ttfb_p95_ms")


def recording(seconds: float, seed: int) -> bytes:
    """A pulsing harmonic tone over noise as a WAV file; another seed, another voice."""
    rng = np.random.default_rng(seed)
    time_s = np.arange(int(seconds * RATE_HZ)) / RATE_HZ
    pitch_hz = rng.uniform(90, 240)
    tone = sum(np.sin(2 * np.pi * pitch_hz * partial * time_s) / partial for partial in range(1, 9))
    mixed = 0.2 * tone * (0.4 + 0.6 * np.sin(2 * np.pi * 3 * time_s) ** 2) + 0.01 * rng.standard_normal(len(time_s))
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE_HZ)
        out.writeframes((np.clip(mixed, -1, 1) * 32_767).astype("<i2").tobytes())
    return file.getvalue()


def reference(seconds: float, seed: int) -> dict[str, str]:
    """The fields of a request that carry a recording."""
    data = base64.b64encode(recording(seconds, seed)).decode()
    return {"ref_audio": f"data:audio/wav;base64,{data}", "ref_text": REF_TEXT}


async def register(client: aiohttp.ClientSession, url: str, seconds: float) -> None:
    """Register the voice of recording 0."""
    form = {"name": NAME, "consent": True, "overwrite": True, "ref_text": REF_TEXT}
    body = form | {"audio": reference(seconds, 0)["ref_audio"]}
    async with client.post(f"{url}/v1/audio/voices", json=body) as response:
        if response.status != 201:
            raise SystemExit(f"the voice could not be registered: {response.status} {await response.text()}")


async def embedding_width(client: aiohttp.ClientSession, url: str) -> int:
    """What the server says that it needs."""
    body = {"input": "Hello.", "speaker_embedding": [0.0]}
    async with client.post(f"{url}/v1/audio/speech", json=body) as response:
        message = str((await response.json())["error"]["message"])
    return int(message.partition("needs ")[2].split()[0])


async def run(options: argparse.Namespace) -> list[Measurement]:
    """Warm up, measure every source of a voice, report, and return all measurements."""
    url, seconds = options.url.rstrip("/"), options.ref_seconds
    timeout = aiohttp.ClientTimeout(total=None, sock_read=options.timeout_s)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        await register(client, url, seconds)
        numbers = [0.01] * await embedding_width(client, url)
        sources: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
            "registered": (url, lambda _: {"voice": NAME}),
            "known": (url, lambda _: reference(seconds, 0)),
            "new": (url, lambda index: reference(seconds, options.seed + 1_000 + index)),
            "embedding": (url, lambda _: {"speaker_embedding": numbers}),
        }
        if options.preset_url is not None:
            sources["preset"] = (options.preset_url.rstrip("/"), lambda _: {"voice": options.preset_voice})
        rows, everything = [], []
        for name, (where, fields_of) in sources.items():
            target = Target(where, {"response_format": "pcm", "max_new_tokens": options.frames})
            requests = request_set(options.warmup + options.requests, options.seed)
            bodies = [request | fields_of(index) for index, request in enumerate(requests)]
            measured = [await speak(client, target, body, time.perf_counter()) for body in bodies]
            row = summarise(name, measured[options.warmup :])
            rows.append({column: row[column] for column in SHOWN if column in row})
            everything += measured
        async with client.delete(f"{url}/v1/audio/voices/{NAME}"):
            pass
    failures = Counter(one.failure for one in everything if one.failure is not None)
    report("clone", rows, {"url": url, "settings": vars(options), "failures": failures})
    return everything


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="a server of a Base checkpoint")
    parser.add_argument("--preset-url", help="a server of a CustomVoice checkpoint, for comparison")
    parser.add_argument("--preset-voice", default="ryan")
    parser.add_argument("--ref-seconds", type=float, default=3.0, help="length of the recordings")
    parser.add_argument("--frames", type=int, default=13, help="frames of 80 ms that every request makes")
    parser.add_argument("--requests", type=int, default=16, help="requests per source")
    parser.add_argument("--warmup", type=int, default=2, help="requests before, per source, not reported")
    parser.add_argument("--seed", type=int, default=0, help="of texts and new recordings")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="longest wait for the next bytes")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the benchmark; 1 if a request failed."""
    measured = asyncio.run(run(parse_options()))
    return int(any(one.failure is not None for one in measured))


if __name__ == "__main__":
    sys.exit(main())
