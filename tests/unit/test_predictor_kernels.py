"""The fused form of the code predictor and of the frame step against the plain ones.

Where there is no device for the kernels, Triton's interpreter runs them on the CPU. It must be switched on before the
kernels are imported, so there one test runs this file again in a process of its own.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.bench_drift import plain_logits
from qwen3tts_hw import attention_ops, backends
from qwen3tts_hw.backends import cuda
from qwen3tts_hw.checkpoint.reader import open_checkpoint
from qwen3tts_hw.engine.frame_step import FrameStep
from qwen3tts_hw.engine.state import Admission, SlotTable
from qwen3tts_hw.errors import UnsupportedError
from qwen3tts_hw.model.code_predictor import CodePredictor
from qwen3tts_hw.model.embeddings import CodeEmbedder
from qwen3tts_hw.model.layers import LayerCache
from qwen3tts_hw.model.sampling import SamplingRows, choose, frame_key
from qwen3tts_hw.model.weights import embedding_targets, load, predictor_targets
from qwen3tts_hw.predictor_kernels import BegunFrame, create, resolve
from qwen3tts_hw.prompt.layout import PromptLayout
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS, SamplingSpec

HAS_DEVICE = cuda.missing() is None
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MAX_ROWS = 64 if HAS_DEVICE else 20
SIZES = ("tiny", "tiny-0.6B") if HAS_DEVICE else ("tiny",)  # with a projection, and without
FORMS_BY_ROWS = {"few": (64, 64), "some": (0, 16), "many": (0, 0)}  # most rows of the few and of the some form
SAMPLING = [(0.0, 0, 1.0), (0.9, 50, 1.0), (1.3, 0, 0.7), (0.8, 20, 0.6), (1.0, 1, 1.0), (2.0, 0, 1.0)]

needs_kernels = pytest.mark.skipif(not HAS_DEVICE and not INTERPRETED, reason="no device, and not in the interpreter")
on_device = pytest.mark.skipif(not HAS_DEVICE, reason="too slow in the interpreter")


@pytest.mark.slow
@pytest.mark.skipif(HAS_DEVICE or INTERPRETED or not HAS_TRITON, reason="the kernels run here, or Triton is missing")
def test_this_file_passes_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout[-4000:]
    assert " passed" in answer.stdout


@pytest.mark.parametrize("form", ["auto", "plain"])
def test_a_cpu_runs_the_plain_form(form):
    assert resolve(form, backends.resolve("cpu")) == "plain"
    assert create(form, backends.resolve("cpu")) is None


@pytest.mark.parametrize(("form", "problem"), [("fused", "no compiler"), ("compiled", "cannot compile"), ("x", "auto")])
def test_a_form_that_cannot_run_is_refused(form, problem):
    with pytest.raises(UnsupportedError, match=problem):
        create(form, backends.resolve("cpu"))


@pytest.fixture(scope="module")
def backend():
    chosen = backends.resolve("cuda" if HAS_DEVICE else "cpu")
    chosen.prepare_process()
    return chosen


@pytest.fixture(scope="module", params=SIZES)
def predictor(request, tiny_checkpoint, backend):
    """A loaded predictor that runs in the plain form, with the fused one built beside it as ``built``."""
    checkpoint = open_checkpoint(tiny_checkpoint(size=request.param))
    config, at = checkpoint.config, {"device": backend.device, "dtype": torch.float32}
    codes = CodeEmbedder(config, **at)
    model = CodePredictor(config, codes, attention_ops.create("sdpa", backend), max_rows=MAX_ROWS, **at)
    targets = predictor_targets(model)
    targets.update((n, t) for n, t in embedding_targets(_NoText(), codes).items() if "codec" in n)
    load(((name, tensor) for name, tensor in checkpoint.iter_main() if name in targets), targets)
    model.config = config
    model.built = fused_module().FusedForm(early=backend.capabilities.early_launch).build(model._weights(), MAX_ROWS)
    return model


class _NoText:
    """Stands for the text path, which is not loaded."""

    class fc1:  # noqa: N801
        weight = bias = None

    table, fc2 = None, fc1


def fused_module():
    return importlib.import_module("qwen3tts_hw.predictor_kernels.fused")


def layers_output(fast, rows):
    """What the layers made of the buffer's rows; that of many rows is still in parts."""
    if rows <= fast._most_some_rows:
        return fast._x[:rows]
    return fast._x[:rows] + fast._parts.view(-1, fast.width)[: fast._parts_left * rows].view(-1, rows, fast.width).sum(
        0
    )


