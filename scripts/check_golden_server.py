"""Compare a running server with the official package's golden data: every case of one checkpoint, all at once.

    python scripts/check_golden_server.py --write DIR                  # write the tiny checkpoints, print their keys
    python scripts/check_golden_server.py --url URL --checkpoint KEY   # after `vllm serve DIR/KEY --dtype float32`

For machines where the test suite does not run, such as one with an accelerator only. Codes must be identical and the
waveform within 1e-4; the first mismatch names frame and codebook. Needs float32 (TF32 off). Exits with 1 on a mismatch.
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.parity.golden import GoldenCase, cases, checkpoint_for

WAVEFORM_BOUND = 1e-4


def ask(url: str, case: GoldenCase) -> tuple[np.ndarray, np.ndarray]:
    """Return codes ``[T, 16]`` and samples ``[T*1920]`` of one case as the server makes them."""
    body: dict[str, Any] = {
        "model": "",
        "input": case.text,
        "voice": case.voice or "",
        "language": case.language,
        "text_mode": case.text_mode,
        "temperature": 0,
        "max_new_tokens": case.max_frames,
        "stream_format": "sse",
        "response_format": "pcm",
        "include_codes": True,
    }
    if case.instruct:
        body["instructions"] = case.instruct
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        body["model"] = json.load(answer)["data"][0]["id"]
    request = urllib.request.Request(
        f"{url}/v1/audio/speech", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    pcm = b"".join(base64.b64decode(event["audio"]) for event in events if event["type"] == "speech.audio.delta")
    codes = np.asarray(events[-1]["codes"], dtype=np.int64).reshape(-1, 16)
    return codes, np.frombuffer(pcm, "<i2").astype(np.float32) / 32_767


def compare(url: str, case: GoldenCase) -> dict[str, Any]:
    """Return the verdict on one case."""
    codes, samples = ask(url, case)
    expected, waveform = case.arrays["codes"], case.arrays["waveform"]
    verdict: dict[str, Any] = {"case": case.id, "frames": len(codes), "codes_equal": np.array_equal(codes, expected)}
    if not verdict["codes_equal"]:
        common = min(len(codes), len(expected))
        places = np.argwhere(codes[:common] != expected[:common])
        if len(places):
            frame, codebook = (int(part) for part in places[0])
            found, wanted = int(codes[frame, codebook]), int(expected[frame, codebook])
            verdict["first_mismatch"] = {"frame": frame, "codebook": codebook, "found": found, "expected": wanted}
        verdict["expected_frames"] = len(expected)
    if samples.shape == waveform.shape:
        verdict["waveform_error"] = float(np.abs(samples - waveform).max())
    verdict["passed"] = verdict["codes_equal"] and verdict.get("waveform_error", 1.0) <= WAVEFORM_BOUND
    return verdict


def main() -> int:
    """Write the checkpoints or run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="DIR")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--checkpoint", metavar="KEY")
    options = parser.parse_args()
    known = cases()
    if options.write is not None:
        for case in known:
            checkpoint_for(case, options.write)
        sys.stdout.write("\n".join(sorted({case.checkpoint.key for case in known})) + "\n")
        return 0
    wanted = [case for case in known if case.checkpoint.key == options.checkpoint]
    if not wanted:
        parser.error(
            f"no case for checkpoint {options.checkpoint!r}; known: {sorted({c.checkpoint.key for c in known})}"
        )
    with concurrent.futures.ThreadPoolExecutor(len(wanted)) as pool:
        verdicts = list(pool.map(lambda case: compare(options.url, case), wanted))
    sys.stdout.write(json.dumps(verdicts) + "\n")
    return 0 if all(verdict["passed"] for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
