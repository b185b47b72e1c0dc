"""``vllm serve`` gives what the official package gave: equal codes, hidden states and samples within 1e-4.

All golden cases. The forms of a checkpoint that end their speech differently are loaded into the server of that form,
with vLLM's own reloading of weights.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.parity.checkpoints import TinyCheckpoint
from tests.parity.golden import GoldenCase, cases
from tests.plugin.answers import Speech, assert_equal_codes
from tests.plugin.reference import TOLERANCE, assert_close_samples
from tests.plugin.server import SpeechServer

pytestmark = pytest.mark.vllm

SERVER_OF = {"custom_voice-tiny": "standard", "custom_voice-tiny-0.6B": "recording", "voice_design-tiny": "tight"}
Answer = Callable[[SpeechServer, GoldenCase], tuple[Speech, NDArray[np.float32]]]


def by_server() -> list[object]:
    """Return all cases with their server, those of one checkpoint together."""
    ordered = sorted(cases(), key=lambda case: case.checkpoint.key)
    return [
        pytest.param(case, id=case.id, marks=pytest.mark.server(SERVER_OF[case.checkpoint.name])) for case in ordered
    ]


@pytest.fixture(scope="module")
def answer(checkpoint: Callable[[TinyCheckpoint], Path]) -> Answer:
    """Return a function to the server's answer and hidden states, asked for once."""
    kept: dict[str, tuple[Speech, NDArray[np.float32]]] = {}

    def ask(server: SpeechServer, case: GoldenCase) -> tuple[Speech, NDArray[np.float32]]:
        if case.id not in kept:
            server.load(checkpoint(case.checkpoint))
            speech = server.speak(
                case.text,
                voice=case.voice,
                language=case.language,
                instructions=case.instruct,
                text_mode=case.text_mode,
                max_new_tokens=case.max_frames,
            )
            kept[case.id] = speech, hidden_states(server, speech.request_id)
        return kept[case.id]

    return ask


def hidden_states(server: SpeechServer, request_id: str) -> NDArray[np.float32]:
    """Return the traced hidden states, flat; the development route sends bytes as Python would print them."""
    (printed,) = server.call_workers("qwen3tts_trace", request_id=request_id)
    return np.frombuffer(ast.literal_eval(printed), dtype=np.float32)


@pytest.mark.parametrize("case", by_server())
class TestServedModel:
    def test_codes_are_identical(self, case: GoldenCase, server: SpeechServer, answer: Answer) -> None:
        assert_equal_codes(answer(server, case)[0].codes, case.arrays["codes"], case.id)

    def test_finish_reason_is_equal(self, case: GoldenCase, server: SpeechServer, answer: Answer) -> None:
        assert answer(server, case)[0].finish_reason == case.finish_reason

    def test_waveform_agrees(self, case: GoldenCase, server: SpeechServer, answer: Answer) -> None:
        assert_close_samples(answer(server, case)[0], case.arrays["waveform"])

    def test_hidden_states_agree(self, case: GoldenCase, server: SpeechServer, answer: Answer) -> None:
        expected = case.arrays["hidden"]
        found = answer(server, case)[1].reshape(-1, expected.shape[1])[: len(expected)]
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() <= TOLERANCE
