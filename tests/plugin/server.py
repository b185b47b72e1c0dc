"""A real ``vllm serve`` for tests: started apart from them, spoken to over HTTP, always stopped.

Owns the process and what it leaves behind. It knows the speech routes as a client does, and vLLM's development route
``/collective_rpc``, which tests use to look into the workers. Nothing of vLLM runs in the tests' own process.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx
import psutil

from benchmarks.bench_soak import held_by
from tests.plugin.answers import Speech, read_events

REPOSITORY = Path(__file__).resolve().parents[2]
START_DEADLINE_S = 600.0  # 20 to 60 s where the machine is free; a busy one is no failure
STOP_DEADLINE_S = 60.0
ANSWER_DEADLINE_S = 300.0
ENVIRONMENT = {
    "VLLM_PLUGINS": "qwen3tts_hw",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by default every server would bind to the same core
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /collective_rpc
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
ARGUMENTS = ("--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1")
# Its log; what vLLM leaves itself: the file that workers meet in, socket names, torch's compile cache.
_OF_VLLM = re.compile(r"server\.log|vllm_dist_|torchinductor_|[0-9a-f]{8}-[0-9a-f-]{27}$")
# A voice registry is the operator's and stays; nothing half written may be in it.
_OF_REGISTRY = re.compile(r"voices/(index\.json|\.lock|objects/[0-9a-f]{64}\.safetensors|objects)$")
_OWN_PREFIXES = ("VLLM_", "QWEN3TTS_")
_T = TypeVar("_T")


def serve_command(checkpoint: Path, *arguments: str) -> list[str]:
    """Return the command line of ``vllm serve`` in the environment that runs the tests."""
    return [str(Path(sys.executable).with_name("vllm")), "serve", str(checkpoint), *ARGUMENTS, *arguments]


def serve_environment(temporary: Path, **changes: str) -> dict[str, str]:
    """Return the tests' environment without their own vLLM settings, with ours, and ``temporary`` for files."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OWN_PREFIXES)}
    search = [str(REPOSITORY), kept.get("PYTHONPATH", "")]
    kept |= {"TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(part for part in search if part)}
    return kept | ENVIRONMENT | changes


def wait_for(what: Callable[[], _T], *, seconds: float, message: str, every: float = 0.02) -> _T:
    """Return the first true value of ``what``; fail with the message and the last value after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, f"{message} after {seconds:.0f} s; last seen: {value!r}"
        time.sleep(every)
    return value


@dataclass(frozen=True)
class Remains:
    """How a server ended and what it left behind."""

    returncode: int
    seconds: float
    processes: list[str]
    files: list[str]
    shared_memory: list[str]

    def assert_nothing(self) -> None:
        """The server ended by itself, without an error, and took everything with it."""
        assert self.returncode == 0
        assert self.processes == []
        assert self.shared_memory == []
        unexpected = [name for name in self.files if not (_OF_VLLM.match(name) or _OF_REGISTRY.match(name))]
        assert unexpected == []


class SpeechServer:
    """One ``vllm serve`` process; a context manager that starts it, waits for it and stops it."""

    def __init__(self, checkpoint: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.checkpoint, self.arguments = checkpoint, arguments
        self._changes = environment or {}
        # Not below pytest's folder: vLLM's socket names must stay within 107 characters.
        self.temporary = Path(tempfile.mkdtemp(prefix="q3-", dir="/tmp"))
        self._log = self.temporary / "server.log"
        self._kept_log = ""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(
            base_url=self.url,
            timeout=ANSWER_DEADLINE_S,
            limits=httpx.Limits(max_connections=64),
            headers={"connection": "close"},  # where several processes answer, each gets its chance every time
        )
        self.process: subprocess.Popen[bytes] | None = None
        self.remains: Remains | None = None
        self.startup_s = 0.0
        self.served = checkpoint  # whose weights are loaded
        self._started = 0.0
        self._shared: set[str] = set()

    def __enter__(self) -> SpeechServer:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process and return at once."""
        command = serve_command(self.checkpoint, "--port", str(self.port), *self.arguments)
        self._started = time.monotonic()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                env=serve_environment(self.temporary, **self._changes),
                cwd=self.temporary,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait for /health; raise with the end of the log if the process dies or takes too long."""
        assert self.process is not None
        while not self.answers_health():
            elapsed = time.monotonic() - self._started
            if self.process.poll() is not None:
                raise RuntimeError(f"vllm serve ended with {self.process.returncode} at start:\n{self.log_tail()}")
            if elapsed > START_DEADLINE_S:
                raise RuntimeError(f"vllm serve was not ready after {elapsed:.0f} s:\n{self.log_tail()}")
            time.sleep(0.1)
        self.startup_s = time.monotonic() - self._started

    def answers_health(self) -> bool:
        """Whether /health answers 200."""
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/health").status_code == 200
        return False

    @property
    def log(self) -> str:
        """What the server has written so far, also after its end."""
        return self._log.read_text(errors="replace") if self._log.exists() else self._kept_log

    def log_tail(self, lines: int = 60) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.splitlines()[-lines:])

    def processes(self) -> list[psutil.Process]:
        """Return all processes that the server has started, and itself, zombies left out."""
        assert self.process is not None
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def stop(self) -> Remains:
        """Interrupt the server as Ctrl-C would, kill what is left, and tell what it left behind; only once."""
        assert self.process is not None
        if self.remains is not None:
            return self.remains
        self._shared |= self._mapped_shared_memory()
        started = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_DEADLINE_S)
        with contextlib.suppress(AssertionError):  # children may be on their way out
            wait_for(lambda: not self.processes(), seconds=5.0, message="processes are left")
        left = [f"{process.pid} {process.name()}" for process in self.processes()]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        returncode = self.process.wait()
        self.client.close()
        self._kept_log = self.log
        self.remains = Remains(
            returncode=returncode,
            seconds=time.monotonic() - started,
            processes=left,
            files=sorted(files_below(self.temporary)),
            shared_memory=sorted(name for name in self._shared if Path(name).exists()),
        )
        shutil.rmtree(self.temporary, ignore_errors=True)
        return self.remains

    def speak(self, text: str = "Hello there.", **fields: Any) -> Speech:
        """Ask for speech as events and return all of it, codes included; raise SpeechFailedError if it breaks off."""
        with self.client.stream("POST", "/v1/audio/speech", json=speech_body(text, **fields)) as response:
            return read_events(response)

    def speak_some(self, chunks: int, text: str = "Hello there.", **fields: Any) -> int:
        """Ask for speech, leave after some chunks, and return the number of bytes that came."""
        body = speech_body(text, **fields) | {"stream_format": "audio"}
        received = 0
        with self.client.stream("POST", "/v1/audio/speech", json=body) as response:
            assert response.status_code == 200, response.read()
            for _, part in zip(range(chunks), response.iter_bytes(), strict=False):
                received += len(part)
        return received

    def stats(self) -> dict[str, Any]:
        """Return the counters of one API process and of the workers it asks."""
        response = self.client.get("/v1/audio/stats")
        assert response.status_code == 200, response.text
        return dict(response.json())

    def worker(self) -> dict[str, Any]:
        """Return the counters of the first worker."""
        return dict(self.stats()["workers"][0])

    def call_workers(self, method: str, **arguments: str) -> list[Any]:
        """Call a method of every worker, over vLLM's development route."""
        response = self.client.post("/collective_rpc", json={"method": method, "kwargs": arguments})
        assert response.status_code == 200, response.text
        return list(response.json()["results"])

    def load(self, checkpoint: Path) -> None:
        """Serve the weights of another checkpoint of the same form from now on."""
        if checkpoint != self.served:
            self.call_workers("reload_weights", weights_path=str(checkpoint))
            self.served = checkpoint

    def wait_until_idle(self) -> dict[str, Any]:
        """Wait until no request holds anything, and return the counters seen then; fail naming what is still held."""
        stats: dict[str, Any] = {}

        def idle() -> bool:
            stats.update(self.stats())
            return not any(held_by(stats).values())

        try:
            wait_for(idle, seconds=30.0, message="requests are still held")
        except AssertionError as error:
            raise AssertionError(f"{error}: {held_by(stats)}") from None
        return stats

    def _pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def _mapped_shared_memory(self) -> set[str]:
        names = set()
        for process in self.processes():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                names |= {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}
        return {name for name in names if not name.endswith("(deleted)")}


def files_below(folder: Path) -> list[str]:
    """Return the relative paths of all that lies below the folder, without those folders that hold something."""
    found = (path for path in folder.rglob("*") if not path.is_dir() or not any(path.iterdir()))
    return [str(path.relative_to(folder)) for path in found]


def speech_body(text: str, **fields: Any) -> dict[str, Any]:
    """Return a request for events with codes, greedy unless ``temperature`` says otherwise; None removes a field."""
    body = {
        "input": text,
        "voice": "ryan",
        "language": "english",
        "temperature": 0.0,
        "response_format": "pcm",
        "stream_format": "sse",
        "include_codes": True,
    } | fields
    return {name: value for name, value in body.items() if value is not None}


def failed_start(checkpoint: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Run ``vllm serve`` where it must end by itself; return its status and its log."""
    with tempfile.TemporaryDirectory(prefix="q3-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        answer = subprocess.run(
            serve_command(checkpoint, "--port", "0", *arguments),
            env=serve_environment(Path(folder), **environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=START_DEADLINE_S,
            check=False,
        )
    return answer.returncode, answer.stdout + answer.stderr
