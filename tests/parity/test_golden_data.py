"""The golden data is complete, small, and belongs to the checkpoints that this tree writes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from qwen3tts_hw.types import NUM_CODEBOOKS, SAMPLES_PER_FRAME
from tests.parity.golden import ARRAYS, cases

CASES = cases()
CHECKPOINTS = {"custom_voice-tiny", "custom_voice-tiny-0.6B", "voice_design-tiny"}
MAX_BYTES = 1_000_000

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def test_every_checkpoint_has_both_text_modes():
    found = {(case.checkpoint.name, case.text_mode) for case in CASES}
    assert found == {(name, mode) for name in CHECKPOINTS for mode in ("whole", "streaming")}


def test_instructions_languages_and_dialects_are_covered():
    asked = {(case.voice, case.language) for case in CASES}
    assert {("dylan", "auto"), ("dylan", "english"), ("eric", "chinese")} <= asked
    for name in ("custom_voice-tiny", "voice_design-tiny"):
        modes = {case.text_mode for case in CASES if case.checkpoint.name == name and case.instruct}
        assert modes == {"whole", "streaming"}


def test_streaming_text_is_longer_and_shorter_than_the_speech():
    for name in CHECKPOINTS:
        of_name = [case for case in CASES if case.checkpoint.name == name and case.text_mode == "streaming"]
        surplus = [len(case.arrays["trailing_rows"]) - len(case.arrays["codes"]) for case in of_name]
        assert min(surplus) < 0 < max(surplus)


def test_both_ways_to_end_are_covered():
    frames = {case.id: len(case.arrays["codes"]) for case in CASES if case.finish_reason == "stop"}
    assert min(frames.values()) == 2, "one case must be stopped by the minimum of 2 frames"
    assert max(frames.values()) > 2, "one case must end by itself later"
    assert len({case.max_frames for case in CASES if case.finish_reason == "length"}) > 1


@each_case
def test_file_is_small_and_complete(case):
    assert case.path.stat().st_size <= MAX_BYTES
    assert set(case.arrays) == ARRAYS
    assert {"versions", "command", "settings"} <= set(case.metadata)
    assert json.loads(case.metadata["versions"])["qwen-tts"] == "0.1.1"


@each_case
def test_arrays_fit_each_other(case):
    arrays = case.arrays
    frames, width = len(arrays["codes"]), arrays["prompt_rows"].shape[1]
    assert arrays["codes"].shape == (frames, NUM_CODEBOOKS)
    assert arrays["codes"].dtype == np.int64
    assert arrays["hidden"].shape == (frames, width)
    assert arrays["waveform"].shape == (frames * SAMPLES_PER_FRAME,)
    assert arrays["trailing_rows"].shape[1:] == arrays["pad_row"].shape[1:] == (width,)
    assert np.abs(arrays["waveform"]).max() <= 1.0
    if case.finish_reason == "length":
        assert frames == case.max_frames
        assert frames >= 20


@each_case
def test_codes_vary(case):
    codes = case.arrays["codes"]
    assert len(np.unique(codes)) > codes.size // 2
    assert np.std(case.arrays["waveform"]) > 0.01


@each_case
def test_checkpoint_is_written_again_with_equal_weights(case, golden_checkpoint):
    assert golden_checkpoint(case).is_dir()
