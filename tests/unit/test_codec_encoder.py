"""The codec encoder against a naive second writing of its definition.

``naive_encode`` works on the raw tensors of a checkpoint with whole clips, explicit padding and one attention matrix
per head; it shares no code with the package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qwen3tts_hw.checkpoint.inventory import codec_tensors, is_unused
from qwen3tts_hw.checkpoint.published import PUBLISHED_TEXT_TOKENS, compose
from qwen3tts_hw.codec import CodecEncoder, encoder, encoder_transformer
from qwen3tts_hw.encoder_config import CodecEncoderConfig, parse_codec_encoder_config
from qwen3tts_hw.errors import CheckpointError, ConfigError, RequestError

CODEC_JSON = compose("base", "tiny", PUBLISHED_TEXT_TOKENS, 1_000)["speech_tokenizer/config.json"] | {
    "encoder_config": {
        **compose("base", "tiny", PUBLISHED_TEXT_TOKENS, 1_000)["speech_tokenizer/config.json"]["encoder_config"],
        "num_filters": 4,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "sliding_window": 5,
    }
}
CONFIG = parse_codec_encoder_config(CODEC_JSON, "codec.json")
STEP = 960  # samples per position of the transformer
Weights = dict[str, Tensor]


def random_weights() -> Weights:
    """All tensors of the codec's file under their checkpoint names, the encoder's in sane ranges."""
    rng = torch.Generator().manual_seed(3)
    shapes = {name: shape for name, shape in codec_tensors(CODEC_JSON).items() if name.startswith("encoder.")}
    return {name: random_tensor(name, shape, rng) for name, shape in shapes.items()}


def random_tensor(name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=rng)
    if name.endswith("cluster_usage"):
        return noise.abs() + 0.1
    if name.endswith("embed_sum"):
        return 2.0 * noise
    if name.endswith("scale"):
        return 0.7 + 0.3 * noise
    if "norm" in name:
        return 0.2 * noise + (1.0 if name.endswith("weight") else 0.0)
    return 0.1 * noise if name.endswith("bias") else 1.3 * noise / math.sqrt(math.prod(shape[1:]))


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
    return random_weights()


def loaded(weights: Weights, *, windowed: bool = False) -> CodecEncoder:
    made = CodecEncoder(CONFIG, "cpu", windowed=windowed)
    assert made.load_weights(weights.items()) == {name for name in weights if not is_unused(name)}
    return made


@pytest.fixture(scope="module")
def codec_encoder(weights: Weights) -> CodecEncoder:
    return loaded(weights)


# The naive reference.


def naive_conv(x: Tensor, w: Weights, name: str, *, stride: int = 1, mode: str = "constant") -> Tensor:
    """Formula of the specification, on ``[C, L]``; dilation 1."""
    kernel, length = w[f"{name}.weight"], x.shape[1]
    taps = kernel.shape[2]
    left = taps - stride
    outputs = math.ceil((length - taps + left) / stride + 1)
    right = (outputs - 1) * stride + taps - left - length
    before, after = x[:, :1].expand(-1, left), x[:, -1:].expand(-1, right)
    if mode == "constant":
        before, after = torch.zeros_like(before), torch.zeros_like(after)
    padded = torch.cat((before, x, after), 1)
    windows = torch.stack([padded[:, at * stride : at * stride + taps].flatten() for at in range(outputs)], 1)
    y = kernel.flatten(1) @ windows
    return y + w[f"{name}.bias"][:, None] if f"{name}.bias" in w else y


def naive_convolutions(audio: Tensor, w: Weights) -> Tensor:
    layers = "encoder.encoder.layers"
    x = naive_conv(audio[None], w, f"{layers}.0.conv")
    for stage, stride in enumerate((4, 5, 6, 8)):
        block = f"{layers}.{1 + 3 * stage}.block"
        y = naive_conv(functional.elu(x), w, f"{block}.1.conv")
        x = x + naive_conv(functional.elu(y), w, f"{block}.3.conv")
        x = naive_conv(functional.elu(x), w, f"{layers}.{3 + 3 * stage}.conv", stride=stride)
    return naive_conv(functional.elu(x), w, f"{layers}.14.conv")


def naive_norm(x: Tensor, w: Weights, name: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def naive_rope(x: Tensor) -> Tensor:
    half = x.shape[1] // 2
    rates = torch.tensor([10_000.0 ** (-pair / half) for pair in range(half)])
    angles = torch.arange(x.shape[0]).float()[:, None] * rates
    a, b = x[:, :half], x[:, half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), 1)


def naive_attention(x: Tensor, w: Weights, name: str, window: int | None) -> Tensor:
    query, key, value = (x @ w[f"{name}.{part}_proj.weight"].T for part in "qkv")
    ago = torch.arange(len(x))[:, None] - torch.arange(len(x))
    seen = (ago >= 0) & (ago < (window or len(x)))
    heads = []
    for first in range(0, query.shape[1], CONFIG.head_dim):
        part = slice(first, first + CONFIG.head_dim)
        scores = naive_rope(query[:, part]) @ naive_rope(key[:, part]).T / math.sqrt(CONFIG.head_dim)
        heads.append(torch.where(seen, scores, -torch.inf).softmax(1) @ value[:, part])
    return torch.cat(heads, 1) @ w[f"{name}.o_proj.weight"].T


def naive_quantize(x: Tensor, w: Weights, branch: str, count: int) -> list[Tensor]:
    prefix = f"encoder.quantizer.{branch}_residual_vector_quantizer"
    rest = x @ w[f"{prefix}.input_proj.weight"][:, :, 0].T
    codes = []
    for layer in range(count):
        book = f"{prefix}.layers.{layer}.codebook"
        table = w[f"{book}.embed_sum"] / w[f"{book}.cluster_usage"].clamp(min=1e-5)[:, None]
        distances = (rest[:, None] - table).pow(2).sum(2).sqrt()
        codes.append(distances.argmin(1))
        rest = rest - table[codes[-1]]
    return codes


def naive_encode(audio: Tensor, w: Weights, window: int | None = None) -> Tensor:
    x = naive_convolutions(audio, w).T  # [positions, C]
    for layer in range(CONFIG.num_layers):
        name = f"encoder.encoder_transformer.layers.{layer}"
        y = naive_attention(naive_norm(x, w, f"{name}.input_layernorm"), w, f"{name}.self_attn", window)
        x = x + w[f"{name}.self_attn_layer_scale.scale"] * y
        y = naive_norm(x, w, f"{name}.post_attention_layernorm") @ w[f"{name}.mlp.fc1.weight"].T
        y = y * 0.5 * (1.0 + torch.erf(y / math.sqrt(2.0)))
        x = x + w[f"{name}.mlp_layer_scale.scale"] * (y @ w[f"{name}.mlp.fc2.weight"].T)
    frames = naive_conv(x.T, w, "encoder.downsample.conv", stride=2, mode="replicate").T
    codes = naive_quantize(frames, w, "semantic", 1) + naive_quantize(frames, w, "acoustic", 15)
    return torch.stack(codes, 1)[: math.ceil(len(audio) / 1_920)]


class TestCodes:
    @pytest.mark.parametrize("samples", [1, 3, 959, 960, 961, 1_919, 1_920, 1_921, 2_881, 24_000])
    def test_equal_the_definition(self, codec_encoder, weights, samples):
        audio = clip(samples, seed=samples)
        codes = codec_encoder.encode(audio)
        assert codes.dtype == torch.int64
        assert torch.equal(codes, naive_encode(audio, weights))

    @pytest.mark.parametrize(("samples", "frames"), [(1, 1), (1_919, 1), (1_920, 1), (1_921, 2), (240_000, 125)])
    def test_one_frame_per_started_1920_samples(self, codec_encoder, samples, frames):
        assert codec_encoder.encode(clip(samples)).shape == (frames, 16)

    def test_vary(self, codec_encoder):
        codes = codec_encoder.encode(clip(48_000))
        assert min(len(codes[:, book].unique()) for book in range(16)) > 5

    def test_see_the_past_only(self, codec_encoder):
        audio = clip(12 * 1_920)
        changed = audio.clone()
        changed[7 * 1_920] += 0.5
        before, after = codec_encoder.encode(audio), codec_encoder.encode(changed)
        assert torch.equal(before[:7], after[:7])
        assert not torch.equal(before[7], after[7])

    def test_equal_entries_give_the_first(self, weights):
        book = "encoder.quantizer.semantic_residual_vector_quantizer.layers.0.codebook"
        flat = {f"{book}.embed_sum": torch.ones(2_048, 8), f"{book}.cluster_usage": torch.ones(2_048)}
        assert loaded(weights | flat).encode(clip(24_000))[:, 0].tolist() == [0] * 13

    def test_of_unused_entries_are_finite(self, weights):
        """A count of zero, as dead entries have, is taken for 1e-5."""
        book = "encoder.quantizer.semantic_residual_vector_quantizer.layers.0.codebook.cluster_usage"
        changed = weights | {book: torch.zeros(2_048)}
        audio = clip(24_000)
        assert torch.equal(loaded(changed).encode(audio), naive_encode(audio, changed))


class TestClips:
    def test_together_are_encoded_as_alone(self, codec_encoder):
        clips = [clip(samples, seed=samples) for samples in (1_921, 30_000, 5)]
        together = codec_encoder.encode_all(clips)
        assert all(torch.equal(one, codec_encoder.encode(audio)) for one, audio in zip(together, clips, strict=True))

    @pytest.mark.parametrize("shape", [(1, 1_920), (0,), ()])
    def test_of_another_form_are_refused(self, codec_encoder, shape):
        with pytest.raises(RequestError, match="mono audio") as caught:
            codec_encoder.encode(torch.zeros(shape))
        assert caught.value.field == "ref_audio"

    @pytest.mark.parametrize("samples", [9_599, 9_600, 9_601, 33_333])
    def test_are_the_same_in_parts(self, codec_encoder, monkeypatch, samples):
        audio = clip(samples)
        whole, codes = codec_encoder._features(audio), codec_encoder.encode(audio)
        monkeypatch.setattr(encoder, "SEGMENT_SAMPLES", 9_600)
        monkeypatch.setattr(encoder_transformer, "QUERY_BLOCK_POSITIONS", 7)
        torch.testing.assert_close(codec_encoder._features(audio), whole, rtol=0, atol=1e-5)
        assert torch.equal(codec_encoder.encode(audio), codes)

    def test_parts_overlap_by_exactly_what_is_looked_back(self, codec_encoder):
        past, position = codec_encoder.convolutions.past_samples, 12
        first = position * STEP - past
        audio = clip(20 * STEP)
        reference = codec_encoder._features(audio)[0, :, position]
        for sample, changes in ((first - 1, False), (first, True)):
            changed = audio.clone()
            changed[sample] += 100.0
            assert torch.equal(codec_encoder._features(changed)[0, :, position], reference) != changes

    def test_of_a_minute_need_no_large_tensor(self, codec_encoder):
        with LargestTensor() as largest:
            codes = codec_encoder.encode(clip(1_440_000))
        assert codes.shape == (750, 16)
        # Distances to one codebook. In one piece the convolutions need 5.8 million elements, attention 4.5 million.
        assert largest.elements <= 750 * 2_048


class LargestTensor(TorchDispatchMode):
    """Sees every operation's results and keeps the largest number of elements."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


