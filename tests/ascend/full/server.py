"""A real ``vllm serve`` over vllm-ascend on the emulated device: started in a group of its own, always stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import numpy as np

START_DEADLINE_S = 600.0
ANSWER_DEADLINE_S = 300.0
# vllm-ascend fuses norms and rotation of queries and keys by a Triton kernel; there is no triton-ascend in the bed.
WITHOUT_TRITON = json.dumps({"ascend_compilation_config": {"fuse_qknorm_rope": False}})
TEXTS = (
    "Hello world, this is it.",
    "One two three.",
    "A rather longer sentence, with commas, to be spoken slowly.",
    "Hi.",
    "Numbers: 1 2 3 4 5.",
    "Good morning everybody.",
    "x",
    "The quick brown fox jumps over the lazy dog.",
)


@dataclass(frozen=True)
class Wanted:
    """One request; every other one is greedy, the others are sampled with their number as seed.

    ``frames`` is its limit, by default a different one for each number.
    """

    number: int
    frames: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        """What is sent."""
        return {
            "input": TEXTS[self.number % len(TEXTS)],
            "voice": "serena",
            "temperature": 0.9 if self.number % 2 else 0.0,
            "seed": self.number,
            "max_new_tokens": self.frames or 10 + self.number,
            "include_codes": True,
            "response_format": "pcm",
        }


@dataclass(frozen=True)
class Answer:
    """What came back: ``codes [T, 16]``, ``pcm [T*1920] float32``."""

    codes: np.ndarray
    pcm: np.ndarray


class Server:
    """``vllm serve`` in one graph mode; a context manager. ``mode`` "eager" or vLLM's name of a graph mode."""

    def __init__(self, checkpoint: Path, mode: str, dtype: str, **environment: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="q3-ascend-", dir="/tmp"))
        self.log = self.folder / "log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=ANSWER_DEADLINE_S)
        graphs = json.dumps({"cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4, 8]})
        self._command = [
            str(Path(sys.executable).with_name("vllm")), "serve", str(checkpoint), "--dtype", dtype, "--port",
            str(self.port), "--host", "127.0.0.1", "--max-model-len", "512", "--max-num-seqs", "8",
            "--gpu-memory-utilization", "0.3", "--additional-config", WITHOUT_TRITON,
            *(["--enforce-eager"] if mode == "eager" else ["--compilation-config", graphs]),
        ]  # fmt: skip
        folders = {"ASCEND_EMULATOR_REPORT": str(self.folder), "VLLM_CACHE_ROOT": str(self.folder / "cache")}
        self._environment = {**os.environ, **folders, **environment}

    def __enter__(self) -> Server:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_DEADLINE_S
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                raise RuntimeError(f"vllm serve did not start:\n{self.log.read_text(errors='replace')[-6000:]}")
            time.sleep(0.5)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)

    def speak(self, wanted: Wanted) -> Answer:
        """Send one request and read its audio and codes."""
        answer = self.client.post("/v1/audio/speech", json=wanted.body)
        assert answer.status_code == 200, f"{answer.text}\n{self.log.read_text(errors='replace')[-6000:]}"
        outcome = self.client.get(f"/v1/audio/speech/{answer.headers['x-request-id']}").json()
        pcm = np.frombuffer(answer.content, np.int16).astype(np.float32) / 32768
        return Answer(np.array(outcome["codes"]), pcm)

    def speak_together(self, count: int) -> list[Answer]:
        """Send ``count`` requests at once."""
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(self.speak, map(Wanted, range(count))))

    def worker(self) -> dict[str, Any]:
        """The worker's own counters."""
        return self.client.get("/v1/audio/stats").json()["workers"][0]

    def device_counts(self) -> Counter[str]:
        """What the worker did to the emulated device so far."""
        time.sleep(1.0)  # more than a report's period
        return Counter(json.loads((self.folder / f"{self.worker()['pid']}.json").read_text()))

    def _healthy(self) -> bool:
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False
