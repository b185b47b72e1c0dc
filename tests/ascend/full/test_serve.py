"""``vllm serve`` over vllm-ascend on the emulated device: every graph mode of vllm-ascend, in float32 and bfloat16.

Codes are compared exactly with a run of the same requests on the CPU, one after the other. For float32 the emulator is
told to take it in the inference attention, which a device refuses; bfloat16 keeps every documented rule, and the CPU's
run follows the dtype rules of vllm-ascend's operators (:mod:`.reference`).
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm_ascend", reason="runs in the full bed: make test-ascend")

from tests.ascend.full import counts, reference
from tests.ascend.full.server import Server, Wanted

MODES = ("eager", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
ALLOWED = {"float32": {"ASCEND_EMULATOR_ALLOW_FLOAT32": "1"}, "bfloat16": {}}
RUNS = [(dtype, mode) for dtype in ALLOWED for mode in MODES]
REQUESTS = 8
SAMPLED = 15  # a request that does not end by itself for long
CHUNK_ENDS = (15, 39)  # frame counts between which all audio is decoded in chunks of eight


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return tiny_checkpoint(size="tiny-heads128")


@pytest.fixture(scope="module")
def expected(checkpoint):
    """A function from a dtype to what the CPU makes of each request."""
    bodies = [Wanted(number).body for number in range(REQUESTS)]
    return functools.cache(lambda dtype: reference.synthesize(checkpoint, dtype, bodies))


@pytest.fixture(scope="module", params=RUNS, ids=" ".join)
def server(request, checkpoint):
    dtype, mode = request.param
    with Server(checkpoint, mode, dtype, **ALLOWED[dtype]) as running:
        running.mode, running.dtype = mode, dtype
        yield running


def assert_equal(found, wanted):
    """Codes are the same, and audio within a rounding to 16 bits; both lists are of one request each."""
    for number, (answer, one) in enumerate(zip(found, wanted, strict=True)):
        assert answer.codes.shape == one.codes.shape, number
        wrong = np.argwhere(answer.codes != one.codes)
        assert not len(wrong), f"request {number}: first difference at (frame, codebook) {wrong[0]}"
        assert np.abs(answer.pcm - one.pcm).max() <= 1e-4, "16-bit samples round by 1.5e-5"


def refused(device_counts):
    """What the emulated device would not do."""
    return [name for name in device_counts if name.startswith("refused")]


class TestServer:
    def test_eight_requests_at_once_equal_the_cpu_one_by_one(self, server, expected):
        before, steps = server.device_counts(), server.worker()["steps"]
        assert_equal(server.speak_together(REQUESTS), expected(server.dtype))
        after, steps = server.device_counts(), server.worker()["steps"] - steps
        assert not refused(after)
        found = counts.divided(after - before, steps)
        assert found["package"]["waits for a stream"] == found["package"]["waits for an event"] == 0
        self.write(server, "eight requests, per step", found)

    def test_what_one_more_frame_costs(self, server):
        totals = []
        for frames in CHUNK_ENDS:
            before = server.device_counts()
            assert len(server.speak(Wanted(SAMPLED, frames)).codes) == frames
            totals.append(server.device_counts() - before)
        found = counts.divided(totals[1] - totals[0], CHUNK_ENDS[1] - CHUNK_ENDS[0])
        self.write(server, "one more frame", found)
        ours = found["package"]
        assert ours["waits for a stream"] == ours["waits for an event"] == 0
        assert ours["graph replays"] == 1 + 1 / 8, "the frame step, and a codec step per eight frames"
        assert ours["copies host to device"] == 2 + 1 / 8, "slots of rows, the sampled rows, and slots of a chunk"
        assert ours["copies device to host"] == 3 / 8, "samples, codes and the frontier of a chunk"
        talker = found["vLLM and vllm-ascend"]["graph replays"]
        assert talker == 0 if server.mode == "eager" else talker >= 1

    def write(self, server, what, rows):
        """Print figures for the record."""
        sys.stdout.write(f"\n{counts.table(f'{server.dtype}, {server.mode}: {what}', rows)}\n")

    def test_the_mode_was_reached(self, server):
        worker = server.worker()
        assert worker["frame_step"]["mode"] == "graph"
        assert worker["frame_step"]["replays"] > 0
        log = Path(server.log).read_text(errors="replace")
        assert server.mode == "eager" or f"CUDAGraphMode.{server.mode}" in log
        captured = {name for name in server.device_counts() if name.startswith("captured npu::npu_fused_infer")}
        assert bool(captured) == server.mode.startswith("FULL"), "attention is inside full graphs only"

    def test_audio_comes_while_it_is_made(self, server):
        body = Wanted(SAMPLED, 30).body
        parts, open_at_first = [], None
        with server.client.stream("POST", "/v1/audio/speech", json=body) as answer:
            for part in answer.iter_raw():
                if not parts:
                    open_at_first = server.worker()["requests_open"]
                parts.append(len(part))
        assert open_at_first == 1, "the first chunk came after the last frame"
        assert parts[0] == 2 * 1920, "the first chunk is one frame"
        assert sum(parts) == 30 * 2 * 1920
        assert len(parts) > 3

    def test_an_abandoned_request_frees_its_slot(self, server):
        body = Wanted(SAMPLED, 300).body
        with server.client.stream("POST", "/v1/audio/speech", json=body) as answer:
            next(answer.iter_bytes())
        deadline = time.monotonic() + 60
        while server.worker()["slots_free"] < server.worker()["slots"]:
            assert time.monotonic() < deadline, server.worker()
            time.sleep(0.2)


@pytest.mark.skipif("ASCEND_EMULATOR_DEFER" in os.environ, reason="all servers of this run defer")
def test_nothing_depends_on_work_being_done_early(checkpoint, expected):
    with Server(checkpoint, MODES[-1], "bfloat16", ASCEND_EMULATOR_DEFER="1") as server:
        for _ in range(2):
            assert_equal(server.speak_together(REQUESTS), expected("bfloat16"))
        assert not refused(server.device_counts())
