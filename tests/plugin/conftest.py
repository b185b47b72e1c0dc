"""Fixtures of the tests on real vLLM: servers, the local engine to compare with, the figures shown at the end."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.parity.checkpoints import TinyCheckpoint
from tests.parity.golden import cases, checkpoint_for
from tests.parity.voice_golden import clone_files
from tests.plugin.pool import SERVERS, ServerPool
from tests.plugin.reference import LocalReference
from tests.plugin.server import SpeechServer

_HERE = Path(__file__).parent
_ORDER = list(SERVERS)
_figures: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "server(name, last=False): runs against this server of tests/plugin/pool.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests of this folder by server and skip them where vLLM is not installed."""
    places = [index for index, item in enumerate(items) if _HERE in item.path.parents]
    ordered = sorted((items[index] for index in places), key=_place)
    for index, item in zip(places, ordered, strict=True):
        items[index] = item
        if importlib.util.find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip(reason="vllm is not installed"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _figures:
        terminalreporter.section("figures")
    for line in _figures:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TinyCheckpoint], Path]:
    """Return a function to the directory of a tiny checkpoint, one of those that golden data exists for."""
    cache_dir = tmp_path_factory.mktemp("served-checkpoints")
    known = {case.checkpoint: case for case in (*cases(), *clone_files())}
    return lambda wanted: checkpoint_for(known[wanted], cache_dir)


@pytest.fixture(scope="session")
def local(checkpoint: Callable[[TinyCheckpoint], Path]) -> LocalReference:
    """The local engine's answers."""
    return LocalReference(checkpoint)


@pytest.fixture(scope="session")
def pool(checkpoint: Callable[[TinyCheckpoint], Path]) -> Iterator[ServerPool]:
    running = ServerPool(checkpoint)
    yield running
    running.close()
    _figures.extend(f"start-up of server {name}: {seconds:.1f} s" for name, seconds in running.startup_s.items())


@pytest.fixture
def server(request: pytest.FixtureRequest, pool: ServerPool) -> Iterator[SpeechServer]:
    """The server the test is marked with, with the weights it was started with; it must be well afterwards, too."""
    name, last = _wanted(request.node)
    needed = [_wanted(item)[0] for item in request.session.items if item.get_closest_marker("server")]
    following = [other for other in _ORDER[_ORDER.index(name) + 1 :] if other in needed]
    running = pool.get(name, following)
    running.load(running.checkpoint)
    if last:
        pool.take(name)
        yield running
        running.stop()
        return
    yield running
    assert running.answers_health(), running.log_tail()


@pytest.fixture
def figure() -> Callable[[str], None]:
    """Return a function that shows a line at the end of the run."""
    return _figures.append


def _wanted(item: pytest.Item) -> tuple[str, bool]:
    marker = item.get_closest_marker("server")
    assert marker is not None, f"{item.nodeid} is marked with no server"
    return str(marker.args[0]), bool(marker.kwargs.get("last", False))


def _place(item: pytest.Item) -> tuple[int, bool]:
    if item.get_closest_marker("server") is None:
        return len(_ORDER), False
    name, last = _wanted(item)
    return _ORDER.index(name), last
