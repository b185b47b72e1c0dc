"""Fixtures of the parity tests: the checkpoint of a golden case, written once per test run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.golden import GoldenCase, checkpoint_for


@pytest.fixture(scope="session")
def golden_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[GoldenCase], Path]:
    """Return a function from a golden case to its checkpoint directory, with the weights verified."""
    cache_dir = tmp_path_factory.mktemp("tiny-checkpoints")
    return lambda case: checkpoint_for(case, cache_dir)
