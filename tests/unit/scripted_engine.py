"""A speech service over an engine that plays a script, for tests of the service.

The audio takes the real way through an outbox and the service's own hub. vLLM is replaced by the two names that the
service takes from it, so these tests need no vLLM.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.engine.audio import Packet
from qwen3tts_hw.errors import CapacityError
from qwen3tts_hw.prompt.request import build_request
from qwen3tts_hw.prompt.tokenizer import TextTokenizer
from qwen3tts_hw.settings import Settings
from qwen3tts_hw.types import NUM_CODEBOOKS, SAMPLES_PER_FRAME, EncodedVoice
from qwen3tts_hw.vllm_plugin.payload import Ticket, pack_encoding, unpack
from qwen3tts_hw.vllm_plugin.service import VllmSpeechService
from qwen3tts_hw.vllm_plugin.transport import AudioOutbox

DEADLINE_S = 20.0
MAX_ROWS = 200
HANG = ("hang",)


class ScriptedEngine:
    """vLLM's engine client as far as the service uses it.

    A script is a list of steps: ``("audio", frames)``, ``("last", frames)``, ``("late last", frames)`` after the final
    output, ``("finish", reason)``, ``("fail", error)``, ``HANG``.
    """

    def __init__(self, *script):
        self.script = script
        self.outbox = AudioOutbox()
        self.started, self.aborted, self.dead = [], [], None
        self.errored = False
        self._sent = {}
        self._late = []
        self.recordings = []
        self.heard = EncodedVoice(b"\x01" * 8, b"\x02" * 32)  # None: never an answer
        self.workers = 1

    async def generate(self, prompt, params, request_id):
        self.started.append(SimpleNamespace(prompt=prompt, params=params, id=request_id))
        _, ticket, with_codes = unpack(params.extra_args)
        self.outbox.open(request_id, ticket)
        try:
            for action, *values in self.script:
                await asyncio.sleep(0.002)
                if action in ("audio", "last"):
                    self.send(request_id, *values, last=action == "last", codes=with_codes)
                elif action == "late last":
                    later = asyncio.get_running_loop().call_later
                    self._late.append(later(0.05, lambda n=values[0]: self.send(request_id, n, last=True)))
                elif action == "finish":
                    yield SimpleNamespace(finished=True, outputs=[SimpleNamespace(finish_reason=values[0])])
                elif action == "fail":
                    raise values[0]
                else:
                    await asyncio.Event().wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise

    def send(self, request_id, frames, *, last=False, codes=False):
        before = self._sent.get(request_id, 0)
        self._sent[request_id] = before + frames
        samples = np.repeat(np.arange(before, before + frames, dtype=np.int16), SAMPLES_PER_FRAME)
        rows = np.arange(before, before + frames, dtype=np.int16).repeat(NUM_CODEBOOKS)
        raw = rows.tobytes() if codes else b""
        self.outbox.send(Packet(request_id, frames, before, last, samples.tobytes(), raw))

    async def check_health(self):
        if self.dead is not None:
            raise self.dead

    async def collective_rpc(self, method, args=()):
        if method == "qwen3tts_encode_voice":
            samples, with_codes, *ticket = args
            self.recordings.append((len(samples), with_codes))
            if isinstance(self.heard, CapacityError):
                return [b"", pack_encoding(self.heard)]
            for _ in range(self.workers if self.heard is not None else 0):
                self.outbox.answer(Ticket(*ticket), pack_encoding(self.heard))
            return [b""] * self.workers
        if method == "qwen3tts_trace":
            return [b"", np.arange(128, dtype=np.float32).tobytes()]
        return [json.dumps({"method": method})]


def replace_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put stand-ins where the service imports from vLLM; parameters are kept as they are given."""
    package, module = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    package.SamplingParams = SimpleNamespace
    module.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final only")
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", module)


def runner(config: ModelConfig, tokenizer: TextTokenizer) -> Callable[..., None]:
    """A function that runs ``test(service, engine, request)`` with an engine that plays the script."""
    request = build_request(config, Settings(), text="Good morning.", voice="ryan", seed=9)

    def start(
        test: Callable[..., Any],
        *script: tuple[Any, ...],
        settings: Settings | None = None,
        max_rows: int = MAX_ROWS,
        tail_timeout_s: float = DEADLINE_S,
    ) -> None:
        async def body() -> None:
            engine = ScriptedEngine(*script)
            service = VllmSpeechService(
                engine, config, tokenizer, settings or Settings(), max_rows=max_rows, tail_timeout_s=tail_timeout_s
            )
            try:
                await asyncio.wait_for(test(service, engine, request), DEADLINE_S)
                assert service.hub.open_inboxes == 0
                assert (await service.stats())["running"] == 0
            finally:
                await service.shut_down()
                engine.outbox.close()

        asyncio.run(body())

    return start


async def chunks_of(stream):
    return [chunk async for chunk in stream]
