"""Backends: what is chosen, what is refused and why, and that streams, events and memory figures behave."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from qwen3tts_hw import backends
from qwen3tts_hw.backends import cuda, npu
from qwen3tts_hw.errors import UnsupportedError
from qwen3tts_hw.registry import Registry

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
NPU = pytest.param("npu", marks=pytest.mark.npu)
EVERY_BACKEND = pytest.mark.parametrize("name", ["cpu", CUDA, NPU])


def test_registry_returns_what_was_registered_in_order():
    registry: Registry[int] = Registry("number")
    registry.register("two", 2)
    registry.register("one", 1)
    assert registry.get("two") == 2
    assert registry.names == ("two", "one")


def test_registry_refuses_a_second_factory_of_a_name():
    registry: Registry[int] = Registry("number")
    registry.register("one", 1)
    with pytest.raises(ValueError, match="number 'one' is already registered"):
        registry.register("one", 2)
    assert registry.get("one") == 1


def test_registry_lists_what_exists_for_an_unknown_name():
    registry: Registry[int] = Registry("number")
    registry.register("one", 1)
    registry.register("two", 2)
    with pytest.raises(UnsupportedError, match="unknown number 'tow'; supported: one, two"):
        registry.get("tow")


def test_unknown_backend_is_refused_with_the_known_names():
    with pytest.raises(UnsupportedError, match="unknown backend 'gpu'; supported: cpu, cuda, npu"):
        backends.resolve("gpu")


@pytest.mark.parametrize(
    ("npu_missing", "cuda_missing", "chosen"),
    [(None, None, "npu"), ("none", None, "cuda"), ("none", "none", "cpu"), (None, "none", "npu")],
)
def test_auto_prefers_npu_then_cuda_then_cpu(monkeypatch, npu_missing, cuda_missing, chosen):
    monkeypatch.setattr(npu, "missing", lambda: npu_missing)
    monkeypatch.setattr(cuda, "missing", lambda: cuda_missing)
    for module in (npu, cuda):
        monkeypatch.setattr(module, "create", lambda index, module=module: module.__name__.rpartition(".")[2])
    backend = backends.resolve("auto")
    assert (backend if isinstance(backend, str) else backend.name) == chosen


def test_cuda_without_a_build_or_device_says_what_was_found(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UnsupportedError, match=r"torch .* is built without CUDA"):
        backends.resolve("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match=r"CUDA 13\.0\) sees no CUDA device"):
        backends.resolve("cuda")


def test_npu_without_torch_npu_says_so(monkeypatch):
    monkeypatch.setattr(npu.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="torch_npu is not installed"):
        backends.resolve("npu")


def test_npu_that_cannot_be_loaded_says_why(monkeypatch):
    def fail() -> None:
        raise OSError("libascendcl.so: cannot open shared object file")

    monkeypatch.setattr(npu.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(npu, "_import", fail)
    with pytest.raises(UnsupportedError, match=r"torch_npu cannot be imported: libascendcl\.so"):
        backends.resolve("npu")


def test_cpu_has_one_device():
    assert backends.resolve("cpu", index=0).device == torch.device("cpu")
    with pytest.raises(UnsupportedError, match="device index 1"):
        backends.resolve("cpu", index=1)


def test_capabilities_cannot_be_changed():
    capabilities = backends.resolve("cpu").capabilities
    with pytest.raises(dataclasses.FrozenInstanceError):
        capabilities.graphs = True  # type: ignore[misc]


def test_a_device_without_a_layout_of_its_own_refuses_to_pack_weights():
    backend = backends.resolve("cpu")
    assert backend.choose_weight_layout() == ("plain", "the device has no other")
    assert backend.choose_weight_layout("plain") == ("plain", "as asked for")
    with pytest.raises(UnsupportedError, match="the cpu backend has no layout of its own; set weight_layout to auto"):
        backend.choose_weight_layout("packed")
    assert backend.describe()["weight_layout"] == "plain"


def test_cpu_computes_in_float32_and_has_no_graphs():
    backend = backends.resolve("cpu")
    assert backend.default_dtype == torch.float32
    assert not backend.capabilities.graphs
    assert backend.capabilities.attention_op == "sdpa"


@EVERY_BACKEND
def test_description_is_plain_and_names_the_device(name):
    description = backends.resolve(name).describe()
    assert description["backend"] == name
    assert description["default_dtype"] in ("float32", "bfloat16")
    plain = json.loads(json.dumps(description))
    assert plain == description
    # Not even a subclass of str: vLLM encodes these values between its processes and takes nothing else.
    assert {key: type(value) for key, value in plain.items()} == {
        key: type(value) for key, value in description.items()
    }


@EVERY_BACKEND
def test_memory_figures_are_plausible(name):
    backend = backends.resolve(name)
    assert 0 < backend.free_bytes() <= backend.total_bytes()
    assert backend.total_bytes() > 2**28


@EVERY_BACKEND
def test_copy_to_pinned_memory_is_done_once_its_event_is(name):
    backend = backends.resolve(name)
    source = torch.arange(50_000, dtype=torch.float32, device=backend.device)
    target = backend.pinned((50_000,), torch.float32)
    stream, event = backend.new_stream(priority="low"), backend.new_event()
    stream.wait_stream(backend.current_stream())
    with backend.on_stream(stream):
        target.copy_(source * 2, non_blocking=True)
        event.record(stream)
    event.synchronize()
    assert event.query()
    assert torch.equal(target, torch.arange(50_000, dtype=torch.float32) * 2)
    assert target.is_pinned() == backend.capabilities.async_copy


@EVERY_BACKEND
def test_a_stream_waits_for_an_event_of_another(name):
    backend = backends.resolve(name)
    first, second, event = backend.new_stream(priority="high"), backend.new_stream(), backend.new_event()
    matrix = torch.eye(512, device=backend.device)
    backend.synchronize()
    with backend.on_stream(first):
        product = matrix
        for _ in range(20):
            product = product @ (matrix * 2)
        event.record()
    with backend.on_stream(second):
        event.wait()
        trace = product.trace()
    second.synchronize()
    assert first.query()
    assert float(trace) == 512 * 2.0**20


@EVERY_BACKEND
def test_prepared_process_multiplies_float32_exactly(name):
    backend = backends.resolve(name)
    backend.prepare_process()
    # 1 + 2**-12 is a float32 that the 10 mantissa bits of TF32 cannot hold.
    matrix = torch.full((64, 64), 1 + 2.0**-12, device=backend.device) * torch.eye(64, device=backend.device)
    signal = matrix.reshape(1, 64, 64)
    assert torch.equal((matrix @ torch.eye(64, device=backend.device)), matrix)
    kernel = torch.eye(64, device=backend.device).reshape(64, 64, 1)
    assert torch.equal(torch.nn.functional.conv1d(signal, kernel), signal)


@pytest.mark.cuda
def test_cuda_refuses_an_index_beyond_the_last_device():
    with pytest.raises(UnsupportedError, match="device cuda:99 was asked for"):
        backends.resolve("cuda", index=99)


def test_a_device_is_found_by_the_name_that_torch_gives_it() -> None:
    assert backends.resolve_device("cpu").device == torch.device("cpu")
    with pytest.raises(UnsupportedError, match="no device; expected a form such as cuda:1"):
        backends.resolve_device("cpu:one")
    with pytest.raises(UnsupportedError, match="gpu"):
        backends.resolve_device("gpu:1")
