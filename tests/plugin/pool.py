"""Which servers the tests need, and the pool that keeps as few of them running as possible.

A test names its server with ``@pytest.mark.server(name)``; tests are ordered by server, so each is started once. While
one is tested the next is starting, so never more than two are alive. A test marked with ``last=True`` is the last of
its server and may end it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.parity.checkpoints import TinyCheckpoint
from tests.plugin.server import REPOSITORY, SpeechServer

Write = Callable[[TinyCheckpoint], Path]

ASYNC_PLUGIN = Path(__file__).parent / "cpu_async"
V2_FOLDER = Path(__file__).parent / "cpu_v2"
BATCHED_ROWS = 16  # of the server "tight": prompts of more rows are prefilled in chunks
# One request of full length fits, as vLLM asks for, but not eight that have become longer than a block.
FEW_BLOCKS = ("--max-model-len", "256", "--max-num-seqs", "8", "--block-size", "32", "--num-gpu-blocks-override", "9")
# Where speech ends by itself: fewer, so that even two long requests do not fit beside each other.
FEWER_BLOCKS = ("--max-model-len", "160", "--max-num-seqs", "8", "--block-size", "32", "--num-gpu-blocks-override", "6")


@dataclass(frozen=True)
class ServerSpec:
    """How a server is started."""

    checkpoint: TinyCheckpoint
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


SERVERS = {
    # Nothing but the defaults. Traces are for the comparison of hidden states.
    "standard": ServerSpec(
        TinyCheckpoint("custom_voice", "tiny", end_of_speech=False), environment={"QWEN3TTS_TRACE": "1"}
    ),
    # The frame step as it runs in a device graph.
    "recording": ServerSpec(
        TinyCheckpoint("custom_voice", "tiny-0.6B", end_of_speech=False),
        ("--max-num-seqs", "8"),
        {"QWEN3TTS_TRACE": "1", "QWEN3TTS_GRAPHS": "recording"},
    ),
    # Prompts prefilled in chunks, requests preempted for lack of cache.
    "tight": ServerSpec(
        TinyCheckpoint("voice_design", "tiny", end_of_speech=False),
        (*FEW_BLOCKS, "--max-num-batched-tokens", str(BATCHED_ROWS)),
        {"QWEN3TTS_TRACE": "1"},
    ),
    # Asynchronous scheduling, which vLLM does not offer on a CPU by itself; speech that ends by itself.
    "async": ServerSpec(
        TinyCheckpoint("custom_voice", "tiny"),
        FEWER_BLOCKS,
        {"VLLM_PLUGINS": "qwen3tts_hw,cpu_async", "PYTHONPATH": f"{REPOSITORY}:{ASYNC_PLUGIN}"},
    ),
    # vLLM's other model runner, its kernels interpreted; requests are preempted here too.
    "v2": ServerSpec(
        TinyCheckpoint("custom_voice", "tiny-0.6B", end_of_speech=False),
        FEW_BLOCKS,
        {"PYTHONPATH": f"{V2_FOLDER}:{REPOSITORY}"},
    ),
    # Cloned voices, with requests preempted for lack of cache.
    "clones": ServerSpec(
        TinyCheckpoint("base", "tiny", end_of_speech=False),
        FEW_BLOCKS,
        {"QWEN3TTS_TRACE": "1", "QWEN3TTS_VOICES_DIR": "voices"},
    ),
    # Cloned voices of the other width: references prefilled in chunks, the steps as they run in device graphs.
    "small_clones": ServerSpec(
        TinyCheckpoint("base", "tiny-0.6B", seed=2, end_of_speech=False),
        ("--max-num-seqs", "4", "--max-num-batched-tokens", str(BATCHED_ROWS)),
        {"QWEN3TTS_TRACE": "1", "QWEN3TTS_VOICES_DIR": "voices", "QWEN3TTS_GRAPHS": "recording"},
    ),
    # Two engines behind two processes that answer HTTP.
    "two_by_two": ServerSpec(
        TinyCheckpoint("custom_voice", "tiny", end_of_speech=False),
        ("--data-parallel-size", "2", "--api-server-count", "2", "--max-num-seqs", "8"),
    ),
}


class ServerPool:
    """Starts servers by name; at most one is in use and one is starting."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._running: dict[str, SpeechServer] = {}
        self.startup_s: dict[str, float] = {}

    def get(self, name: str, following: Sequence[str] = ()) -> SpeechServer:
        """Return the ready server of a name, stop all others, and begin to start the first of ``following``."""
        keep = {name, *following[:1]}
        for other in [running for running in self._running if running not in keep]:
            self.take(other).stop()
        server = self._started(name)
        if not server.startup_s:
            server.wait_until_ready()
            self.startup_s[name] = server.startup_s
        for other in following[:1]:
            self._started(other)
        return server

    def take(self, name: str) -> SpeechServer:
        """Hand a running server over: the caller ends it, and the pool would start another."""
        return self._running.pop(name)

    def close(self) -> None:
        """Stop what runs."""
        while self._running:
            self._running.popitem()[1].stop()

    def _started(self, name: str) -> SpeechServer:
        if name not in self._running:
            spec = SERVERS[name]
            server = SpeechServer(self._write(spec.checkpoint), *spec.arguments, environment=spec.environment)
            server.start()
            self._running[name] = server
        return self._running[name]
