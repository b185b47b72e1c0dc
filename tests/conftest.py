"""What every test gets: one thread, a fixed seed, tiny checkpoints, and the reason when its device is missing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen3tts_hw.backends import cuda, npu
from tests.parity.checkpoints import TinyCheckpoint, write_checkpoint

# Tensors this small gain nothing from a second thread, and OpenMP threads that spin for one another on a machine with
# other work slow the whole run down about tenfold.
torch.set_num_threads(1)

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


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """A function from a tiny checkpoint's description to its directory, written at its first use. Read it only.

    Takes the fields of :class:`TinyCheckpoint`; by default the custom-voice checkpoint with a projection.
    """
    root = tmp_path_factory.mktemp("tiny")

    def directory(variant: str = "custom_voice", size: str = "tiny", **fields: Any) -> Path:
        spec = TinyCheckpoint(variant, size, **fields)
        path = root / spec.key
        return path if path.exists() else write_checkpoint(spec, path)

    yield directory
    shutil.rmtree(root)  # tens of megabytes that pytest would keep for three runs
