"""Owns reading the golden data: one ``GoldenCase`` per stored file and the tiny checkpoint each belongs to.

Golden data is made by ``scripts/make_golden.py`` with the official package and holds numbers only. Checkpoints are not
stored: they are written again from their seed and must have the stored checksums, which tells a changed checkpoint
writer from a wrong model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors import safe_open

from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.prompt.request import SpeechRequest, build_request
from qwen3tts_hw.settings import Settings
from tests.parity.checkpoints import TinyCheckpoint, weight_checksums, write_checkpoint

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
ARRAYS = frozenset(
    ("codes", "hidden", "waveform", "prompt_rows", "trailing_rows", "pad_row", "template_ids", "instruct_ids")
)


@dataclass(frozen=True)
class GoldenCase:
    """One stored run of the official package; arrays are read from the file when first asked for."""

    path: Path
    text: str
    voice: str | None
    language: str
    instruct: str | None
    text_mode: str
    max_frames: int
    finish_reason: str
    checkpoint: TinyCheckpoint
    checksums: dict[str, str]

    @property
    def id(self) -> str:
        """Name for test output: checkpoint and case."""
        return f"{self.path.parent.name}/{self.path.stem}"

    @cached_property
    def metadata(self) -> dict[str, str]:
        """Everything that was stored beside the arrays."""
        return read_metadata(self.path)

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays of the file by name, see ``ARRAYS``."""
        with safe_open(str(self.path), "np") as stored:
            return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a mapping

    def request(self, config: ModelConfig) -> SpeechRequest:
        """Build the same request for this package, greedy, with the limit in frames."""
        request = build_request(
            config,
            Settings(),
            text=self.text,
            voice=self.voice,
            language=self.language,
            instruct=self.instruct,
            text_mode=self.text_mode,
            temperature=0.0,
            seed=0,
        )
        return replace(request, max_frames=self.max_frames)


def read_metadata(path: Path) -> dict[str, str]:
    """Read the strings stored in one golden file."""
    with safe_open(str(path), "np") as stored:
        return dict(stored.metadata() or {})


def cases() -> list[GoldenCase]:
    """Read the description of every stored case, ordered by file name."""
    found = []
    for path in sorted(GOLDEN.glob("*/*.safetensors")):
        metadata = read_metadata(path)
        found.append(
            GoldenCase(
                path=path,
                **json.loads(metadata["request"]),
                finish_reason=metadata["finish_reason"],
                checkpoint=TinyCheckpoint.from_json(metadata["checkpoint"]),
                checksums=json.loads(metadata["checkpoint_sha256"]),
            )
        )
    return found


def checkpoint_for(case: GoldenCase, cache_dir: Path) -> Path:
    """Return the directory of the case's checkpoint below ``cache_dir``, written there if it is not yet.

    Raises AssertionError if its weights are not those the golden data was made with.
    """
    directory = cache_dir / case.checkpoint.key
    sums_file = cache_dir / f"{case.checkpoint.key}.json"
    if not sums_file.is_file():
        write_checkpoint(case.checkpoint, directory)
        sums_file.write_text(json.dumps(weight_checksums(directory)), encoding="utf-8")
    found = json.loads(sums_file.read_text(encoding="utf-8"))
    changed = [name for name, expected in case.checksums.items() if found.get(name) != expected]
    if changed:
        raise AssertionError(
            f"{case.id}: {' and '.join(changed)} of {case.checkpoint} differ from the checkpoint that the golden data "
            "was made with, so the data says nothing about the model. Either make_checkpoint changed (then make the "
            "data again with scripts/make_golden.py) or NumPy draws other numbers here."
        )
    return directory
