"""Weights in FRACTAL_NZ: the emulator's tiles and refusals, and the backend that packs and restores them."""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest

torch_npu = pytest.importorskip("torch_npu", reason="runs in the light bed: make test-ascend-light")

import torch  # noqa: E402
from torch.nn import functional  # noqa: E402

from qwen3tts_hw.backends.npu import FRACTAL_NZ, NpuBackend, matrices, packable  # noqa: E402
from qwen3tts_hw.engine.local import LocalEngine  # noqa: E402
from qwen3tts_hw.errors import UnsupportedError  # noqa: E402
from qwen3tts_hw.model.weights import load, predictor_targets  # noqa: E402
from qwen3tts_hw.prompt.request import build_request  # noqa: E402
from qwen3tts_hw.settings import Settings  # noqa: E402
from tests.ascend.light.device import Parts, backend, counting, operators  # noqa: E402

ND = 2


@pytest.fixture
def allowed():
    """Private layouts are allowed, as vllm-ascend does for its process."""
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False


@pytest.fixture
def packing():
    """A backend that packs."""
    device = NpuBackend(torch_npu, 0)
    device.prepare_process()
    device.choose_weight_layout("packed")
    return device


def packed(*shape, dtype=torch.bfloat16):
    """A random matrix on the host, and packed on the device."""
    plain = torch.randn(*shape).to(dtype)
    return plain, torch_npu.npu_format_cast(plain.npu(), FRACTAL_NZ)


def layout(tensor):
    return int(torch_npu.get_npu_format(tensor))


@pytest.mark.usefixtures("allowed")
class TestFormat:
    def test_tiles_of_16_rows_and_32_bytes_lie_column_by_column_and_are_filled_with_zeros(self):
        plain, tensor = packed(30, 20)
        torch.npu.synchronize()
        size = 32 * 32 * 2
        assert tensor.untyped_storage().nbytes() == size
        raw = torch.frombuffer(bytearray(ctypes.string_at(tensor.data_ptr(), size)), dtype=torch.bfloat16)
        padded = torch.zeros(32, 32, dtype=torch.bfloat16)
        padded[:30, :20] = plain
        for column in range(2):
            for row in range(2):
                tile = padded[16 * row :, 16 * column :][:16, :16].flatten()
                start = 256 * (2 * column + row)
                assert torch.equal(raw[start : start + 256], tile), (row, column)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("shape", [(32, 48), (30, 20)], ids=str)
    def test_products_are_the_same_eager_and_captured(self, shape, dtype):
        plain, weight = packed(*shape, dtype=dtype)
        x, bias = torch.randn(5, shape[1]).to(dtype), torch.randn(shape[0]).to(dtype)
        expected = functional.linear(x, plain), functional.linear(x, plain, bias)
        on_device = torch.zeros_like(x).npu()
        run = lambda: (functional.linear(on_device, weight), functional.linear(on_device, weight, bias.npu()))  # noqa: E731
        bias = bias.npu()
        run()
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            captured = run()
        on_device.copy_(x)
        graph.replay()
        for results in (captured, run()):
            assert all(torch.equal(found.cpu(), right) for found, right in zip(results, expected, strict=True))

    def test_a_cast_to_nd_and_a_copy_to_the_host_unpack(self):
        plain, weight = packed(30, 20)
        again = torch_npu.npu_format_cast(weight, ND)
        assert (layout(weight), layout(again)) == (FRACTAL_NZ, ND)
        assert torch.equal(again.cpu(), plain)
        assert torch.equal(weight.cpu(), plain)
        assert torch_npu.npu_format_cast(weight, FRACTAL_NZ).data_ptr() == weight.data_ptr()

    @pytest.mark.parametrize(
        ("mistake", "message"),
        [
            (lambda x, w: functional.linear(x[None], w), "left operand of 2 dimensions"),
            (lambda x, w: functional.linear(x, w[:16]), "a part or another shape"),
            (lambda x, w: functional.embedding(torch.zeros(1, dtype=torch.int64).npu(), w), "only a matrix product"),
            (lambda x, w: w + 1, "only a matrix product"),
            (lambda x, w: w.clone(), "only a matrix product"),
            (lambda x, w: w.view(-1).sum(), "only a matrix product"),
            (lambda x, w: w @ x.t(), "as argument 0"),
            (lambda x, w: w.copy_(torch.zeros(32, 48)), "only be copied to the host"),
            (lambda x, w: w[:16].float(), "only be copied to the host"),
            (lambda x, w: w[:16].cpu(), "a part or another shape"),
            (lambda x, w: w[0, 0].item(), "_local_scalar_dense"),
            (lambda x, w: functional.linear(x.float(), w), "both the same"),
            (lambda x, w: functional.linear(x.float(), packed(32, 48, dtype=torch.float32)[1]), "float16 or bfloat16"),
            (lambda x, w: functional.linear(x, packed(1, 48)[1]), "side of 1"),
            (lambda x, w: packed(48), "2 to 6 dimensions"),
            (lambda x, w: packed(0, 48), "not empty"),
            (lambda x, w: packed(32, 48, dtype=torch.float64), "does not take Double"),
            (lambda x, w: torch_npu.npu_format_cast(x.t(), FRACTAL_NZ), "contiguous tensors only"),
            (lambda x, w: torch_npu.npu_format_cast(x, 3), "only casts between ND"),
            (lambda x, w: torch_npu.npu_format_cast_(x, FRACTAL_NZ), "no reference kernel"),
        ],
    )
    def test_what_the_documentation_rules_out_is_refused(self, mistake, message):
        _, weight = packed(32, 48)
        with pytest.raises(RuntimeError, match=message):
            mistake(torch.ones(5, 48).bfloat16().npu(), weight)


