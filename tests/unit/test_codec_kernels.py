"""The codec decoder's fused form against its plain one, and the packing of weights that it rests on.

What needs no device runs here: packing, choice of form, and the kernels' indexing in Triton's interpreter, in float16
words because the interpreter multiplies no bfloat16. Precision and graphs need the device.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qwen3tts_hw import backends, codec_kernels, graph_wrappers
from qwen3tts_hw.codec import CodecDecoder, CodecState
from qwen3tts_hw.codec_kernels.base import ConvWeights, Snake
from qwen3tts_hw.codec_kernels.packing import EXACT, SINGLE, Format, format_of, pack, pack_snake, padded, to_words
from qwen3tts_hw.engine.codec_steps import CodecSteps
from qwen3tts_hw.errors import UnsupportedError
from tests.unit.test_codec import CONFIG, random_codes, random_weights, slots

BOUNDS = {"high": 1e-4, "medium": 1e-3, "low": 8e-3}  # largest difference from float32 on samples in [-1, 1]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Packing.


@pytest.mark.parametrize(
    ("form", "bound"), [(EXACT, 2**-16), (SINGLE, 2**-11), (Format(torch.float16, 2, 2), 2**-21)], ids=str
)
def test_words_add_up_to_the_values(form: Format, bound: float) -> None:
    values = torch.randn(5, 40, generator=rng())
    words = to_words(values, form.dtype, form.weight_words)
    assert words.shape == (5, form.weight_words, 40) and words.dtype == form.dtype
    assert ((words.float().sum(1) - values).abs() <= bound * values.abs() + 6e-8).all()


def unpacked(words: Tensor, scale: float) -> Tensor:
    return words.float().sum(2) * scale  # [columns, taps, C]


@pytest.mark.parametrize("form", [EXACT, SINGLE], ids=str)
def test_a_packed_convolution_is_the_convolution(form: Format) -> None:
    conv = ConvWeights(torch.randn(5, 7, 3, generator=rng()), torch.randn(5, generator=rng(1)), dilation=2)
    packed = pack(conv, form)
    assert (packed.columns, packed.taps, packed.channels, packed.history) == (32, 3, 32, 4)
    x = torch.randn(1, 7, 9, generator=rng(2))
    weight = unpacked(packed.words, packed.scale).permute(0, 2, 1)
    found = functional.conv1d(functional.pad(x, (0, 0, 0, 25)), weight, packed.bias, dilation=2)
    expected = functional.conv1d(x, conv.weight, conv.bias, dilation=2)
    torch.testing.assert_close(found[:, :5], expected, rtol=0, atol=5e-3)
    assert found[:, 5:].eq(0).all()


def test_phases_become_blocks_of_columns() -> None:
    conv = ConvWeights(torch.arange(6.0).view(6, 1, 1), torch.arange(6.0), phases=3)  # channel-major: c * 3 + phase
    packed = pack(conv, EXACT)
    assert packed.width == 32
    weight, bias = unpacked(packed.words, packed.scale)[:, 0, 0].view(3, 32), packed.bias.view(3, 32)
    assert weight[:, :2].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert torch.equal(weight, bias)


def test_a_gain_multiplies_weight_and_bias() -> None:
    conv = ConvWeights(torch.ones(2, 1, 1), torch.ones(2))
    packed = pack(conv, EXACT, gain=torch.tensor([2.0, -3.0]))
    assert unpacked(packed.words, packed.scale)[:2, 0, 0].tolist() == [2.0, -3.0]
    assert packed.bias[:2].tolist() == [2.0, -3.0]


def test_small_weights_survive_float16() -> None:
    tiny = ConvWeights(1e-7 * torch.randn(4, 4, 1, generator=rng()))
    packed = pack(tiny, SINGLE)
    found = unpacked(packed.words, packed.scale)[:4, 0, :4]
    torch.testing.assert_close(found, tiny.weight[:, :, 0], rtol=1e-3, atol=0)


def test_padding_channels_stay_silent() -> None:
    frequency, magnitude = pack_snake(Snake(torch.ones(5), torch.ones(5)))
    assert padded(5) == len(frequency) == 32
    assert magnitude[5:].eq(0).all()


def test_formats_follow_the_precision() -> None:
    assert {format_of("high", layer) for layer in ("front", "dilated 3", "exit")} == {EXACT}
    assert format_of("medium", "dilated 2") == SINGLE and format_of("medium", "dilated 1") == EXACT
    assert format_of("low", "front") == SINGLE


# The choice of form.


def test_auto_is_plain_where_there_are_no_kernels() -> None:
    cpu = backends.resolve("cpu")
    assert codec_kernels.create("auto", cpu, precision="medium") is None
    assert codec_kernels.create("plain", cpu, precision="medium") is None


@pytest.mark.parametrize(
    ("name", "precision", "message"),
    [("fused", "medium", "no compiler"), ("fast", "medium", "unknown codec form"), ("plain", "best", "precision")],
)
def test_what_cannot_run_is_refused(name: str, precision: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        codec_kernels.create(name, backends.resolve("cpu"), precision=precision)


class SilentForm:
    """A fast form whose decoder says nothing, for seeing where calls go."""

    name, precision = "silent", "high"

    def build(self, weights: codec_kernels.CodecWeights) -> SilentForm:
        self.weights = weights
        return self

    def new_state(self, slots: int) -> CodecState:
        return CodecState([], slots, device=torch.device("cpu"), dtype=torch.float32)

    def step(self, codes: Tensor, state: codec_kernels.StreamState, slots: Tensor) -> Tensor:
        return torch.zeros(codes.shape[0], codes.shape[2] * 1_920)


def test_a_fast_form_streams_and_the_one_pass_stays_plain() -> None:
    decoder = CodecDecoder(CONFIG, "cpu", torch.float32)
    decoder.load_weights(random_weights(decoder).items())
    codes, form = random_codes(1, 2), SilentForm()
    expected = decoder.decode(codes)
    decoder.use(form)
    assert decoder.form == "silent high" and decoder.is_fast
    assert decoder.decode_step(codes, decoder.new_state(2), slots(0)).eq(0).all()
    assert torch.equal(decoder.decode(codes), expected)
    assert [unit.dilated.dilation for unit in form.weights.blocks[0].units] == [1, 3, 9]
    assert [block.upsample.phases for block in form.weights.blocks] == [8, 5, 4, 3]


# Kernels, in the interpreter.

INTERPRETED = """
import dataclasses, torch
from qwen3tts_hw.codec import CodecDecoder
from qwen3tts_hw.codec_kernels import packing
from qwen3tts_hw.codec_kernels.fused import FusedForm
from tests.unit.test_codec import CONFIG, random_codes, random_weights
packing.EXACT = packing.Format(torch.float16, 2, 2)
torch.set_num_threads(1)
config = dataclasses.replace(CONFIG, upsample_rates=(2, 2, 2, 2), num_layers=1)
decoder = CodecDecoder(config, "cpu", torch.float32)
decoder.load_weights(random_weights(decoder).items())
decoder.use(FusedForm("high"))
codes, state, slots = random_codes(2, 4), decoder.new_state(3), torch.tensor([2, 0])
pcm = torch.cat([decoder.decode_step(part, state, slots) for part in codes.split([1, 3], 2)], 1)
assert state.frames.tolist() == [4, 0, 4], state.frames
difference = (pcm - decoder.decode(codes)).abs().max().item()
assert difference < 1e-5, difference
state.copy(2, 1)
assert torch.equal(*(decoder.decode_step(codes[:1, :, :2], state, torch.tensor([slot])) for slot in (1, 2)))
assert state.frames.tolist() == [4, 6, 6], state.frames
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_equal_the_plain_form_in_the_interpreter() -> None:
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2_000:]


