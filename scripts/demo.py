"""Show the whole way once: checkpoint, plain ``vllm serve``, a streamed answer to the ``openai`` client, a WAV file.

``python scripts/demo.py [--model CHECKPOINT] [--text TEXT] [--out demo.wav]``, or ``make demo [MODEL=CHECKPOINT]``

Without a model a tiny one with random weights is written first: what it says is noise, but every part works as with a
published one. The server gets no flag but its port. Its log goes to demo-server.log; if anything fails, its last lines
are shown. The server is always stopped, also on Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import wave
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import openai

SAMPLE_RATE_HZ = 24_000
TINY_MAX_FRAMES = 125  # ten seconds; random weights rarely say that they are done
PLUGIN = "qwen3tts_hw"
TEXT = "Hello! This sentence was spoken by plain vllm serve."
DESCRIPTION = "A calm, warm voice, speaking clearly."


class DemoError(Exception):
    """A step failed; the message says which and why."""


@dataclass
class Answer:
    """What came back for the request, and when."""

    request_id: str
    pcm: bytes
    first_audio_s: float
    total_s: float

    @property
    def audio_s(self) -> float:
        return len(self.pcm) / 2 / SAMPLE_RATE_HZ


class Server:
    """One ``vllm serve`` in a process group of its own; a context manager that always stops it."""

    def __init__(self, model: str, log: Path, deadline_s: float) -> None:
        self.model, self.log, self.deadline_s = model, log, deadline_s
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Server:
        command = [str(Path(sys.executable).with_name("vllm")), "serve", self.model, "--port", str(self.port)]
        environment = os.environ | {"VLLM_PLUGINS": os.environ.get("VLLM_PLUGINS") or plugin_names()}
        say(f"starting: VLLM_PLUGINS={environment['VLLM_PLUGINS']} {' '.join(['vllm', *command[1:]])}")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        started = time.monotonic()
        clean = self.stop()
        say(f"server stopped in {time.monotonic() - started:.1f} s" + ("" if clean else ", by force"))
        if kind is not None:
            say(f"the last lines of {self.log}:")
            print("\n".join(log_tail(self.log, 30)), file=sys.stderr)

    def wait_until_ready(self) -> float:
        """Wait for /health and return the seconds it took; raise DemoError if the server dies or takes too long."""
        started = shown = time.monotonic()
        while True:
            elapsed = time.monotonic() - started
            if self.process.poll() is not None:
                raise DemoError(f"the server ended with status {self.process.returncode} after {elapsed:.0f} s")
            if answers(f"{self.url}/health"):
                return elapsed
            if elapsed > self.deadline_s:
                raise DemoError(f"the server was not ready after {elapsed:.0f} s")
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                last = log_tail(self.log, 1)
                say(f"  {elapsed:3.0f} s  {last[0][:100] if last else ''}")
            time.sleep(0.25)

    def stop(self) -> bool:
        """Interrupt the server as Ctrl-C would; kill what is left after 30 s. Return whether it ended cleanly."""
        clean = True
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                clean = False
        clean = self._children_ended(within_s=10) and clean
        if not clean:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return clean

    def _children_ended(self, within_s: float) -> bool:
        """Whether the process group is gone, or goes within the time: engine and worker leave after the server."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            self.process.poll()
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.1)
        return False


