"""What every test gets: two threads, a fixed seed, and a stated reason when its device is not there."""

from __future__ import annotations

import pytest
import torch

from qwen3tts_hw.backends import cuda, npu

torch.set_num_threads(2)

DEVICES = {"cuda": cuda.missing, "npu": npu.missing}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, missing in DEVICES.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = missing() if marked else None
        if reason is not None:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seed() -> int:
    """Make torch's global generator start alike in every test."""
    torch.manual_seed(20_260)
    return 20_260
