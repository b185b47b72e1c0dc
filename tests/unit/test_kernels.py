"""Kernels: started or only compiled, kept from one process to the next, and buildable for a device that is not here."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qwen3tts_hw.backends.cuda import FAST_MEMORY_BYTES
from qwen3tts_hw.backends.kernels import compiling, keeping, launch
from qwen3tts_hw.settings import Settings, kernels_folder
from tests.plugin.server import REPOSITORY

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


class Kernel:
    """Notes how it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.calls.append(("run", grid, args, options))

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.calls.append(("compile", grid, args, options))


@needs_triton
def test_kernels_are_compiled_inside_and_run_outside() -> None:
    kernel = Kernel()
    launch(kernel, (2,), 1, num_warps=4)
    with compiling() as useful:
        assert useful
        launch(kernel, (3, 4), 5)
    launch(kernel, (6,), enable_fp_fusion=False)
    assert kernel.calls == [
        ("run", (2,), (1,), {"num_warps": 4, "enable_fp_fusion": True}),
        ("compile", (3, 4), (5,), {"enable_fp_fusion": True}),
        ("run", (6,), (), {"enable_fp_fusion": False}),
    ]


@needs_triton
def test_an_error_ends_the_rehearsal() -> None:
    kernel = Kernel()
    with pytest.raises(ValueError, match="broken"), compiling():
        raise ValueError("broken")
    launch(kernel, (1,))
    with compiling():
        launch(kernel, (1,))
    assert [call[0] for call in kernel.calls] == ["run", "compile"]


def test_without_triton_nothing_is_rehearsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with keeping(str(tmp_path / "kernels")), compiling() as useful:
        assert not useful
    assert not (tmp_path / "kernels").exists()


@needs_triton
def test_the_folder_is_ours_for_the_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere/else")
    with keeping(str(tmp_path / "kernels")):
        assert knobs.cache.dir == str(tmp_path / "kernels")
    assert knobs.cache.dir == os.environ["TRITON_CACHE_DIR"] == "/somewhere/else"
    assert (tmp_path / "kernels").is_dir()


@needs_triton
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from triton import knobs

    (tmp_path / "file").write_text("")
    before = knobs.cache.dir
    with caplog.at_level(logging.WARNING), keeping(str(tmp_path / "file" / "kernels")):
        assert knobs.cache.dir == before
    assert "cannot be kept" in caplog.text and "kernels_dir" in caplog.text


def test_the_folder_follows_the_setting_then_the_environment() -> None:
    variables = {"TRITON_CACHE_DIR": "/t", "XDG_CACHE_HOME": "/x"}
    assert kernels_folder(Settings(kernels_dir="/k"), variables) == "/k"
    assert kernels_folder(Settings(), variables) == "/t"
    assert kernels_folder(Settings(), {"XDG_CACHE_HOME": "/x"}) == "/x/qwen3tts_hw/kernels"
    assert kernels_folder(Settings(), {"XDG_CACHE_HOME": "x"}).endswith("/.cache/qwen3tts_hw/kernels")


@pytest.mark.slow
@needs_triton
def test_all_kernels_can_be_built_and_are_kept(tmp_path: Path) -> None:
    """For an H100 or H200, whatever device is here: what the compilers refuse shows now and not on the device."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    environment.pop("TRITON_INTERPRET", None)

    def build() -> dict[str, Any]:
        command = [sys.executable, "-W", "ignore", "-m", "tests.kernel_builds", str(tmp_path / "kernels")]
        answer = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stderr[-4000:]
        return dict(json.loads(answer.stdout))

    first, second = build(), build()
    assert first["frame_step"] > 20 and first["codec"] > 50
    assert first["kept"] == 0
    assert second["kept"] == second["frame_step"] + second["codec"] == first["frame_step"] + first["codec"]
    assert first["most_shared_bytes"] <= FAST_MEMORY_BYTES
    assert first["kernels"] == second["kernels"]
