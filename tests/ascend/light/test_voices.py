"""Reference audio encoded in a thread beside an emulated device's own work: the same as on the CPU."""

from __future__ import annotations

import queue

import pytest

torch_npu = pytest.importorskip("torch_npu", reason="runs in the light bed: make test-ascend-light")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from qwen3tts_hw.checkpoint.reader import open_checkpoint  # noqa: E402
from qwen3tts_hw.engine.voice_encoder import VoiceEncoder  # noqa: E402
from qwen3tts_hw.vllm_plugin.payload import Ticket, unpack_encoding  # noqa: E402
from qwen3tts_hw.vllm_plugin.voice_thread import Recording, VoiceThread  # noqa: E402
from tests.ascend.light.device import backend, counting  # noqa: E402
from tests.parity.reference_audio import reference_audio  # noqa: E402

WAIT_S = 120.0


@pytest.fixture(scope="module")
def encoders(tiny_checkpoint):
    checkpoint = open_checkpoint(tiny_checkpoint("base"))
    made = {name: VoiceEncoder(checkpoint.config, backend(name)) for name in ("cpu", "npu")}
    for encoder in made.values():
        encoder.load(checkpoint)
    return made


class Answers:
    """Takes what the thread sends."""

    def __init__(self):
        self.sent = queue.SimpleQueue()

    def answer(self, ticket, answer):
        self.sent.put((ticket.key, answer))

    def close(self):
        self.sent.put(None)


def test_voices_are_encoded_beside_other_work(encoders):
    recordings = [reference_audio(12_000 + 2_000 * seed, seed=seed) for seed in range(3)]
    expected = [encoders["cpu"].encode(samples, with_codes=True) for samples in recordings]
    busy, answers = torch.ones(64, 64, device=backend("npu").device), Answers()
    with counting() as counts:
        thread = VoiceThread(encoders["npu"], backend("npu"), answers)
        for number, samples in enumerate(recordings):
            assert thread.add(Recording(samples.astype("<f4").tobytes(), True, Ticket("", bytes([number])))) is None
        while thread.open_recordings:
            busy.mul_(1.0).add_(0.0)
        thread.shut_down(WAIT_S)
    for number, same in enumerate(expected):
        key, answer = answers.sent.get(timeout=WAIT_S)
        voice = unpack_encoding(answer)
        assert (key, voice.codes) == (bytes([number]), same.codes)
        embeddings = (np.frombuffer(one.embedding, "<f4") for one in (voice, same))
        np.testing.assert_allclose(*embeddings, rtol=0, atol=1e-4)
    assert answers.sent.get(timeout=WAIT_S) is None
    assert counts["device_syncs"] == 0, "the device's other work must not be waited for"
