"""Written WAV files, read back by an implementation that is not ours."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile
import torch

from qwen3tts_hw.audio_file import write_wav
from qwen3tts_hw.codec.pcm import to_pcm16


def test_samples_survive(tmp_path):
    samples = np.array([0.0, 0.5, -0.5, 1.0, -1.0, 1e-5, 0.9999], np.float32)
    write_wav(tmp_path / "x.wav", samples)
    found, rate = soundfile.read(tmp_path / "x.wav", dtype="int16")
    assert rate == 24_000
    assert found.tolist() == [0, 16_384, -16_384, 32_767, -32_767, 0, 32_764]
    assert soundfile.info(tmp_path / "x.wav").subtype == "PCM_16"


def test_what_cannot_be_a_sample(tmp_path):
    write_wav(tmp_path / "x.wav", np.array([2.0, -3.0, np.nan, np.inf, -np.inf], np.float32))
    found, _ = soundfile.read(tmp_path / "x.wav", dtype="int16")
    assert found.tolist() == [32_767, -32_767, 0, 32_767, -32_767]


def test_files_hold_the_samples_that_are_sent(tmp_path):
    samples = torch.randn(5_000).clamp(-1, 1)
    write_wav(str(tmp_path / "x.wav"), samples.numpy())
    found, _ = soundfile.read(tmp_path / "x.wav", dtype="int16")
    assert found.tolist() == to_pcm16(samples).tolist()


@pytest.mark.parametrize("count", [0, 1, 1_920])
def test_lengths(tmp_path, count):
    write_wav(tmp_path / "x.wav", np.zeros(count, np.float32))
    assert soundfile.info(tmp_path / "x.wav").frames == count
