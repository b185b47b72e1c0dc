"""The source tree keeps the house rules, and each rule's check is able to find a violation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import architecture_checks as checks

ROOT = Path(__file__).resolve().parent.parent

DOCSTRING = '"""A module."""\n'
# Per check: the planted file, its text, and a piece of what must be reported.
VIOLATIONS = [
    ("file_sizes", "qwen3tts_hw/long.py", DOCSTRING + "x = 1\n" * 400, "401 lines"),
    ("function_sizes", "scripts/long.py", DOCSTRING + "def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
    ("module_docstrings", "tests/bare.py", "x = 1\n", "bare.py"),
    ("platform_words", "qwen3tts_hw/engine/a.py", 'device = "cuda:0"\n', "cuda:0"),
    ("platform_words", "qwen3tts_hw/engine/a.py", "def is_npu(): ...\n", "is_npu"),
    ("platform_words", "qwen3tts_hw/engine/a.py", "from x import NPUGraph\n", "NPUGraph"),
    ("platform_words", "qwen3tts_hw/model/a.py", "mode = cudagraph_mode\n", "cudagraph_mode"),
    ("torch_cuda_uses", "qwen3tts_hw/backends/other.py", "torch.cuda.synchronize()\n", "other.py:1"),
    ("environment_reads", "qwen3tts_hw/a.py", "import os\nx = os.environ['A']\n", "a.py:2"),
    ("environment_reads", "qwen3tts_hw/a.py", "from os import getenv\n", "a.py:1"),
    ("prints", "qwen3tts_hw/a.py", "print(1)\n", "a.py:1"),
    ("unsafe_loading", "scripts/a.py", "import torch\nx = torch.load('a')\n", "a.py:2"),
    ("unsafe_loading", "qwen3tts_hw/a.py", "import pickle\n", "a.py:1"),
    ("foreign_words", "README.md", "written in an earlier ses" + "sion\n", "README.md:1"),
    ("foreign_words", "docs/a.md", "by an ag" + "ent\n", "a.md:1"),
    ("foreign_words", "Makefile", "cd /wo" + "rk/here\n", "Makefile:1"),
    ("export_lists", "qwen3tts_hw/a.py", '__all__ = ["b", "a"]\na = b = 1\n', "not sorted"),
    ("export_lists", "qwen3tts_hw/a.py", '__all__ = ["a"]\n', "'a', which is not there"),
    ("export_lists", "qwen3tts_hw/a.py", "__all__ = []\ndef f(): ...\n", "leaves out 'f'"),
]

ALLOWED = [
    ("platform_words", "qwen3tts_hw/engine/a.py", 'def f():\n    """Runs on cuda."""\n    # and npu\n'),
    ("platform_words", "qwen3tts_hw/engine/a.py", 'input_ids = INPUTS = sorted(x, key="ascending")\n'),
    ("platform_words", "qwen3tts_hw/backends/npu.py", 'name = "npu"\n'),
    ("platform_words", "qwen3tts_hw/vllm_plugin/hook.py", 'config.cudagraph_mode = "x"\n'),
    ("foreign_words", "tests/a.py", '@pytest.fixture(scope="ses' + 'sion")\n'),
    ("foreign_words", "tests/a.py", "items = request.ses" + "sion.items\n"),
    ("export_lists", "qwen3tts_hw/a.py", '__all__ = ["MAX", "Name", "act"]\nfrom x import MAX, Name, act\n'),
]


def plant(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True)
    path.write_text(text)


@pytest.mark.parametrize("name", checks.CHECKS)
def test_the_tree_keeps_the_rule(name: str) -> None:
    violations = checks.CHECKS[name](ROOT)
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize(("check", "name", "text", "reported"), VIOLATIONS)
def test_a_violation_is_found(tmp_path: Path, check: str, name: str, text: str, reported: str) -> None:
    plant(tmp_path / "tree", name, text)
    found = checks.CHECKS[check](tmp_path / "tree")
    assert len(found) == 1
    assert reported in found[0]


@pytest.mark.parametrize(("check", "name", "text"), ALLOWED)
def test_what_the_rule_permits_is_not_reported(tmp_path: Path, check: str, name: str, text: str) -> None:
    plant(tmp_path / "tree", name, text)
    assert checks.CHECKS[check](tmp_path / "tree") == []


def test_a_module_that_loads_torch_is_found(tmp_path: Path) -> None:
    plant(tmp_path / "tree", "torch/__init__.py", "")
    plant(tmp_path / "tree", "qwen3tts_hw/__init__.py", "")
    (tmp_path / "tree/qwen3tts_hw/heavy.py").write_text("import torch\n")
    assert checks.torch_imports(tmp_path / "tree", ("", "heavy")) == ["qwen3tts_hw.heavy loads torch"]


def test_a_module_that_does_not_import_is_found(tmp_path: Path) -> None:
    plant(tmp_path / "tree", "qwen3tts_hw/__init__.py", "")
    assert "No module named" in checks.torch_imports(tmp_path / "tree", ("missing",))[0]


def test_every_check_has_a_planted_violation() -> None:
    assert {row[0] for row in VIOLATIONS} | {"torch_imports"} == set(checks.CHECKS)


def test_the_source_folders_are_there() -> None:
    """A renamed folder would otherwise be checked no more."""
    assert [name for name in checks.SOURCE_FOLDERS if not any((ROOT / name).rglob("*.py"))] == []
