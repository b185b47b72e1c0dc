"""The mel front end and the speaker encoder against naive second writings of their definitions.

The naive versions work in float64 on whole clips with explicit reflection, NumPy's Fourier transform and loops over
groups; they share no code with the package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from qwen3tts_hw.checkpoint.inventory import main_tensors
from qwen3tts_hw.checkpoint.published import PUBLISHED_TEXT_TOKENS, compose
from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.encoder_config import SpeakerEncoderConfig, parse_speaker_encoder_config
from qwen3tts_hw.errors import CheckpointError, ConfigError, RequestError
from qwen3tts_hw.voice.mel import MelSpectrogram, mel_filter_bank
from qwen3tts_hw.voice.speaker_encoder import SpeakerEncoder

FILES = compose("base", "tiny", PUBLISHED_TEXT_TOKENS, 151_936)
MODEL = ModelConfig.from_dicts(FILES["config.json"], FILES["speech_tokenizer/config.json"])
Weights = dict[str, Tensor]
both_ways = pytest.mark.parametrize("stft", [True, False], ids=["stft", "matmul"])


def speaker_config() -> SpeakerEncoderConfig:
    assert MODEL.speaker_encoder is not None
    return MODEL.speaker_encoder


def clip(samples: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    tone = torch.sin(torch.arange(samples) * 0.05) * torch.sin(torch.arange(samples) * 3e-4)
    return 0.4 * tone + 0.05 * torch.randn(samples, generator=rng)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, and waiting for one another costs much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def weights() -> Weights:
    rng = torch.Generator().manual_seed(5)
    shapes = {name: shape for name, shape in main_tensors(MODEL).items() if name.startswith("speaker_encoder.")}
    return {
        name: torch.randn(shape, generator=rng) * (0.1 if len(shape) == 1 else 1.3 / math.sqrt(math.prod(shape[1:])))
        for name, shape in shapes.items()
    }


def loaded(weights: Weights, *, stft: bool = True) -> SpeakerEncoder:
    encoder = SpeakerEncoder(speaker_config(), "cpu", stft=stft)
    assert encoder.load_weights(weights.items()) == set(weights)
    return encoder


# The naive references.


def reflected(x: np.ndarray, left: int, right: int) -> np.ndarray:
    """Continue the last axis at both ends by walking back, without repeating the outermost value."""
    last = x.shape[-1] - 1
    at = [abs(i) if i <= last else 2 * last - i for i in range(-left, last + 1 + right)]
    return x[..., at]


def naive_mel_bank() -> np.ndarray:
    def to_hz(mel: float) -> float:
        return mel * 200 / 3 if mel < 15 else 1_000 * 6.4 ** ((mel - 15) / 27)

    highest = 15 + 27 * math.log(12) / math.log(6.4)  # 12 kHz
    corners = [to_hz(highest * band / 129) for band in range(130)]
    bank = np.zeros((128, 513))
    for band in range(128):
        low, middle, high = corners[band : band + 3]
        for index in range(513):
            hz = index * 24_000 / 1_024
            inside = (hz - low) / (middle - low) if hz <= middle else (high - hz) / (high - middle)
            bank[band, index] = max(0.0, inside) * 2 / (high - low)
    return bank


def naive_mel(audio: Tensor) -> np.ndarray:
    padded = reflected(audio.double().numpy(), 384, 384)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(1_024) / 1_024)
    starts = range(0, len(padded) - 1_023, 256)
    spectra = np.stack([np.fft.rfft(window * padded[start : start + 1_024]) for start in starts], 1)
    return np.log(np.maximum(naive_mel_bank() @ np.sqrt(np.abs(spectra) ** 2 + 1e-9), 1e-5))


class Naive:
    """The network on ``[C, T]`` arrays in float64."""

    def __init__(self, weights: Weights) -> None:
        self.w = {name: tensor.double().numpy() for name, tensor in weights.items()}

    def conv(self, x: np.ndarray, name: str, dilation: int = 1) -> np.ndarray:
        kernel, bias = self.w[f"speaker_encoder.{name}.weight"], self.w[f"speaker_encoder.{name}.bias"]
        around = (kernel.shape[2] - 1) * dilation
        padded = reflected(x, around // 2, around - around // 2)
        taps = (kernel[:, :, k] @ padded[:, k * dilation : k * dilation + x.shape[1]] for k in range(kernel.shape[2]))
        return sum(taps) + bias[:, None]

    def block(self, x: np.ndarray, index: int) -> np.ndarray:
        name, dilation = f"blocks.{index}", index + 1
        groups = np.split(np.maximum(self.conv(x, f"{name}.tdnn1.conv"), 0), 8)
        outputs = [groups[0]]
        for j in range(1, 8):
            fed = groups[j] if j == 1 else groups[j] + outputs[-1]
            outputs.append(np.maximum(self.conv(fed, f"{name}.res2net_block.blocks.{j - 1}.conv", dilation), 0))
        y = np.maximum(self.conv(np.concatenate(outputs), f"{name}.tdnn2.conv"), 0)
        squeezed = np.maximum(self.conv(y.mean(1, keepdims=True), f"{name}.se_block.conv1"), 0)
        return x + y / (1 + np.exp(-self.conv(squeezed, f"{name}.se_block.conv2")))

    def embed(self, mel: np.ndarray) -> np.ndarray:
        x = np.maximum(self.conv(mel, "blocks.0.conv"), 0)
        outputs = []
        for index in (1, 2, 3):
            x = self.block(x, index)
            outputs.append(x)
        x = np.maximum(self.conv(np.concatenate(outputs), "mfa.conv"), 0)
        mean, deviation = x.mean(1, keepdims=True), np.sqrt(np.maximum(x.var(1, keepdims=True), 1e-12))
        context = np.concatenate([x, mean + 0 * x, deviation + 0 * x])
        scores = self.conv(np.tanh(np.maximum(self.conv(context, "asp.tdnn.conv"), 0)), "asp.conv")
        share = np.exp(scores - scores.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        mean = (share * x).sum(1, keepdims=True)
        deviation = np.sqrt(np.maximum((share * (x - mean) ** 2).sum(1, keepdims=True), 1e-12))
        return self.conv(np.concatenate([mean, deviation]), "fc")[:, 0]


class TestMel:
    def test_filter_bank_equals_the_definition(self):
        np.testing.assert_allclose(mel_filter_bank(128), naive_mel_bank(), rtol=0, atol=1e-8)

    def test_filters_are_triangles_of_equal_area(self):
        areas = mel_filter_bank(128).sum(1) * 24_000 / 1_024
        np.testing.assert_allclose(areas[-40:], 1.0, atol=0.01)  # narrow ones are sampled too coarsely

    @both_ways
    @pytest.mark.parametrize("samples", [385, 1_279, 1_280, 30_001])
    def test_frames_equal_the_definition(self, stft, samples):
        audio = clip(samples)
        frames = MelSpectrogram(128, "cpu", stft=stft)(audio)
        assert frames.dtype == torch.float32
        assert frames.shape == (128, samples // 256)
        np.testing.assert_allclose(frames.numpy(), naive_mel(audio), rtol=0, atol=2e-4)

    def test_both_ways_agree(self):
        audio = clip(48_000)
        found = [MelSpectrogram(128, "cpu", stft=stft)(audio) for stft in (True, False)]
        torch.testing.assert_close(*found, rtol=0, atol=2e-4)

    @both_ways
    def test_silence_is_finite(self, stft):
        frames = MelSpectrogram(128, "cpu", stft=stft)(torch.zeros(5_000))
        floor = np.log(np.maximum(naive_mel_bank().sum(1) * math.sqrt(1e-9), 1e-5))
        np.testing.assert_allclose(frames.numpy(), np.repeat(floor[:, None], 19, 1), rtol=0, atol=1e-4)

    def test_without_a_transform_none_is_called(self, monkeypatch):
        def fail(*args, **kwargs):
            raise AssertionError("torch.stft was called")

        monkeypatch.setattr(torch, "stft", fail)
        assert MelSpectrogram(128, "cpu", stft=False)(clip(5_000)).shape == (128, 19)
        with pytest.raises(AssertionError):
            MelSpectrogram(128, "cpu", stft=True)(clip(5_000))


class TestEmbedding:
    @both_ways
    @pytest.mark.parametrize("samples", [1_280, 5_001, 30_000])
    def test_equals_the_definition(self, weights, stft, samples):
        audio = clip(samples, seed=samples)
        embedding = loaded(weights, stft=stft).embed(audio)
        assert embedding.dtype == torch.float32
        assert embedding.shape == (MODEL.talker.hidden_size,)
        np.testing.assert_allclose(embedding.numpy(), Naive(weights).embed(naive_mel(audio)), rtol=0, atol=1e-4)

    def test_tells_voices_apart(self, weights):
        encoder = loaded(weights)
        one, other = encoder.embed(clip(30_000, seed=1)), encoder.embed(1.5 * clip(30_000, seed=2).flip(0))
        assert (one - other).abs().max() > 1e-2

    @pytest.mark.parametrize("samples", [0, 1, 384, 1_279])
    def test_of_too_short_a_clip_is_refused(self, weights, samples):
        with pytest.raises(RequestError, match="at least 53 ms are needed") as caught:
            loaded(weights).embed(clip(samples))
        assert caught.value.field == "ref_audio"

    def test_of_stereo_is_refused(self, weights):
        with pytest.raises(RequestError, match="mono"):
            loaded(weights).embed(torch.zeros(2, 5_000))


class TestWeights:
    def test_of_other_modules_are_passed_over(self, weights):
        assert "talker.x" not in SpeakerEncoder(speaker_config(), "cpu", stft=True).load_weights(
            {**weights, "talker.x": torch.ones(1)}.items()
        )

    def test_cover_the_inventory(self):
        for size in ("tiny", "0.6B", "1.7B"):
            files = compose("base", size, PUBLISHED_TEXT_TOKENS, 151_936)
            config = ModelConfig.from_dicts(files["config.json"], files["speech_tokenizer/config.json"])
            inventory = main_tensors(config).items()
            assert config.speaker_encoder is not None
            assert SpeakerEncoder(config.speaker_encoder, "meta", stft=True).expected_tensors() == {
                name: shape for name, shape in inventory if name.startswith("speaker_encoder.")
            }

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"speaker_encoder.fc.bias": None}, "missing tensor speaker_encoder.fc.bias"),
            ({"speaker_encoder.more": torch.ones(1)}, "unknown tensor speaker_encoder.more"),
            ({"speaker_encoder.fc.bias": torch.ones(3)}, r"has shape \[3\], expected \[64\]"),
        ],
    )
    def test_that_do_not_fit_are_refused(self, weights, change, message):
        changed = {name: tensor for name, tensor in (weights | change).items() if tensor is not None}
        with pytest.raises(CheckpointError, match=message):
            SpeakerEncoder(speaker_config(), "cpu", stft=True).load_weights(changed.items())


class TestConfig:
    def test_published_files_leave_the_sizes_out(self):
        given = {"speaker_encoder_config": {"enc_dim": 2_048, "sample_rate": 24_000}}
        config = parse_speaker_encoder_config(given, "config.json")
        assert config.channels == (512, 512, 512, 512, 1_536)
        assert (config.kernel_sizes, config.dilations) == ((5, 3, 3, 3, 1), (1, 2, 3, 4, 1))
        assert (config.embedding_size, config.num_mels, config.groups) == (2_048, 128, 8)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"sample_rate": 16_000}, "sample_rate is 16000; only 24000"),
            ({"enc_dim": None}, "enc_dim is missing"),
            ({"enc_dilations": [1, 2]}, "one entry per stage"),
            ({"enc_channels": [512, 256, 512, 512, 1536]}, "must be equal"),
            ({"enc_res2net_scale": 7}, "enc_res2net_scale 7"),
        ],
    )
    def test_what_is_not_implemented_is_refused(self, change, message):
        given = {"speaker_encoder_config": {"enc_dim": 64, "sample_rate": 24_000, **change}}
        with pytest.raises(ConfigError, match=message):
            parse_speaker_encoder_config(given, "config.json")

    def test_embedding_must_fit_the_talker(self):
        changed = FILES["config.json"] | {"speaker_encoder_config": {"enc_dim": 63, "sample_rate": 24_000}}
        with pytest.raises(ConfigError, match="enc_dim is 63"):
            ModelConfig.from_dicts(changed, FILES["speech_tokenizer/config.json"])
