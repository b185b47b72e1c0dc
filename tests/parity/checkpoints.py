"""Owns the tiny checkpoints that the golden data belongs to: how each is written, changed and identified.

Shared by ``scripts/make_golden.py``, which runs in the environment of the official package, and by the parity tests; so
it needs numpy and the package's checkpoint writer only. It knows nothing of requests or golden arrays.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from qwen3tts_hw.checkpoint.writer import make_checkpoint

WEIGHT_FILES = ("model.safetensors", "speech_tokenizer/model.safetensors")
HEAD = "talker.codec_head.weight"


@dataclass(frozen=True, slots=True)
class TinyCheckpoint:
    """What determines a tiny checkpoint byte by byte.

    Without ``end_of_speech`` the talker never ends by itself; with it, after tens of frames. ``stop_scale`` multiplies
    the row of the end-of-speech code in the head of codebook 0 after the checkpoint was written; a large one ends at
    once.
    """

    variant: str
    size: str
    seed: int = 0
    end_of_speech: bool = True
    stop_scale: float = 1.0

    @property
    def name(self) -> str:
        """Folder name of the golden files, whatever the way to end."""
        return f"{self.variant}-{self.size}"

    @property
    def key(self) -> str:
        """Name that tells every written form apart."""
        return f"{self.name}-seed{self.seed}-{f'stop{self.stop_scale:g}' if self.end_of_speech else 'endless'}"

    def to_json(self) -> str:
        """Text for the metadata of a golden file."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TinyCheckpoint:
        """Read what ``to_json`` wrote."""
        return cls(**json.loads(text))


def write_checkpoint(spec: TinyCheckpoint, out: Path) -> Path:
    """Write the checkpoint into ``out`` and return ``out``."""
    make_checkpoint(out, variant=spec.variant, size=spec.size, seed=spec.seed, end_of_speech=spec.end_of_speech)
    if spec.stop_scale != 1.0:
        scale_stop_row(out, spec.stop_scale)
    return out


def scale_stop_row(directory: Path, factor: float) -> None:
    """Multiply the end-of-speech row of the codebook 0 head by ``factor``, in the file itself (float32 only)."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    row = config["talker_config"]["codec_eos_token_id"]
    with (
        (directory / WEIGHT_FILES[0]).open("r+b") as stream,
        mmap.mmap(stream.fileno(), 0) as mapped,
    ):
        header_bytes = int.from_bytes(mapped[:8], "little")
        entry = json.loads(mapped[8 : 8 + header_bytes])[HEAD]
        if entry["dtype"] != "F32":
            raise ValueError(f"{HEAD} is {entry['dtype']}; only F32 can be scaled")
        width = entry["shape"][1]
        start = 8 + header_bytes + entry["data_offsets"][0] + row * width * 4
        values = np.frombuffer(mapped[start : start + width * 4], dtype="<f4") * np.float32(factor)
        mapped[start : start + width * 4] = values.astype("<f4").tobytes()


def weight_checksums(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of both weight files, by their path inside the checkpoint."""
    sums = {}
    for name in WEIGHT_FILES:
        digest = hashlib.sha256()
        with (directory / name).open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
        sums[name] = digest.hexdigest()
    return sums
