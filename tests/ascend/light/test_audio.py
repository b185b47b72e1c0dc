"""The audio pump on an emulated device that runs nothing before somebody waits for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch_npu", reason="runs in the light bed: make test-ascend-light")

# Memory of the compute stream is given out again as soon as the host lets go of it. A pump that leaves the slots of a
# reset there lets later work write over them before the codec's stream, which is behind, has read them.
OPEN_THREE_IN_ONE_STEP = """
import numpy as np, torch, torch_npu
from qwen3tts_hw import backends
from qwen3tts_hw.engine.audio import AudioPump
from qwen3tts_hw.engine.state import SlotTable

backend = backends.resolve("npu")
was_reset = torch.zeros(8, device=backend.device)

class Decoder:
    weights = snapshots = 0

    def reset(self, slots):
        was_reset.index_fill_(0, slots, 1.0)

pump = AudioPump(SlotTable(7, 8, backend), Decoder(), backend, print, first_frames=1, steady_frames=8)
for slots in ((0, 2), (4,)):
    for slot in slots:
        pump.open(str(slot), slot, 4)
    pump.advance(np.array([7]), np.array([0]))  # resets what was opened; the row makes no frame
    later_work = [torch.full((length,), 6, dtype=torch.int64, device=backend.device) for length in (1, 2) * 4]
    del later_work
torch.npu.synchronize()
pump.shut_down()
print(was_reset.tolist())
"""


def test_streams_that_open_in_one_step_are_all_reset():
    finished = subprocess.run(
        [sys.executable, "-c", OPEN_THREE_IN_ONE_STEP],
        capture_output=True, text=True, check=False, env={**os.environ, "ASCEND_EMULATOR_DEFER": "1"},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert finished.stdout.splitlines()[-1] == str([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
