"""Tests of the emulated Ascend device run inside a test bed; elsewhere they are skipped, naming the command to use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

EMULATED = "ASCEND_EMULATOR_LIBRARIES" in os.environ
COMMANDS = {"light": "make test-ascend-light", "full": "make test-ascend"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if EMULATED:
        return
    for item in items:
        for bed, command in COMMANDS.items():
            if f"tests/ascend/{bed}/" in item.nodeid:
                item.add_marker(
                    pytest.mark.skip(reason=f"runs in the {bed} bed of the emulated Ascend device: {command}")
                )


@pytest.fixture(autouse=EMULATED)
def fresh_counters() -> Iterator[None]:
    """Every test counts from zero, and leaves no failed work behind."""
    if "torch_npu" not in sys.modules:  # only the servers that a test starts use the device
        yield
        return
    import torch
    from ascend_emulator import layer

    layer.reset_counters()
    yield
    torch.npu.synchronize()
