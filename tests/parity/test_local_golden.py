"""The local engine gives what the official package gave: equal codes, hidden states and samples within 1e-4.

Float32 on the CPU, greedy. The first code that differs is reported with its frame and codebook, since everything after
it differs as a consequence.
"""

from __future__ import annotations

import numpy as np
import pytest

from qwen3tts_hw.engine.local import LocalEngine
from tests.parity.golden import cases

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def engine_for(golden_checkpoint):
    """Return a function from a golden case to an engine; cases come ordered, so one engine is kept."""
    kept = {}

    def load(case):
        directory = golden_checkpoint(case)
        if directory not in kept:
            kept.clear()
            kept[directory] = LocalEngine.load(directory, device="cpu", dtype="float32")
        return kept[directory]

    return load


@pytest.fixture(scope="module")
def result_for(engine_for):
    """Return a function from a golden case to the local result, computed once."""
    results = {}

    def run(case):
        if case.id not in results:
            engine = engine_for(case)
            results[case.id] = engine.synthesize(case.request(engine.config), keep_hidden=True)
        return results[case.id]

    return run


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.id)
class TestLocalEngine:
    def test_codes_are_identical(self, case, result_for):
        assert_equal_codes(result_for(case).codes, case.arrays["codes"])

    def test_finish_reason_is_equal(self, case, result_for):
        assert result_for(case).finish_reason == case.finish_reason

    def test_hidden_states_agree(self, case, result_for):
        assert_close(result_for(case).hidden, case.arrays["hidden"], "hidden")

    def test_waveform_agrees(self, case, result_for):
        assert_close(result_for(case).pcm, case.arrays["waveform"], "waveform")


def assert_equal_codes(found: np.ndarray, expected: np.ndarray) -> None:
    """Fail naming the first frame and codebook that differ."""
    frames = min(len(found), len(expected))
    for frame, codebook in np.argwhere(found[:frames] != expected[:frames])[:1]:
        raise AssertionError(
            f"codes differ first at frame {frame}, codebook {codebook}: "
            f"{found[frame, codebook]}, official {expected[frame, codebook]}"
        )
    assert found.shape == expected.shape


def assert_close(found: np.ndarray | None, expected: np.ndarray, name: str) -> None:
    """Fail naming the largest difference, its place and both values."""
    assert found is not None, f"{name} was not returned"
    assert found.shape == expected.shape
    difference = np.abs(found.astype(np.float64) - expected)
    place = tuple(int(index) for index in np.unravel_index(int(difference.argmax()), difference.shape))
    assert difference[place] <= TOLERANCE, (
        f"{name} differs by {difference[place]:.2e} at {place}: {found[place]}, official {expected[place]}"
    )
