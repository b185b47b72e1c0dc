"""The codec decoder against a naive second writing of its definition, and streaming against one pass.

``naive_decode`` works on the raw tensors of a checkpoint with whole sequences, explicit loops over heads and plain
transposed convolutions; it shares no code with the package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qwen3tts_hw.codec import CodecDecoder, CodecState, to_pcm16
from qwen3tts_hw.config import CodecDecoderConfig
from qwen3tts_hw.errors import CheckpointError, RequestError

CONFIG = CodecDecoderConfig(
    codebook_dim=32,
    latent_dim=32,
    decoder_dim=48,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    sliding_window=5,
    upsample_rates=(8, 5, 4, 3),
    upsampling_ratios=(2, 2),
)
STEP = 1_920
RECEPTIVE_FRAMES = 24  # ceil(3 layers * 4 + 11.38): attention history plus convolutions
Weights = dict[str, Tensor]


def random_weights(decoder: CodecDecoder, seed: int = 0) -> Weights:
    """Weights in sane ranges: audio that neither saturates nor vanishes."""
    rng = torch.Generator().manual_seed(seed)
    return {name: random_tensor(name, shape, rng) for name, shape in decoder.expected_tensors().items()}


def random_tensor(name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=rng)
    if name.endswith("cluster_usage"):
        return noise.abs() + 0.1
    if name.endswith("embedding_sum"):
        return 3.0 * noise
    if name.endswith(("alpha", "beta")):
        return 0.3 * noise
    if name.endswith(("scale", "gamma")):
        return 0.7 + 0.3 * noise
    if "norm" in name:
        return 0.2 * noise + (1.0 if name.endswith("weight") else 0.0)
    if name.endswith("bias"):
        return 0.1 * noise
    factor = 0.3 if "conv2" in name else 0.05 if "decoder.6." in name else 0.9
    fan_in = shape[0] if "block.1." in name else math.prod(shape[1:])
    return factor * noise / math.sqrt(fan_in)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, and waiting for one another costs much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights(CodecDecoder(CONFIG, "cpu", torch.float32))


@pytest.fixture(scope="module")
def decoder(weights: Weights) -> CodecDecoder:
    return loaded(weights)


def loaded(weights: Weights, dtype: torch.dtype = torch.float32) -> CodecDecoder:
    decoder = CodecDecoder(CONFIG, "cpu", dtype)
    assert decoder.load_weights(weights.items()) == set(weights)
    return decoder


def random_codes(rows: int, frames: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 2048, (rows, 16, frames), generator=torch.Generator().manual_seed(seed))


def slots(*ids: int) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def stream(decoder: CodecDecoder, codes: Tensor, chunks: list[int], state: CodecState, at: Tensor) -> Tensor:
    """Decode ``codes`` chunk by chunk; ``chunks`` is repeated until all frames are used."""
    parts, first = [], 0
    while first < codes.shape[2]:
        frames = chunks[len(parts) % len(chunks)]
        parts.append(decoder.decode_step(codes[:, :, first : first + frames], state, at))
        first += frames
    return torch.cat(parts, 1)


# The naive reference.


def naive_snake(x: Tensor, w: Weights, name: str) -> Tensor:
    alpha, beta = w[f"{name}.alpha"].exp()[:, None], w[f"{name}.beta"].exp()[:, None]
    return x + torch.sin(x * alpha) ** 2 / (beta + 1e-9)


def naive_conv(x: Tensor, w: Weights, name: str, dilation: int = 1, groups: int = 1) -> Tensor:
    kernel = w[f"{name}.weight"]
    x = functional.pad(x, ((kernel.shape[2] - 1) * dilation, 0))
    return functional.conv1d(x, kernel, w[f"{name}.bias"], dilation=dilation, groups=groups)


def naive_upsample(x: Tensor, w: Weights, name: str, stride: int) -> Tensor:
    y = functional.conv_transpose1d(x, w[f"{name}.weight"], w[f"{name}.bias"], stride=stride)
    return y[..., : x.shape[2] * stride]


def naive_dequantize(codes: Tensor, w: Weights) -> Tensor:
    total = torch.zeros(())
    for group, layers in (("rvq_first", range(1)), ("rvq_rest", range(15))):
        summed = torch.zeros(())
        for layer in layers:
            book = f"decoder.quantizer.{group}.vq.layers.{layer}._codebook"
            table = w[f"{book}.embedding_sum"] / w[f"{book}.cluster_usage"].clamp(min=1e-5)[:, None]
            summed = summed + table[codes[:, layer + (group == "rvq_rest")]]
        total = total + summed @ w[f"decoder.quantizer.{group}.output_proj.weight"][:, :, 0].T
    return total.transpose(1, 2)


def naive_rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + CONFIG.rms_norm_eps) * weight


def naive_rope(x: Tensor) -> Tensor:
    half = CONFIG.head_dim // 2
    rates = torch.tensor([CONFIG.rope_theta ** (-2 * pair / CONFIG.head_dim) for pair in range(half)])
    angles = torch.arange(x.shape[1]).float()[:, None] * rates
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def naive_attention(x: Tensor, w: Weights, name: str) -> Tensor:
    size, frames = CONFIG.head_dim, x.shape[1]
    age = torch.arange(frames)[:, None] - torch.arange(frames)
    visible = (age >= 0) & (age < CONFIG.sliding_window)
    heads = []
    for head in range(CONFIG.num_heads):
        q, k, v = (x @ w[f"{name}.{part}_proj.weight"][head * size : (head + 1) * size].T for part in "qkv")
        scores = naive_rope(q) @ naive_rope(k).transpose(1, 2) / math.sqrt(size)
        heads.append(torch.where(visible, scores, -math.inf).softmax(-1) @ v)
    return torch.cat(heads, -1) @ w[f"{name}.o_proj.weight"].T


def naive_transformer(x: Tensor, w: Weights) -> Tensor:
    root = "decoder.pre_transformer"
    x = x @ w[f"{root}.input_proj.weight"].T + w[f"{root}.input_proj.bias"]
    for index in range(CONFIG.num_layers):
        layer = f"{root}.layers.{index}"
        y = naive_rms(x, w[f"{layer}.input_layernorm.weight"])
        x = x + w[f"{layer}.self_attn_layer_scale.scale"] * naive_attention(y, w, f"{layer}.self_attn")
        y = naive_rms(x, w[f"{layer}.post_attention_layernorm.weight"])
        y = functional.silu(y @ w[f"{layer}.mlp.gate_proj.weight"].T) * (y @ w[f"{layer}.mlp.up_proj.weight"].T)
        x = x + w[f"{layer}.mlp_layer_scale.scale"] * (y @ w[f"{layer}.mlp.down_proj.weight"].T)
    x = naive_rms(x, w[f"{root}.norm.weight"])
    return x @ w[f"{root}.output_proj.weight"].T + w[f"{root}.output_proj.bias"]


def naive_convnext(x: Tensor, w: Weights, name: str) -> Tensor:
    y = naive_conv(x, w, f"{name}.dwconv.conv", groups=x.shape[1]).transpose(1, 2)
    centred = y - y.mean(-1, keepdim=True)
    y = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)
    y = y * w[f"{name}.norm.weight"] + w[f"{name}.norm.bias"]
    y = y @ w[f"{name}.pwconv1.weight"].T + w[f"{name}.pwconv1.bias"]
    y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
    y = y @ w[f"{name}.pwconv2.weight"].T + w[f"{name}.pwconv2.bias"]
    return x + (w[f"{name}.gamma"] * y).transpose(1, 2)


def naive_block(x: Tensor, w: Weights, name: str, stride: int) -> Tensor:
    x = naive_upsample(naive_snake(x, w, f"{name}.0"), w, f"{name}.1.conv", stride)
    for unit, dilation in ((2, 1), (3, 3), (4, 9)):
        y = naive_conv(naive_snake(x, w, f"{name}.{unit}.act1"), w, f"{name}.{unit}.conv1.conv", dilation)
        x = x + naive_conv(naive_snake(y, w, f"{name}.{unit}.act2"), w, f"{name}.{unit}.conv2.conv")
    return x


def naive_decode(codes: Tensor, w: Weights) -> Tensor:
    x = naive_conv(naive_dequantize(codes, w), w, "decoder.pre_conv.conv")
    x = naive_transformer(x.transpose(1, 2), w).transpose(1, 2)
    for index, ratio in enumerate(CONFIG.upsampling_ratios):
        x = naive_upsample(x, w, f"decoder.upsample.{index}.0.conv", ratio)
        x = naive_convnext(x, w, f"decoder.upsample.{index}.1")
    x = naive_conv(x, w, "decoder.decoder.0.conv")
    for index, rate in enumerate(CONFIG.upsample_rates, start=1):
        x = naive_block(x, w, f"decoder.decoder.{index}.block", rate)
    x = naive_conv(naive_snake(x, w, "decoder.decoder.5"), w, "decoder.decoder.6.conv")
    return x[:, 0].clamp(-1, 1)


# One pass.


@pytest.mark.parametrize("matmul_from", [1, 10_000])
@pytest.mark.parametrize("frames", [1, 2, 40])
def test_one_pass_equals_the_naive_reference(
    decoder: CodecDecoder, weights: Weights, monkeypatch: pytest.MonkeyPatch, frames: int, matmul_from: int
) -> None:
    monkeypatch.setattr("qwen3tts_hw.codec.layers.MATMUL_MIN_CHANNELS", matmul_from)
    codes = random_codes(2, frames)
    expected = naive_decode(codes, weights)
    assert expected.std() > 0.01  # neither silent nor clipped, or the comparison would mean little
    assert expected.abs().max() < 1.0
    torch.testing.assert_close(decoder.decode(codes), expected, rtol=0, atol=1e-5)


def test_a_long_pass_is_attended_in_blocks_without_a_seam(
    decoder: CodecDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = random_codes(1, 40)
    whole = decoder.decode(codes)
    monkeypatch.setattr("qwen3tts_hw.codec.transformer.QUERY_BLOCK_FRAMES", 7)
    torch.testing.assert_close(decoder.decode(codes), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("frames", [1, 3])
def test_every_frame_gives_1920_samples_within_range(weights: Weights, frames: int) -> None:
    loud = {**weights, "decoder.decoder.6.conv.weight": 100 * weights["decoder.decoder.6.conv.weight"]}
    pcm = loaded(loud).decode(random_codes(2, frames))
    assert pcm.shape == (2, frames * STEP) and pcm.dtype == torch.float32
    assert pcm.abs().max() == 1.0


def test_a_frame_does_not_reach_earlier_samples(decoder: CodecDecoder) -> None:
    codes = random_codes(1, 12)
    changed = codes.clone()
    changed[:, :, 7] = (changed[:, :, 7] + 1) % 2048
    before, after = decoder.decode(codes)[0], decoder.decode(changed)[0]
    torch.testing.assert_close(after[: 7 * STEP], before[: 7 * STEP], rtol=0, atol=1e-6)
    assert (after[7 * STEP : 8 * STEP] - before[7 * STEP : 8 * STEP]).abs().max() > 1e-3


def test_receptive_field_is_that_of_the_layers(weights: Weights) -> None:
    decoder = loaded(weights, torch.float64)
    codes = random_codes(1, RECEPTIVE_FRAMES + 4)
    changed = codes.clone()
    changed[:, :, 2] = (changed[:, :, 2] + 1) % 2048
    difference = (decoder.decode(codes) - decoder.decode(changed)).view(-1, STEP).abs().amax(1)
    assert difference[2 + RECEPTIVE_FRAMES] > 0
    assert difference[3 + RECEPTIVE_FRAMES :].eq(0).all()


def test_ids_outside_a_codebook_count_as_its_nearest_entry(decoder: CodecDecoder) -> None:
    codes = random_codes(1, 3)
    codes[0, 0, 0], codes[0, 5, 1], codes[0, 15, 2] = -1, -7, 2150
    nearest = codes.clamp(0, 2047)
    assert torch.equal(decoder.decode(codes), decoder.decode(nearest))


@pytest.mark.parametrize("shape", [(1, 15, 4), (1, 4, 16), (16, 4), (1, 16, 0)])
def test_codes_of_another_layout_are_refused(decoder: CodecDecoder, shape: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match=r"16 codebooks.*got \[") as caught:
        decoder.decode(torch.zeros(shape, dtype=torch.int64))
    assert caught.value.field == "codes"
    assert isinstance(caught.value, ValueError)


# Streaming.


@pytest.mark.parametrize("chunks", [[1], [3], [25], [1, 4, 2, 7, 11]], ids=str)
def test_streaming_equals_one_pass(decoder: CodecDecoder, chunks: list[int]) -> None:
    codes = random_codes(1, 53)
    streamed = stream(decoder, codes, chunks, decoder.new_state(1), slots(0))
    torch.testing.assert_close(streamed, decoder.decode(codes), rtol=0, atol=1e-5)


def test_positions_stay_exact_after_ten_minutes(decoder: CodecDecoder) -> None:
    codes, state = random_codes(1, 30), decoder.new_state(1)
    state.frames.fill_(8_400)  # as if 8,400 frames had gone by: rotary angles are relative, so nothing may change
    late = stream(decoder, codes, [1], state, slots(0))
    reference = decoder.new_state(1)
    reference.frames.fill_(100)
    torch.testing.assert_close(late, stream(decoder, codes, [30], reference, slots(0)), rtol=0, atol=1e-4)
    assert state.frames.item() == 8_430


def test_streams_of_different_progress_share_a_batch(decoder: CodecDecoder) -> None:
    codes, state = random_codes(3, 24), decoder.new_state(5)
    home = [4, 0, 2]
    done = [0, 0, 0]
    heard: list[list[Tensor]] = [[], [], []]
    for active, frames in (([0], 5), ([0, 1], 3), ([2, 1, 0], 1), ([1, 2], 6), ([2, 0], 4), ([0, 1, 2], 2)):
        batch = torch.stack([codes[row, :, done[row] : done[row] + frames] for row in active])
        pcm = decoder.decode_step(batch, state, slots(*(home[row] for row in active)))
        for row, samples in zip(active, pcm, strict=True):
            heard[row].append(samples)
            done[row] += frames
    for row, expected in enumerate(decoder.decode(codes)):
        torch.testing.assert_close(torch.cat(heard[row]), expected[: done[row] * STEP], rtol=0, atol=1e-5)
    assert state.frames.tolist() == [done[1], 0, done[2], 0, done[0]]


def test_a_reset_slot_starts_afresh_and_leaves_its_neighbours(decoder: CodecDecoder) -> None:
    codes, state = random_codes(2, 9), decoder.new_state(3)
    first = decoder.decode_step(codes, state, slots(0, 2))
    neighbour = [table[2].clone() for table in (state.frames, *state.tables)]
    state.reset(slots(0))
    assert all(table[0].eq(0).all() for table in (state.frames, *state.tables))
    assert all(
        torch.equal(table[2], kept) for table, kept in zip((state.frames, *state.tables), neighbour, strict=True)
    )
    again = decoder.decode_step(codes, state, slots(0, 1))  # slot 1 was never used: the same batch as at first
    assert torch.equal(again, first)


def test_padding_rows_may_share_a_slot(decoder: CodecDecoder) -> None:
    codes, state = random_codes(4, 6), decoder.new_state(3)
    alone = stream(decoder, codes[:1], [2], decoder.new_state(1), slots(0))
    padded = stream(decoder, codes, [2], state, slots(1, 2, 2, 2))
    torch.testing.assert_close(padded[:1], alone, rtol=0, atol=1e-5)
    assert padded.isfinite().all()
    assert state.frames.tolist() == [0, 6, 6]


def test_tables_are_updated_in_place_and_counted(decoder: CodecDecoder) -> None:
    state = decoder.new_state(4)
    addresses = [table.data_ptr() for table in (state.frames, *state.tables)]
    decoder.decode_step(random_codes(2, 3), state, slots(1, 3))
    state.reset(slots(1))
    assert [table.data_ptr() for table in (state.frames, *state.tables)] == addresses
    assert state.bytes_per_slot * 4 == sum(table.nbytes for table in (state.frames, *state.tables))


def test_state_made_in_inference_mode_works_outside(decoder: CodecDecoder) -> None:
    codes = random_codes(1, 2)
    with torch.inference_mode():
        state = decoder.new_state(1)
        decoder.decode_step(codes, state, slots(0))
    state.reset(slots(0))
    assert torch.equal(decoder.decode_step(codes, state, slots(0)), decoder.decode(codes))


# Precision and samples.


def test_bfloat16_stays_near_float32_and_streams(decoder: CodecDecoder, weights: Weights) -> None:
    half = loaded(weights, torch.bfloat16)
    codes, state = random_codes(1, 20), half.new_state(1)
    exact, whole = decoder.decode(codes), half.decode(codes)
    streamed = stream(half, codes, [1, 3], state, slots(0))
    assert whole.dtype == torch.float32 and state.tables[0].dtype == torch.bfloat16
    assert (whole - exact).square().mean().sqrt() < 0.1 * exact.std()
    assert (streamed - exact).square().mean().sqrt() < 0.1 * exact.std()


def test_pcm16_rounds_and_saturates() -> None:
    samples = torch.tensor([0.0, 1.0, -1.0, 1.5, -9.0, math.inf, math.nan, 0.6 / 32767, -1.4 / 32767])
    pcm = to_pcm16(samples)
    assert pcm.dtype == torch.int16
    assert pcm.tolist() == [0, 32767, -32767, 32767, -32767, 32767, 0, 1, -1]


# Loading.


def test_loader_takes_decoder_tensors_only(decoder: CodecDecoder, weights: Weights) -> None:
    extra = {
        "encoder.downsample.conv.weight": torch.zeros(1),
        "decoder.quantizer.rvq_first.input_proj.weight": torch.zeros(1),
        "decoder.quantizer.rvq_rest.input_proj.weight": torch.zeros(1),
    }
    other = CodecDecoder(CONFIG, "cpu", torch.float32)
    assert other.load_weights({**extra, **weights}.items()) == set(weights)
    codes = random_codes(1, 2)
    assert torch.equal(other.decode(codes), decoder.decode(codes))


def test_loader_names_every_tensor_that_does_not_fit(weights: Weights) -> None:
    damaged = dict(weights)
    del damaged["decoder.pre_conv.conv.bias"]
    damaged["decoder.pre_conv.conv.weight"] = torch.zeros(3, 3, 3)
    damaged["decoder.decoder.9.alpha"] = torch.zeros(3)
    with pytest.raises(CheckpointError) as caught:
        CodecDecoder(CONFIG, "cpu", torch.float32).load_weights(damaged.items())
    message = str(caught.value)
    assert "missing tensor decoder.pre_conv.conv.bias" in message
    assert "decoder.pre_conv.conv.weight has shape [3, 3, 3], expected [32, 32, 3]" in message
    assert "unknown tensor decoder.decoder.9.alpha" in message
