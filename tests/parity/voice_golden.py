"""Owns reading the golden data of voice cloning: recordings as the official encoders heard them, and cloned requests.

Each file belongs to a tiny Base checkpoint that is written again from its seed, see ``golden.py``; recordings follow
from length and seed, see ``reference_audio.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from tests.parity.checkpoints import TinyCheckpoint
from tests.parity.golden import GOLDEN, read_metadata
from tests.parity.reference_audio import reference_audio

CLONE_ARRAYS = frozenset(
    ("codes", "hidden", "waveform", "prompt_rows", "trailing_rows", "pad_row", "template_ids", "speaker_embedding")
)
REFERENCE_ARRAYS = frozenset(("ref_codes", "ref_ids"))


@dataclass(frozen=True)
class VoiceFile:
    """One stored file; arrays are read when first asked for."""

    path: Path

    @property
    def id(self) -> str:
        """Name for test output: checkpoint and file."""
        return f"{self.path.parents[1].name}/{self.path.stem}"

    @cached_property
    def metadata(self) -> dict[str, str]:
        """Everything that was stored beside the arrays."""
        return read_metadata(self.path)

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays of the file by name."""
        with safe_open(str(self.path), "np") as stored:
            return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a mapping

    @property
    def checkpoint(self) -> TinyCheckpoint:
        """The checkpoint that the file was made with."""
        return TinyCheckpoint.from_json(self.metadata["checkpoint"])

    @property
    def checksums(self) -> dict[str, str]:
        """SHA-256 of that checkpoint's weight files."""
        return json.loads(self.metadata["checkpoint_sha256"])


class ReferenceFile(VoiceFile):
    """Codes and embeddings of recordings of many lengths."""

    @property
    def lengths(self) -> list[int]:
        """Samples of each recording; its place is its seed."""
        return json.loads(self.metadata["lengths"])

    @property
    def audio_checksums(self) -> dict[int, str]:
        """SHA-256 of each recording, by its samples."""
        return {int(samples): sum_ for samples, sum_ in json.loads(self.metadata["audio_sha256"]).items()}

    def audio(self, samples: int) -> np.ndarray:
        """Return the recording of a length."""
        return reference_audio(samples, self.lengths.index(samples))


class CloneFile(VoiceFile):
    """One request in a cloned voice."""

    @property
    def request(self) -> dict[str, Any]:
        """What was asked: text, language, ref_text, x_vector_only, text_mode, ref_samples, ref_seed, max_frames."""
        return json.loads(self.metadata["request"])

    @property
    def finish_reason(self) -> str:
        """What ended it: stop or length."""
        return self.metadata["finish_reason"]

    def audio(self) -> np.ndarray:
        """Return the recording whose voice was cloned."""
        return reference_audio(self.request["ref_samples"], self.request["ref_seed"])


def reference_files() -> list[ReferenceFile]:
    """Every file of encoded recordings, ordered by name."""
    return [ReferenceFile(path) for path in sorted(GOLDEN.glob("*/encoders/*.safetensors"))]


def clone_files() -> list[CloneFile]:
    """Every cloned request, ordered by name."""
    return [CloneFile(path) for path in sorted(GOLDEN.glob("*/clones/*.safetensors"))]
