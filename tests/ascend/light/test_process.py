"""The process around the device: which chip `doctor` names, what it would use, and what cannot be captured."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

torch_npu = pytest.importorskip("torch_npu", reason="runs in the light bed: make test-ascend-light")

from qwen3tts_hw.errors import UnsupportedError  # noqa: E402
from qwen3tts_hw.graph_wrappers.npu import NpuGraphDriver  # noqa: E402
from tests.ascend.light.device import backend  # noqa: E402

CAPTURE = """
import torch, torch_npu
x = torch.ones(4).npu()
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    x * 2
"""


def run(*arguments, **environment):
    """A Python process of the bed."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def doctor(**environment):
    finished = run("-m", "qwen3tts_hw", "doctor", "--json", **environment)
    assert finished.returncode == 0, finished.stderr
    report = finished.stdout
    return json.loads(report[report.index("{\n") :])


def test_doctor_tells_what_an_a2_would_use_and_why():
    report = doctor()
    assert report["devices"]["npu"]["device_family"] == "A2 (Atlas A2, 910B)"
    assert "vllm_ascend_mismatch" not in report["devices"]["npu"]
    chosen = report["would use"]
    assert chosen["device"].startswith("npu:0 ")
    assert chosen["attention op"].startswith("npu_fusion_v3 ")
    assert chosen["frame step"] == "device graph (setting graphs=auto: the device has graphs)"
    why = "the device has no compiler for the fused kernels"
    assert chosen["code predictor"] == f"plain (setting predictor=auto: {why})"
    assert chosen["codec decoder"] == f"plain, float32 (setting codec_kernels=auto: {why})"
    assert chosen["weight layout"].startswith("plain (setting weight_layout=auto: not measured yet; under vllm-ascend")
    assert doctor(QWEN3TTS_WEIGHT_LAYOUT="packed")["would use"]["weight layout"].startswith("packed ")


def test_float32_is_float32_and_nothing_is_compiled_while_serving():
    program = """
import torch_npu
from qwen3tts_hw import backends
backend = backends.resolve("npu")
torch_npu.npu.matmul.allow_hf32 = torch_npu.npu.conv.allow_hf32 = True
torch_npu.npu.set_compile_mode(jit_compile=True)
torch_npu.npu.config.allow_internal_format = True
for _ in range(2):
    print(*(torch_npu._C._npu_getOption(name) for name in
            ("ALLOW_MATMUL_HF32", "ALLOW_CONV_HF32", "jitCompile", "ALLOW_INTERNAL_FORMAT")))
    backend.prepare_process()
"""
    before, after = run("-c", program).stdout.splitlines()[-2:]
    assert before.count("enable") == 4, before
    assert after.count("disable") == 4, after


@pytest.mark.parametrize(("built_for", "fits"), [("A2", False), ("_310P", False), ("A3", True)])
def test_doctor_names_an_a3_and_explains_a_wheel_that_is_not_for_it(tmp_path, built_for, fits):
    package = tmp_path / "vllm_ascend"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('it must not be imported')\n")
    (package / "_build_info.py").write_text(f"__device_type__ = '{built_for}'\n")
    path = os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"]))
    device = doctor(ASCEND_EMULATOR_SOC="Ascend910_9391", PYTHONPATH=path)["devices"]["npu"]
    assert device["device_name"] == "Ascend910_9391"
    assert device["device_family"] == "A3 (Atlas A3, 910C)"
    assert ("vllm_ascend_mismatch" not in device) == fits
    if not fits:
        assert "its worker will refuse to start; the wheels on PyPI are for A2" in device["vllm_ascend_mismatch"]


@pytest.mark.parametrize(
    ("variable", "value", "told", "message"),
    [
        ("TASK_QUEUE_ENABLE", "2", "2", "TASK_QUEUE_ENABLE is 2, with which torch_npu captures no graph; set it to 1"),
        ("ASCEND_LAUNCH_BLOCKING", "1", "blocking", "ASCEND_LAUNCH_BLOCKING is 1, .*; unset it, or set graphs to off"),
    ],
)
def test_a_process_that_cannot_capture_is_refused_by_us(monkeypatch, variable, value, told, message):
    monkeypatch.setenv(variable, value)
    assert backend("npu").describe()["task_queue"] == told
    with pytest.raises(UnsupportedError, match=message):
        NpuGraphDriver(backend("npu").device)


@pytest.mark.parametrize(("level", "captured"), [("0", True), ("1", True), ("2", False)])
def test_torch_npu_itself_captures_at_queue_levels_0_and_1_only(level, captured):
    finished = run("-c", CAPTURE, TASK_QUEUE_ENABLE=level)
    assert (finished.returncode == 0) == captured
    assert ("TASK_QUEUE_ENABLE" in finished.stderr) != captured