class TestWindow:
    def test_is_off_at_first(self, codec_encoder, weights):
        audio = clip(30 * STEP)
        assert torch.equal(codec_encoder.encode(audio), naive_encode(audio, weights))
        assert not torch.equal(codec_encoder.encode(audio), naive_encode(audio, weights, window=5))

    def test_limits_attention(self, weights, monkeypatch):
        audio = clip(30 * STEP)
        windowed = loaded(weights, windowed=True)
        expected = naive_encode(audio, weights, window=CONFIG.sliding_window)
        assert torch.equal(windowed.encode(audio), expected)
        monkeypatch.setattr(encoder_transformer, "QUERY_BLOCK_POSITIONS", 4)
        assert torch.equal(windowed.encode(audio), expected)

    def test_does_not_matter_for_short_clips(self, codec_encoder, weights):
        audio = clip(5 * STEP)
        assert torch.equal(loaded(weights, windowed=True).encode(audio), codec_encoder.encode(audio))


class TestWeights:
    def test_cover_the_inventory(self):
        expected = CodecEncoder(CONFIG, "meta").expected_tensors()
        inventory = codec_tensors(CODEC_JSON)
        assert expected == {
            name: shape for name, shape in inventory.items() if name.startswith("encoder.") and not is_unused(name)
        }
        assert any(name.startswith("encoder.") and is_unused(name) for name in inventory)

    def test_of_the_decoder_are_passed_over(self, weights):
        used = CodecEncoder(CONFIG, "cpu").load_weights({**weights, "decoder.anything": torch.ones(1)}.items())
        assert "decoder.anything" not in used

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"encoder.downsample.conv.weight": None}, "missing tensor encoder.downsample.conv.weight"),
            ({"encoder.new.weight": torch.ones(1)}, "unknown tensor encoder.new.weight"),
            ({"encoder.downsample.conv.weight": torch.ones(1)}, r"has shape \[1\], expected \[16, 16, 4\]"),
        ],
    )
    def test_that_do_not_fit_are_refused(self, weights, change, message):
        changed = {name: tensor for name, tensor in (weights | change).items() if tensor is not None}
        with pytest.raises(CheckpointError, match=message):
            CodecEncoder(CONFIG, "cpu").load_weights(changed.items())