def free_port() -> int:
    """Ask the system for a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def plugin_names() -> str:
    """Value of VLLM_PLUGINS: vLLM adds a plugin's routes only if it is named, and then loads no other that is not."""
    names = {PLUGIN}
    platforms = importlib.metadata.entry_points(group="vllm.platform_plugins")
    names |= {point.name for point in platforms}
    if names != {PLUGIN}:  # a platform from outside brings general plugins that it needs
        names |= {point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    return ",".join(sorted(names))


def answers(url: str) -> bool:
    """Whether a GET is answered with success."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):
        return False


def get_json(url: str) -> dict[str, Any]:
    """Read a JSON object."""
    with urllib.request.urlopen(url, timeout=10) as response:
        return dict(json.load(response))


def log_tail(log: Path, lines: int) -> list[str]:
    """The last non-empty lines of the log, without reading all of it."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 20_000))
        text = file.read().decode(errors="replace")
    noise = (
        "nanobind: ",
        " - leaked ",
        " - ... skipped",
        "See https://nanobind",
    )  # printed by any vLLM that ends early
    return [line for line in text.splitlines() if line.strip() and not line.startswith(noise)][-lines:]


def make_checkpoint(folder: Path) -> str:
    """Write a tiny random checkpoint with the command line tool."""
    out = folder / "tiny-custom-voice"
    tool = Path(sys.executable).with_name("qwen3tts-hw")
    command = [str(tool), "make-checkpoint", "--variant", "custom_voice", "--size", "tiny", str(out)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if answer.returncode != 0:
        raise DemoError(f"the checkpoint could not be written:\n{answer.stdout}{answer.stderr}")
    return str(out)


def speak(server: Server, text: str, options: dict[str, Any]) -> Answer:
    """Ask for speech as any OpenAI client does and read the answer as it comes."""
    offered = get_json(f"{server.url}/v1/audio/voices")
    voices = [voice["id"] for voice in offered.get("voices", [])]
    voice = voices[0] if voices else "default"
    if not voices:
        options = {"instructions": DESCRIPTION} | options
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=600, max_retries=0)
    model = client.models.list().data[0].id
    say(f"asking for speech, voice {voice!r}: {text!r}")
    pcm, first = bytearray(), 0.0
    started = time.monotonic()
    with client.audio.speech.with_streaming_response.create(
        model=model, voice=voice, input=text, response_format="pcm", extra_body=options
    ) as response:
        request_id = response.headers.get("x-request-id", "")
        for chunk in response.iter_bytes():
            first = first or time.monotonic() - started
            pcm += chunk
    if not pcm:
        raise DemoError("the answer was empty")
    return Answer(request_id, bytes(pcm), first, time.monotonic() - started)


def outcome(server: Server, request_id: str) -> dict[str, Any]:
    """How the request ended; it is known a moment after its last byte."""
    deadline = time.monotonic() + 5
    while True:
        try:
            return get_json(f"{server.url}/v1/audio/speech/{request_id}")
        except urllib.error.HTTPError as error:
            if error.code != 404 or time.monotonic() > deadline:
                raise DemoError(f"no outcome of request {request_id!r}: HTTP status {error.code}") from error
        time.sleep(0.1)


def write_wav(path: Path, pcm: bytes) -> None:
    """Write 16-bit mono samples."""
    with wave.open(str(path), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(SAMPLE_RATE_HZ)
        out.writeframes(pcm)


def show(out: Path, startup_s: float, answer: Answer, ended: dict[str, Any]) -> None:
    """Print the figures."""
    rows = [
        ("start-up", f"{startup_s:.1f} s"),
        ("first audio", f"{answer.first_audio_s * 1e3:.0f} ms"),
        ("answer complete", f"{answer.total_s:.2f} s"),
        ("audio", f"{answer.audio_s:.2f} s, {ended['frames']} frames"),
        ("real-time factor", f"{answer.total_s / answer.audio_s:.3f}"),
        ("finish reason", str(ended["finish_reason"])),
        ("written to", str(out)),
    ]
    for name, value in rows:
        say(f"{name:>17}  {value}")


def say(text: str) -> None:
    """Print one line at once."""
    print(f"demo: {text}", flush=True)


def run(options: argparse.Namespace, folder: Path) -> None:
    """All steps in order."""
    wanted: dict[str, Any] = {"seed": options.seed}
    model = options.model
    if not model:
        say("no MODEL given: writing a tiny checkpoint with random weights")
        model = make_checkpoint(folder)
        wanted["max_new_tokens"] = TINY_MAX_FRAMES
    if options.max_frames:
        wanted["max_new_tokens"] = options.max_frames
    with Server(model, options.log, options.timeout) as server:
        startup_s = server.wait_until_ready()
        say(f"ready after {startup_s:.1f} s")
        try:
            answer = speak(server, options.text, wanted)
            ended = outcome(server, answer.request_id)
        except openai.APIStatusError as error:
            raise DemoError(f"the server refused: {error.status_code} {error.response.text}") from error
        except (openai.OpenAIError, OSError) as error:
            raise DemoError(f"the request failed: {error!r}") from error
        write_wav(options.out, answer.pcm)
    show(options.out, startup_s, answer, ended)


def main() -> int:
    """Run the demo; the exit status says whether it worked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint folder or hub id; default: a tiny random one")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--max-frames", type=int, help="longest answer, in frames of 80 ms")
    parser.add_argument("--out", type=Path, default=Path("demo.wav"))
    parser.add_argument("--log", type=Path, default=Path("demo-server.log"))
    parser.add_argument("--timeout", type=float, default=900, help="seconds to wait for the server to be ready")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server is stopped on TERM, too
    try:
        with tempfile.TemporaryDirectory(prefix="qwen3tts-demo-") as folder:
            run(options, Path(folder))
    except DemoError as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
