"""Encoding beside the engine: answers by ticket, errors as answers, a bounded number of recordings, and the end."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from qwen3tts_hw.errors import CapacityError, RequestError
from qwen3tts_hw.types import EncodedVoice
from qwen3tts_hw.vllm_plugin import voice_thread
from qwen3tts_hw.vllm_plugin.payload import unpack_encoding
from qwen3tts_hw.vllm_plugin.transport import AudioHub, AudioOutbox
from qwen3tts_hw.vllm_plugin.voice_thread import Recording, VoiceThread
from tests.unit.tiny_model import BACKEND

DEADLINE_S = 20.0
AUDIO = np.arange(4, dtype="<f4").tobytes()


class Encoder:
    """Hears what it is told to, once the gate is open."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.heard = []
        self.error = None

    def encode(self, samples, *, with_codes):
        assert self.gate.wait(DEADLINE_S)
        self.heard.append((samples.tolist(), with_codes))
        if self.error is not None:
            raise self.error
        return EncodedVoice(samples.tobytes(), b"\x01" * 32 if with_codes else b"")


def run(test):
    """Run ``test(hub, encoder, thread)`` on a loop with a hub that receives."""

    async def body():
        hub, encoder = AudioHub(limit_bytes=1_000), Encoder()
        hub.start()
        thread = VoiceThread(encoder, BACKEND, AudioOutbox())
        try:
            await asyncio.wait_for(test(hub, encoder, thread), DEADLINE_S)
        finally:
            encoder.gate.set()
            thread.shut_down(DEADLINE_S)
            await hub.shut_down()
        assert not thread._thread.is_alive()

    asyncio.run(body())


def test_recordings_are_answered_in_turn():
    async def test(hub, encoder, thread):
        asked = [hub.ask() for _ in range(3)]
        for number, question in enumerate(asked):
            assert thread.add(Recording(AUDIO, bool(number % 2), question.ticket)) is None
        answers = [unpack_encoding(await question.answer) for question in asked]
        assert answers == [EncodedVoice(AUDIO, codes) for codes in (b"", b"\x01" * 32, b"")]
        assert encoder.heard == [([0.0, 1.0, 2.0, 3.0], with_codes) for with_codes in (False, True, False)]

    run(test)


@pytest.mark.parametrize(
    ("error", "logged"),
    [(RequestError("ref_audio", "too short"), False), (RuntimeError("out of memory"), True), (ValueError("?"), True)],
    ids=repr,
)
def test_what_goes_wrong_is_an_answer_and_the_next_is_encoded(error, logged, caplog):
    async def test(hub, encoder, thread):
        first, second = hub.ask(), hub.ask()
        encoder.error = error
        thread.add(Recording(AUDIO, True, first.ticket))
        with pytest.raises(
            RequestError if not logged else RuntimeError, match=str(error).replace("?", r"ValueError: \?")
        ):
            unpack_encoding(await first.answer)
        encoder.error = None
        thread.add(Recording(AUDIO, False, second.ticket))
        assert unpack_encoding(await second.answer) == EncodedVoice(AUDIO)

    run(test)
    assert ("could not be encoded" in caplog.text) == logged


def test_too_many_are_refused(monkeypatch):
    monkeypatch.setattr(voice_thread, "RECORDINGS_OPEN", 2)

    async def test(hub, encoder, thread):
        encoder.gate.clear()
        asked = [hub.ask() for _ in range(3)]
        refusals = [thread.add(Recording(AUDIO, True, question.ticket)) for question in asked]
        assert refusals[:2] == [None, None] and isinstance(refusals[2], CapacityError)
        assert thread.open_recordings == 2
        encoder.gate.set()
        for question in asked[:2]:
            await question.answer
        while thread.open_recordings:
            await asyncio.sleep(0.001)
        assert thread.add(Recording(AUDIO, True, asked[2].ticket)) is None
        await asked[2].answer

    run(test)


def test_the_end_waits_for_one_recording_only():
    async def test(hub, encoder, thread):
        encoder.gate.clear()
        for _ in range(5):
            thread.add(Recording(AUDIO, True, hub.ask().ticket))
        ending = asyncio.get_running_loop().run_in_executor(None, thread.shut_down)
        await asyncio.sleep(0.05)
        encoder.gate.set()
        await ending
        assert len(encoder.heard) <= 1

    run(test)