class TestConfig:
    def test_published_sizes(self):
        codec = compose("base", "1.7B", PUBLISHED_TEXT_TOKENS, 151_936)["speech_tokenizer/config.json"]
        config = parse_codec_encoder_config(codec, "codec.json")
        assert isinstance(config, CodecEncoderConfig)
        assert (config.strides, config.samples_per_position) == ((4, 5, 6, 8), STEP)
        assert (config.num_layers, config.num_heads, config.head_dim, config.sliding_window) == (8, 8, 64, 250)
        assert (config.num_quantizers, config.vector_dim) == (32, 256)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("audio_channels", 2),
            ("sampling_rate", 16_000),
            ("num_semantic_quantizers", 2),
            ("num_quantizers", 15),
            ("pad_mode", "reflect"),
            ("use_causal_conv", False),
            ("use_conv_shortcut", True),
            ("upsampling_ratios", [8, 6, 5, 5]),
            ("head_dim", 7),
            ("codebook_dim", None),
        ],
    )
    def test_what_is_not_implemented_is_refused(self, key, value):
        changed = {**CODEC_JSON, "encoder_config": {**CODEC_JSON["encoder_config"], key: value}}
        with pytest.raises(ConfigError, match=rf"codec\.json: encoder_config.*{key}"):
            parse_codec_encoder_config(changed, "codec.json")