# Kernels, on the device.


@pytest.fixture(scope="module")
def plain() -> CodecDecoder:
    backends.resolve("cuda").prepare_process()
    decoder = CodecDecoder(CONFIG, "cuda", torch.float32)
    decoder.load_weights((name, tensor.cuda()) for name, tensor in random_weights(decoder).items())
    return decoder


def fused(plain: CodecDecoder, precision: str = "high") -> CodecDecoder:
    form = codec_kernels.create("fused", backends.resolve("cuda"), precision=precision)
    assert form is not None
    plain.use(form)
    return plain


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["high", "medium", "low"])
@pytest.mark.parametrize("chunks", [[40], [1], [8], [1, 4, 2, 7, 11]], ids=str)
def test_streaming_equals_the_plain_one_pass(plain: CodecDecoder, precision: str, chunks: list[int]) -> None:
    decoder, codes = fused(plain, precision), random_codes(3, 40).cuda()
    state, at, parts, first = decoder.new_state(5), slots(3, 0, 2).cuda(), [], 0
    while first < 40:
        frames = min(chunks[len(parts) % len(chunks)], 40 - first)
        parts.append(decoder.decode_step(codes[:, :, first : first + frames], state, at))
        first += frames
    difference = (torch.cat(parts, 1) - decoder.decode(codes)).abs().max()
    assert difference < BOUNDS[precision]
    assert state.frames.tolist() == [40, 0, 40, 40, 0]