def inputs(model, count, seed=0):
    """Talker states of the usual size, codes and keys."""
    rng, device = torch.Generator().manual_seed(seed), model.cos.device
    hidden = torch.randn(count, model.config.talker.hidden_size, generator=rng)
    code0 = torch.randint(0, CODEBOOK_SIZE, (count,), generator=rng)
    key = frame_key(*torch.randint(0, 2**31 - 1, (3, count), generator=rng).to(torch.int32))
    return hidden.to(device), code0.to(device), key.to(device)


def sampling(parameters, device):
    """One row per (temperature, top-k, top-p)."""
    heat, top_k, top_p = zip(*parameters, strict=True)
    return SamplingRows(
        torch.tensor(heat, device=device), torch.tensor(top_k, device=device), torch.tensor(top_p, device=device)
    )


@needs_kernels
@pytest.mark.parametrize(("few", "some"), FORMS_BY_ROWS.values(), ids=FORMS_BY_ROWS)
def test_layers_and_head_equal_the_plain_ones(predictor, monkeypatch, few, some):
    fast, count = predictor.built, 3
    monkeypatch.setattr(fused_module(), "MOST_FEW_ROWS", few)
    monkeypatch.setattr(fast, "_most_some_rows", some)
    hidden, code0, _ = inputs(predictor, count)
    caches = [LayerCache(*pair[:, :count]) for pair in predictor._cache]
    rows = predictor._embedder[0].rows
    fast._open(hidden, code0, count)
    expected = predictor._run(torch.stack([hidden, rows(0, code0)], dim=1), 0, caches)
    fast._layers(count, 2, 0)
    found = layers_output(fast, 2 * count).view(2, count, -1).transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    logits = predictor.logits(expected, 1)
    torch.testing.assert_close(fast.head(count, 2, 0), logits, rtol=0, atol=1e-5 * logits.abs().max().item())
    codes = torch.zeros(count, NUM_CODEBOOKS - 1, dtype=torch.int64, device=hidden.device)
    greedy = sampling([SAMPLING[0]] * count, hidden.device)
    fast._choose(BegunFrame(code0, code0.int(), greedy.temperature, greedy.top_k, greedy.top_p), codes, 0)
    assert codes[:, 0].tolist() == logits.argmax(dim=1).tolist()
    expected = predictor._run(rows(1, codes[:, 0])[:, None], 2, caches)
    fast._layers(count, 1, 2)
    torch.testing.assert_close(
        layers_output(fast, count), expected[:, 0], rtol=0, atol=1e-5 * expected.abs().max().item()
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own
@pytest.mark.skipif(INTERPRETED or not HAS_TRITON, reason="the compiler is not interpreted, and it needs Triton")
def test_the_compiled_form_gives_the_plain_ones_codes(predictor, backend, monkeypatch):
    monkeypatch.setattr(backend, "capabilities", dataclasses.replace(backend.capabilities, compile=True))
    hidden, code0, key = inputs(predictor, 3)
    rows = sampling([SAMPLING[0], SAMPLING[1], SAMPLING[3]], hidden.device)
    expected = predictor(hidden, code0, rows, key)
    predictor.adopt("compiled", backend)
    try:
        assert predictor.form == "compiled"
        assert predictor(hidden, code0, rows, key).tolist() == expected.tolist()
    finally:
        predictor.adopt("plain", backend)


@needs_kernels
@pytest.mark.parametrize("shape", ["peaked", "flat", "tied", "barred"])
def test_choices_equal_the_plain_samplers(predictor, shape):
    fast, device, count = predictor.built, predictor.cos.device, len(SAMPLING)
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(count, CODEBOOK_SIZE, generator=rng) * (4.0 if shape == "peaked" else 0.1)
    if shape == "tied":
        logits = (logits * 20).round() / 4
    if shape == "barred":
        logits[:, ::2] = float("-inf")
    rows, key = sampling(SAMPLING, device), inputs(predictor, count)[2]
    fast._logits[:count] = logits.to(device)
    codes = torch.zeros(count, NUM_CODEBOOKS - 1, dtype=torch.int64, device=device)
    fast._choose(BegunFrame(key, key, rows.temperature, rows.top_k, rows.top_p), codes, 4)
    expected = choose(logits.to(device), rows, key, 5, predictor.candidates)
    assert codes[:, 4].tolist() == expected.tolist()


@needs_kernels
def test_a_whole_frame_equals_the_plain_one(predictor):
    count = MAX_ROWS if HAS_DEVICE else 1
    hidden, code0, key = inputs(predictor, count)
    rows = sampling([SAMPLING[1 + index % 5] for index in range(count)], hidden.device)
    expected = predictor(hidden, code0, rows, key)
    begun = BegunFrame(code0, key, rows.temperature, rows.top_k, rows.top_p)
    assert predictor.built.residual_codes(hidden, code0, begun).tolist() == expected.tolist()


@needs_kernels
@pytest.mark.parametrize(("few", "some"), FORMS_BY_ROWS.values(), ids=FORMS_BY_ROWS)
def test_logits_behind_given_codes_equal_the_plain_ones(predictor, monkeypatch, few, some):
    count = 3 if HAS_DEVICE else 2
    monkeypatch.setattr(fused_module(), "MOST_FEW_ROWS", few)
    monkeypatch.setattr(predictor.built, "_most_some_rows", some)
    hidden, code0, _ = inputs(predictor, count)
    given = torch.randint(0, CODEBOOK_SIZE, (count, NUM_CODEBOOKS - 1), generator=torch.Generator().manual_seed(4))
    given = given.to(hidden.device)
    expected = plain_logits(predictor, hidden, code0, given)
    found = predictor.built.given_logits(hidden, code0, given)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@on_device
def test_a_row_does_not_depend_on_its_batch(predictor):
    hidden, code0, key = inputs(predictor, MAX_ROWS)
    parameters = [SAMPLING[index % len(SAMPLING)] for index in range(MAX_ROWS)]

    def codes(first, last):
        rows, part = sampling(parameters[first:last], hidden.device), slice(first, last)
        begun = BegunFrame(code0[part], key[part], rows.temperature, rows.top_k, rows.top_p)
        return predictor.built.residual_codes(hidden[part], code0[part], begun).tolist()

    together = codes(0, MAX_ROWS)
    assert [codes(row, row + 1)[0] for row in range(MAX_ROWS)] == together
    assert codes(0, 7) + codes(7, MAX_ROWS) == together


def admitted_table(device, parameters, frames):
    """A slot table with one request per sampling, each at its first frame, of different lengths."""
    table = SlotTable(len(parameters), 16, backends.resolve(device.type))
    layout = PromptLayout(text_ids=(1, 2), codec_ids=(-1, -1), trailing_text_ids=(), pad_text_id=1)
    for index, (heat, top_k, top_p) in enumerate(parameters):
        spec = SamplingSpec(
            temperature=heat,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=1.0 + 0.2 * (index % 3),
            residual_temperature=heat,
            residual_top_k=top_k,
            residual_top_p=top_p,
            seed=(index * 7_919 << 33) + (1 << 31) + index,
        )
        table.admit(table.take(), Admission(layout, spec, 2 + index * frames))
    return table


@needs_kernels
def test_frame_steps_equal_the_plain_ones(predictor, monkeypatch):
    device, count, config = predictor.cos.device, 4, predictor.config
    tables = [admitted_table(device, SAMPLING[:count], 2) for _ in range(2)]
    steps = [FrameStep(config, table, predictor) for table in tables]
    books = torch.arange(NUM_CODEBOOKS - 1, device=device)

    def residual(hidden, *_):
        return books + (100 * hidden[:, :1].abs()).to(torch.int64)

    monkeypatch.setattr(CodePredictor, "forward", lambda self, *tensors: residual(*tensors))
    monkeypatch.setattr(predictor.built, "residual_codes", residual)
    slots = torch.tensor([*range(count), tables[0].scratch], device=device)
    rng = torch.Generator().manual_seed(5)
    for frame in range(8):
        hidden = torch.randn(count + 1, config.talker.hidden_size, generator=rng).to(device)
        logits = 3 * torch.randn(count + 1, config.talker_vocab_size, generator=rng).to(device)
        logits[:, config.codec_tokens.eos] += 8.0 if frame > 5 else 0.0
        positions = torch.full((count + 1,), 1 + frame, device=device)
        positions[2] -= frame % 2  # a row that is computed again
        tokens = []
        for step, fast in zip(steps, (None, predictor.built), strict=True):
            monkeypatch.setattr(predictor, "fast", fast)
            tokens.append(step(hidden, logits, slots, positions)[:count].tolist())
        assert tokens[0] == tokens[1]
        for name in ("codes", "frontier", "ended", "seen"):
            plain, fused = (getattr(table, name)[:count] for table in tables)
            assert torch.equal(plain, fused), name
    assert tables[0].ended[:count].any()


@needs_kernels
@on_device
def test_graphs_and_calls_agree(predictor):
    hidden, code0, key = inputs(predictor, MAX_ROWS)
    rows = sampling([SAMPLING[1]] * MAX_ROWS, hidden.device)
    begun = BegunFrame(code0, key, rows.temperature, rows.top_k, rows.top_p)
    eager = predictor.built.residual_codes(hidden, code0, begun)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = predictor.built.residual_codes(hidden, code0, begun)
    for _ in range(3):
        graph.replay()
        assert torch.equal(captured, eager)
