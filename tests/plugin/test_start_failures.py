"""A server that cannot work does not start: it ends with an error, and the end of its log says why in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.parity.checkpoints import TinyCheckpoint
from tests.plugin.pool import SERVERS
from tests.plugin.server import failed_start

pytestmark = pytest.mark.vllm

AT_ONCE = 2
LAST_LINES = 4
REMOVED = "talker.model.layers.0.self_attn.q_norm.weight"


@dataclass(frozen=True)
class Failure:
    """What is wrong with a start, and what its log must say."""

    says: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    damage: Callable[[Path], None] | None = None


def remove_a_tensor(directory: Path) -> None:
    rewrite_weights(directory, remove=REMOVED)


def add_a_tensor(directory: Path) -> None:
    rewrite_weights(directory, add="talker.model.layers.0.extra.weight")


def truncate_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1_000])


def remove_talker_config(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    del config["talker_config"]
    path.write_text(json.dumps(config), encoding="utf-8")


def rewrite_weights(directory: Path, *, remove: str | None = None, add: str | None = None) -> None:
    path = directory / "model.safetensors"
    with safe_open(str(path), "np") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys() if name != remove}  # noqa: SIM118 - no mapping
    if add is not None:
        tensors[add] = next(iter(tensors.values()))
    save_file(tensors, str(path))


FAILURES = {
    "missing tensor": Failure((REMOVED,), damage=remove_a_tensor),
    "extra tensor": Failure(("talker.model.layers.0.extra.weight",), damage=add_a_tensor),
    "truncated weights": Failure(("model.safetensors", "cut short"), damage=truncate_weights),
    "no talker_config": Failure(("config.json", "talker_config is missing"), damage=remove_talker_config),
    "tensor parallel": Failure(("--data-parallel-size",), ("--tensor-parallel-size", "2")),
    "priority scheduling": Failure(("scheduling policy 'priority'",), ("--scheduling-policy", "priority")),
    "bad setting": Failure(
        ("graphs is 'sometimes'", "auto, on, off"),
        ("--additional-config", json.dumps({"qwen3tts": {"graphs": "sometimes"}})),
    ),
}


@pytest.fixture(scope="module")
def starts(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[TinyCheckpoint], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Future[tuple[int, str]]]]:
    """Begin all starts that are asked for, two at a time, since each spends its time importing."""
    whole = checkpoint(SERVERS["standard"].checkpoint)
    wanted = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]

    def start(name: str) -> tuple[int, str]:
        failure, directory = FAILURES[name], whole
        if failure.damage is not None:
            directory = tmp_path_factory.mktemp("damaged") / "checkpoint"
            shutil.copytree(whole, directory)
            failure.damage(directory)
        return failed_start(directory, *failure.arguments)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        yield {name: threads.submit(start, name) for name in wanted}


@pytest.mark.parametrize("name", FAILURES)
def test_the_log_ends_with_the_reason(name: str, starts: dict[str, Future[tuple[int, str]]]) -> None:
    status, log = starts[name].result()
    assert status != 0
    lines = [line for line in log.splitlines() if line.strip()]
    end = "\n".join(lines[-LAST_LINES:])
    for part in FAILURES[name].says:
        assert part in end, "\n".join(lines[-LAST_LINES:])
    assert "Starting vLLM server" not in log