@pytest.mark.cuda
def test_rows_do_not_influence_each_other(plain: CodecDecoder) -> None:
    decoder, codes = fused(plain, "medium"), random_codes(300, 2).cuda()  # more rows than fit the buffers at once
    many = decoder.decode_step(codes, decoder.new_state(300), torch.arange(300, device="cuda"))
    for row in (0, 127, 128, 299):
        alone = decoder.decode_step(codes[row : row + 1], decoder.new_state(1), slots(0).cuda())
        torch.testing.assert_close(many[row : row + 1], alone, rtol=0, atol=1e-5)


@pytest.mark.cuda
def test_captured_steps_equal_eager_ones(plain: CodecDecoder) -> None:
    decoder, codes = fused(plain, "medium"), random_codes(3, 13).cuda()
    eager = CodecSteps(decoder, 9)
    captured = CodecSteps(decoder, 9, graph_wrappers.create("on", backends.resolve("cuda")), most_rows=4)
    captured.capture()
    at = slots(1, 5, 2).cuda()
    for start, stop in ((0, 1), (1, 13)):
        expected = eager.decode(codes[:, :, start:stop], at)
        assert (captured.decode(codes[:, :, start:stop], at) - expected).abs().max() <= 1
    assert captured.mode == "graph" and captured.counters["replays"] == 3
    assert captured.state.frames.tolist()[:8] == [0, 13, 13, 0, 0, 13, 0, 0]


@pytest.mark.cuda
def test_a_reset_slot_starts_afresh(plain: CodecDecoder) -> None:
    decoder, codes = fused(plain), random_codes(1, 6).cuda()
    state, at = decoder.new_state(2), slots(1).cuda()
    first = decoder.decode_step(codes, state, at)
    state.reset(at)
    assert torch.equal(decoder.decode_step(codes, state, at), first)


@pytest.mark.cuda
def test_a_copied_slot_goes_on_as_its_source(plain: CodecDecoder) -> None:
    decoder, codes = fused(plain), random_codes(2, 90).cuda()
    state, after = decoder.new_state(4), random_codes(1, 6).cuda()
    decoder.decode_step(codes, state, slots(0, 3).cuda())
    state.copy(0, 3)
    copied, source = (decoder.decode_step(after, state, slots(slot).cuda()) for slot in (3, 0))
    assert torch.equal(copied, source)
    assert state.frames.tolist() == [96, 0, 0, 96]
