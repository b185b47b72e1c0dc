"""The local engine on the emulated device: whole requests, codes equal to the CPU, and what a frame costs in counts."""

from __future__ import annotations

import functools

import numpy as np
import pytest

torch_npu = pytest.importorskip("torch_npu", reason="runs in the light bed: make test-ascend-light")

from qwen3tts_hw.engine.local import LocalEngine  # noqa: E402
from qwen3tts_hw.prompt.request import build_request  # noqa: E402
from qwen3tts_hw.settings import Settings  # noqa: E402
from tests.ascend.light.device import counting  # noqa: E402

FRAMES = 12
TEXT = "Hello world, this is a sentence."


@pytest.fixture(scope="module")
def load(tiny_checkpoint):
    """Engines by device, graph mode, attention op and dtype; each is loaded once."""
    directory = tiny_checkpoint(size="tiny-heads128")

    @functools.cache
    def engine(device, graphs, attention, dtype="float32"):
        settings = Settings(graphs=graphs, attention_op=attention)
        return LocalEngine.load(directory, device=device, dtype=dtype, settings=settings)

    return engine


def synthesize(engine, temperature, frames=FRAMES):
    request = build_request(
        engine.config,
        engine.settings,
        text=TEXT,
        voice="serena",
        temperature=temperature,
        seed=5,
        max_new_tokens=frames,
    )
    return engine.synthesize(request)


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "sampled"])
@pytest.mark.parametrize("attention", ["sdpa", "npu_fusion_v3", "npu_reference"])
@pytest.mark.parametrize("graphs", ["off", "on"])
def test_codes_and_audio_equal_the_cpu_in_float32(load, graphs, attention, temperature):
    expected = synthesize(load("cpu", "off", "sdpa"), temperature)
    with counting() as counts:
        found = synthesize(load("npu", graphs, attention), temperature)
    assert np.array_equal(found.codes, expected.codes)
    assert np.abs(found.pcm - expected.pcm).max() <= 1e-5
    assert found.finish_reason == expected.finish_reason
    # The end is noticed a few frames late: the host asks for it only now and then.
    assert len(found.codes) <= counts["graph_replays"] <= FRAMES if graphs == "on" else not counts["graph_replays"]


@pytest.mark.parametrize("attention", ["npu_fusion_v3", "npu_fused_infer"])
def test_bfloat16_codes_are_the_same_eager_and_captured(load, attention):
    eager = synthesize(load("npu", "off", attention, "bfloat16"), 0.0)
    captured = synthesize(load("npu", "on", attention, "bfloat16"), 0.0)
    assert np.array_equal(eager.codes, captured.codes)


def test_one_more_frame_is_one_replay_and_no_wait(load):
    engine = load("npu", "on", "npu_fusion_v3")
    totals = []
    for frames in (3, 4):  # both within the first check for the end, which is where the host waits
        with counting() as counts:
            assert len(synthesize(engine, 0.0, frames).codes) == frames
        totals.append(counts)
    more = totals[1] - totals[0]
    assert more["graph_replays"] == 1
    assert more["host_syncs"] == more["copies_host_to_device"] == more["copies_device_to_host"] == 0


def test_the_device_is_named_and_a_wrong_wheel_explained(load):
    from qwen3tts_hw.backends.npu import device_family, wheel_mismatch

    facts = load("npu", "on", "npu_fusion_v3").backend.describe()
    assert facts["device_name"] == "Ascend910B1"
    assert facts["device_family"] == "A2 (Atlas A2, 910B)"
    assert device_family(250) == "A3 (Atlas A3, 910C)"
    assert device_family(7) == "unknown (SoC version 7)"
    assert wheel_mismatch(device_family(220), "A2") is None
    assert wheel_mismatch(device_family(250), None) is None
    assert "built for A2 and its worker will refuse" in str(wheel_mismatch(device_family(250), "A2"))
