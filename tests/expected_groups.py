"""A pytest plugin: a group of tests that silently does nothing must not look like one that passed.

``python -m pytest -p tests.expected_groups --expect-marker vllm`` fails before the first test if no collected test with
that marker is free to run.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--expect-marker", action="append", default=[], metavar="NAME", help="fail if none can run")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    free = [item for item in items if item.get_closest_marker("skip") is None]
    runnable = {mark.name for item in free for mark in item.iter_markers()}
    for name in config.getoption("--expect-marker"):
        if name not in runnable:
            raise pytest.UsageError(f"no test marked {name!r} can run, though --expect-marker asks for some")
