"""Open a checkpoint directory, check it against its own sizes, and read its tensors.

Reads safetensors only: nothing is ever unpickled. Every defect of the files becomes a
:class:`~qwen3tts_hw.errors.CheckpointError` that names the file and what is wrong with it. Does not know which module a
tensor belongs to. Torch is needed for :meth:`Checkpoint.iter_main` and :meth:`Checkpoint.iter_codec` alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3tts_hw.checkpoint.inventory import Shapes, codec_tensors, main_tensors
from qwen3tts_hw.config import CODEC_SUBFOLDER, ModelConfig
from qwen3tts_hw.errors import CheckpointError, ConfigError
from qwen3tts_hw.json_section import read_json

if TYPE_CHECKING:
    import torch

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_SPEAKER_ENCODER = "speaker_encoder."
_FINGERPRINT_DIGITS = 16
_LISTED = 5  # names shown of each kind of defect
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_DOWNLOADED = ["*.json", "*.txt", "*.safetensors", f"{CODEC_SUBFOLDER}/*"]


def resolve_directory(model: str | Path, revision: str | None = None) -> Path:
    """Turn a local directory or a Hugging Face hub id into a local directory, downloading if needed.

    Raises CheckpointError if it is neither, or if the download fails.
    """
    if model == "":
        raise CheckpointError("the model's name is empty; a checkpoint directory or a hub id was expected")
    path = Path(model)
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; a checkpoint directory or a hub id was expected")
    if not _HUB_ID.fullmatch(str(model)):
        raise CheckpointError(f"{model} does not exist, and it does not look like a hub id (owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(str(model), revision=revision, allow_patterns=_DOWNLOADED))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise CheckpointError(
            f"{model} is no local directory, and downloading it from the hub failed: {error}"
        ) from error


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Parse a directory's configuration; raise CheckpointError if it is no directory, ConfigError for its contents."""
    root = Path(directory)
    if not root.is_dir():
        raise CheckpointError(f"checkpoint directory {root} does not exist")
    return Checkpoint(root, ModelConfig.from_directory(root))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint directory and its parsed configuration; tensors are read when asked for."""

    directory: Path
    config: ModelConfig

    def check(self) -> None:
        """Compare names, shapes and file lengths with what the sizes demand, reading the files' headers only.

        Raises CheckpointError for a file that is missing or cut short, and for tensors that are missing, left over or
        of another shape.
        """
        _compare(self.directory, main_tensors(self.config))
        _compare(self.directory / CODEC_SUBFOLDER, codec_tensors(self.config.raw_codec))

    def voice_fingerprint(self) -> str:
        """What tells whether a speaker embedding was made for this checkpoint; "" where voices are not cloned."""
        if self.config.speaker_encoder is None:
            return ""
        from safetensors import safe_open

        digest = hashlib.sha256()
        for path in _weight_files(self.directory):
            with safe_open(path, framework="pt") as file:
                for name in sorted(name for name in file.keys() if name.startswith(_SPEAKER_ENCODER)):  # noqa: SIM118
                    digest.update(name.encode())
                    digest.update(file.get_tensor(name).float().numpy().tobytes())
        return digest.hexdigest()[:_FINGERPRINT_DIGITS]

    def iter_main(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor (CPU, as stored) of talker, code predictor and speaker encoder, one at a time."""
        return _read(self.directory)

    def iter_codec(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor (CPU, as stored) of the codec's decoder and encoder, one at a time."""
        return _read(self.directory / CODEC_SUBFOLDER)


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the one file, or the shards that the index names."""
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(
            f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; only safetensors files are read, never pickles"
        )
    files = [folder / name for name in sorted(set(_weight_map(index).values()))]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise CheckpointError(f"{index} names shards that do not exist: {_some(missing)}")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content = read_json(index)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    table = content.get("weight_map")
    if not isinstance(table, Mapping) or not table or not all(isinstance(name, str) for name in table.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to file names")
    if any(Path(name).name != name for name in table.values()):
        raise CheckpointError(f"{index} names files outside its own directory")
    return dict(table)


def _compare(folder: Path, expected: Shapes) -> None:
    found: Shapes = {}
    for path in _weight_files(folder):
        header = _header(path)
        twice = sorted(found.keys() & header.keys())
        if twice:
            raise CheckpointError(f"{folder}: tensors present in two shards: {_some(twice)}")
        found |= header
    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append(f"missing: {_some(missing)}")
    if left_over := [name for name in found if name not in expected]:
        problems.append(f"not part of this model: {_some(left_over)}")
    wrong = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if wrong:
        problems.append(f"of another shape: {_some(wrong)}")
    if problems:
        raise CheckpointError(f"the tensors in {folder} do not match its config.json; " + "; ".join(problems))


def _header(path: Path) -> Shapes:
    """Names and shapes from a safetensors header; raise CheckpointError if the file is damaged or cut short."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise CheckpointError(f"{path} is a Git LFS pointer, not the weights; fetch them with 'git lfs pull'")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= size - 8:
            raise CheckpointError(f"{path} ({size} bytes) is no safetensors file, or it is cut short within its header")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path} has a damaged safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a damaged safetensors header: not an object")
    header.pop("__metadata__", None)
    shapes = {name: _entry(path, name, entry) for name, entry in header.items()}
    expected = 8 + length + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    if size != expected:
        state = "cut short" if size < expected else "too long"
        raise CheckpointError(f"{path} is {state}: {size} bytes, its header promises {expected}; download it again")
    return shapes


def _entry(path: Path, name: str, entry: Any) -> tuple[int, ...]:
    """Validate one header entry and return its shape."""
    try:
        kind, shape = entry["dtype"], tuple(int(length) for length in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, OverflowError, TypeError, ValueError):
        raise CheckpointError(f"{path}: the header entry of {name} is damaged") from None
    if kind not in _ITEM_BYTES:
        raise CheckpointError(f"{path}: {name} is stored as {kind}; supported: {', '.join(_ITEM_BYTES)}")
    if min(shape, default=0) < 0 or begin < 0 or end - begin != math.prod(shape) * _ITEM_BYTES[kind]:
        raise CheckpointError(f"{path}: {name} of shape {list(shape)} and type {kind} cannot take {end - begin} bytes")
    return shape


def _read(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping: it cannot be iterated
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def _some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    rest = len(listed) - _LISTED
    return ", ".join(listed[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
