"""``vllm serve`` over vllm-ascend on the emulated device, in every graph mode of vllm-ascend.

float32 runs compare exactly with the CPU; they need the emulator's permission to use float32 in the inference
attention, which a device refuses. bfloat16 runs keep every documented rule and are compared across modes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm_ascend", reason="runs in the full bed: make test-ascend")

from qwen3tts_hw.engine.local import LocalEngine
from qwen3tts_hw.prompt.request import build_request
from qwen3tts_hw.settings import Settings
from tests.ascend.full.server import Server, Wanted

MODES = ("eager", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
REQUESTS = 8


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return tiny_checkpoint(size="tiny-heads128")


@pytest.fixture(scope="module")
def expected(checkpoint):
    """What the CPU makes of each request, one after the other."""
    engine = LocalEngine.load(checkpoint, device="cpu", dtype="float32", settings=Settings(graphs="off"))
    results = []
    for number in range(REQUESTS):
        body = Wanted(number).body
        fields = {key: body[key] for key in ("voice", "temperature", "seed", "max_new_tokens")}
        results.append(engine.synthesize(build_request(engine.config, engine.settings, text=body["input"], **fields)))
    return results


@pytest.fixture(scope="module", params=MODES)
def server(request, checkpoint):
    with Server(checkpoint, request.param, "float32", ASCEND_EMULATOR_ALLOW_FLOAT32="1") as running:
        running.mode = request.param
        yield running


class TestFloat32:
    def test_eight_requests_at_once_equal_the_cpu_one_by_one(self, server, expected):
        before, steps = server.device_counts(), server.worker()["steps"]
        found = server.speak_together(REQUESTS)
        for number, (answer, reference) in enumerate(zip(found, expected, strict=True)):
            assert answer.codes.shape == reference.codes.shape, number
            wrong = np.argwhere(answer.codes != reference.codes)
            assert not len(wrong), f"request {number}: first difference at (frame, codebook) {wrong[0]}"
            assert np.abs(answer.pcm - reference.pcm).max() <= 1e-4, "16-bit samples round by 1.5e-5"
        self.write_counts(server, server.device_counts() - before, server.worker()["steps"] - steps)

    def write_counts(self, server, counts, steps):
        """Print what a step cost, for the record, and check what must hold in every mode."""
        replays = counts["graph_replays"] / steps
        operators = sum(n for name, n in counts.items() if name.startswith("eager "))
        figures = {
            "graph replays": replays,
            "operators outside graphs": operators / steps,
            "host waits for a stream": counts["host_syncs"] / steps,
            "waits for an event": counts["event_syncs"] / steps,
            "copies host to device": counts["copies_host_to_device"] / steps,
            "copies device to host": counts["copies_device_to_host"] / steps,
        }
        rounded = {name: round(number, 2) for name, number in figures.items()}
        sys.stdout.write(f"\n{server.mode}: per step, mean of {steps}: {rounded}\n")
        assert replays >= (1 if server.mode == "eager" else 1.5), (
            "the frame step is one replay, the talker's come on top"
        )
        assert not [name for name in counts if name.startswith("refused")]

    def test_the_mode_was_reached(self, server):
        worker = server.worker()
        assert worker["frame_step"]["mode"] == "graph"
        assert worker["frame_step"]["replays"] > 0
        log = Path(server.log).read_text(errors="replace")
        assert server.mode == "eager" or f"CUDAGraphMode.{server.mode}" in log
        captured = {name for name in server.device_counts() if name.startswith("captured npu::npu_fused_infer")}
        assert bool(captured) == server.mode.startswith("FULL"), "attention is inside full graphs only"

    def test_an_abandoned_request_frees_its_slot(self, server):
        body = Wanted(0).body | {"max_new_tokens": 300, "temperature": 0.9}
        with server.client.stream("POST", "/v1/audio/speech", json=body) as answer:
            next(answer.iter_bytes())
        deadline = time.monotonic() + 60
        while server.worker()["slots_free"] < server.worker()["slots"]:
            assert time.monotonic() < deadline, server.worker()
            time.sleep(0.2)


@pytest.fixture(scope="module")
def bfloat16_codes():
    """Codes of the first bfloat16 mode, for the others to be compared with."""
    return []


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_keeps_every_rule_and_is_alike_in_all_modes(checkpoint, bfloat16_codes, mode):
    with Server(checkpoint, mode, "bfloat16", QWEN3TTS_ATTENTION_OP="npu_fusion_v3") as server:
        found = [answer.codes for answer in map(server.speak, map(Wanted, range(4)))]  # alone: rows round by batch size
        counts = server.device_counts()
    assert not [name for name in counts if name.startswith("refused")]
    assert all(0 < len(codes) <= 10 + number for number, codes in enumerate(found))
    if not bfloat16_codes:
        bfloat16_codes.extend(found)
    for number, (codes, first) in enumerate(zip(found, bfloat16_codes, strict=True)):
        assert np.array_equal(codes, first), f"request {number} differs from mode {MODES[0]}"