def test_without_the_process_wide_switch_nothing_is_packed():
    plain, weight = packed(32, 48)
    assert layout(weight) == ND
    assert torch.equal(weight.cpu(), plain)


@pytest.fixture(scope="module")
def directory(tiny_checkpoint):
    return tiny_checkpoint(size="tiny-heads128", end_of_speech=False)


class TestBackend:
    @pytest.fixture
    def parts(self, directory):
        return Parts(directory, "npu", "npu_fusion_v3", torch.bfloat16)

    def test_only_matrices_of_the_predictor_are_packed(self, parts, packing):
        predictor = parts.predictor
        before = {name: value.cpu() for name, value in predictor.named_parameters()}
        packing.prepare_weights(predictor)
        packing.prepare_weights(predictor)  # a second time changes nothing
        formats = {name: layout(value) for name, value in predictor.named_parameters()}
        plain = {name for name, format_ in formats.items() if format_ == ND}
        assert plain == {name for name in formats if name.endswith(("norm.weight", "bias"))}
        assert len(formats) - len(plain) == len(list(matrices(predictor))) == packing.describe()["packed_matrices"]
        assert layout(parts.codes.table) == ND, "it is looked up"
        assert all(torch.equal(value.cpu(), before[name]) for name, value in predictor.named_parameters())

    def test_packed_weights_cannot_be_replaced(self, parts, packing):
        packing.check_reload()
        packing.prepare_weights(parts.predictor)
        with pytest.raises(UnsupportedError, match="packed weights cannot be replaced"):
            packing.check_reload()
        targets = predictor_targets(parts.predictor)
        with pytest.raises(RuntimeError, match="can only be copied to the host"):
            load([(name, torch.zeros(target.shape)) for name, target in targets.items()], targets)

    def test_the_switch_of_the_process_is_left_as_it_was(self, parts, packing):
        packing.prepare_weights(parts.predictor)
        test_without_the_process_wide_switch_nothing_is_packed()

    def test_a_cast_that_torch_npu_ignores_is_an_error(self, parts, packing, monkeypatch):
        monkeypatch.setattr(torch_npu, "npu_format_cast", lambda tensor, _: tensor)
        with pytest.raises(UnsupportedError, match=r"did not bring a weight \[\d+, \d+\] into FRACTAL_NZ"):
            packing.prepare_weights(parts.predictor)

    def test_float32_is_not_packed_and_that_is_said(self, directory, packing, caplog):
        with caplog.at_level(logging.WARNING):
            packing.prepare_weights(Parts(directory, "npu", "sdpa", torch.float32).predictor)
        assert packing.describe()["packed_matrices"] == 0
        assert "no weight of CodePredictor can be packed: they are torch.float32" in caplog.text

    @pytest.mark.parametrize(("shape", "fits"), [((16, 32), True), ((24, 32), False), ((1, 32), False), ((16,), False)])
    def test_whole_tiles_only(self, shape, fits):
        assert packable(torch.zeros(shape, dtype=torch.bfloat16)) is fits
        assert not packable(torch.zeros(shape))

    @pytest.mark.parametrize(("mode", "chosen"), [(0, "plain"), (1, "plain"), (2, "packed"), (None, "plain")])
    def test_by_default_vllm_ascends_own_switch_decides(self, monkeypatch, mode, chosen):
        def config():
            if mode is None:
                raise RuntimeError("Ascend config is not initialized.")
            return SimpleNamespace(weight_nz_mode=mode)

        name = "vllm_ascend.ascend_config"
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(get_ascend_config=config))
        found, why = backend("npu").choose_weight_layout("auto")
        assert found == chosen == backend("npu").describe()["weight_layout"]
        assert (f"weight_nz_mode is {mode}" in why) == (mode is not None)
        assert backend("npu").choose_weight_layout("plain") == ("plain", "as asked for")


@functools.cache
def speech(directory, graphs, weight_layout):
    """Codes of a request, what the device was asked to do for it, and what the engine says of itself."""
    settings = Settings(graphs=graphs, weight_layout=weight_layout)
    engine = LocalEngine.load(directory, device="npu", dtype="bfloat16", settings=settings)
    request = build_request(
        engine.config, settings, text="Good morning.", voice="serena", temperature=0.0, max_new_tokens=4
    )
    with counting() as counts:
        codes = engine.synthesize(request).codes
    return codes, operators(counts), engine.backend.describe()


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_packed_weights_give_the_same_speech(directory, graphs):
    expected, plain_operators, _ = speech(directory, graphs, "plain")
    codes, packed_operators, facts = speech(directory, graphs, "packed")
    assert np.array_equal(codes, expected)
    assert len(codes) == 4
    assert packed_operators == plain_operators, "packing is done at load, not in a step"
    assert facts["weight_layout"] == "packed"
    assert facts["packed_matrices"] > 20
