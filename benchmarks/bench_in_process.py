"""How fast is a package that speaks in its own process, one request at a time? For the same table as bench_serving.

Drives faster-qwen3-tts (``pip install faster-qwen3-tts``, NVIDIA only) over a CustomVoice checkpoint, with the texts of
bench_serving; every chunk is counted when it is host samples. ``ttfa`` has no network in it, so it flatters the package
by what a server adds.

    python -m benchmarks.bench_in_process --model DIR --voice ryan --chunks 1 8 --requests 8
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.bench_serving import Measurement, request_set, summarise
from benchmarks.harness import report

SpeakInProcess = Callable[[str, int], Iterator[tuple[Any, int, dict[str, Any]]]]


def load(options: argparse.Namespace) -> SpeakInProcess:
    """Load the package's model; the function that is returned streams one text in chunks of so many frames."""
    from faster_qwen3_tts import FasterQwen3TTS

    model = FasterQwen3TTS.from_pretrained(options.model, device=options.device, dtype=options.dtype)
    model.warmup()

    def speak(text: str, chunk: int) -> Iterator[tuple[Any, int, dict[str, Any]]]:
        return iter(
            model.generate_custom_voice_streaming(
                text, options.voice, options.language, max_new_tokens=options.frames, chunk_size=chunk
            )
        )

    return speak


def measure(speak: SpeakInProcess, text: str, chunk: int) -> Measurement:
    """Time one request chunk by chunk; a failure is recorded, not raised."""
    measured = Measurement(time.perf_counter(), finish_reason="length")
    samples = 0
    try:
        for audio, rate_hz, _ in speak(text, chunk):
            samples += np.asarray(audio).size
            now = time.perf_counter() - measured.due_s
            measured.sample_rate_hz = rate_hz
            measured.first_byte_s = now if measured.first_byte_s is None else measured.first_byte_s
            measured.arrivals.append((now, samples))
    except Exception as error:  # noqa: BLE001  whatever another package raises is a result here
        measured.failure = f"{type(error).__name__}: {error}"
    measured.end_s = time.perf_counter()
    if measured.failure is None and not samples:
        measured.failure = "no audio"
    return measured


def run(options: argparse.Namespace, speak: SpeakInProcess) -> list[Measurement]:
    """Warm up, measure every chunk size, report."""
    requests = request_set(options.requests, options.seed)
    rows, everything = [], []
    for chunk in options.chunks:
        for request in request_set(options.warmup, options.seed + 1):
            measure(speak, request["input"], chunk)
        measured = [measure(speak, request["input"], chunk) for request in requests]
        rows.append(summarise(f"in process, chunks of {chunk}", measured))
        everything += measured
    failures = sorted({one.failure for one in everything if one.failure is not None})
    report("in process", rows, {"settings": vars(options), "failures": failures})
    return everything


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a CustomVoice checkpoint")
    parser.add_argument("--voice", required=True)
    parser.add_argument("--language", default="English")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 8], help="frames in a chunk")
    parser.add_argument("--frames", type=int, default=125, help="longest answer, in frames of 80 ms")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> int:
    """Run the benchmark; 1 if a request failed."""
    options = parse_options()
    return int(any(one.failure is not None for one in run(options, load(options))))


if __name__ == "__main__":
    sys.exit(main())
