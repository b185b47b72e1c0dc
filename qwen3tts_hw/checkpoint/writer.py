"""Write a complete random checkpoint of any variant and size: for tests, golden data and benchmarks.

Owns the safetensors output (header written by hand, tensors streamed one after the other, so little memory is needed)
and the order of the files. The values come from :mod:`qwen3tts_hw.checkpoint.initialisation`; small sizes are float32
throughout, the published ones bfloat16 with a float32 codec. Needs numpy, not torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from qwen3tts_hw.checkpoint.initialisation import Array, SpeechEnd, draw, round_to_bfloat16
from qwen3tts_hw.checkpoint.inventory import Shapes, codec_tensors, main_tensors
from qwen3tts_hw.checkpoint.published import PUBLISHED_TEXT_VOCAB_SIZE, compose, is_small
from qwen3tts_hw.checkpoint.tokenizer_files import copy_tokenizer, write_tokenizer
from qwen3tts_hw.config import CODEC_SUBFOLDER, ModelConfig, TextTokens
from qwen3tts_hw.errors import CheckpointError

Progress = Callable[[int, int], None]
_UNKNOWN_TOKENS = TextTokens(0, 0, 0, 0, 0, 0)


def make_checkpoint(
    out: str | Path,
    *,
    variant: str,
    size: str,
    tokenizer: str | Path | None = None,
    seed: int = 0,
    end_of_speech: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Write a random checkpoint into ``out``, which must not exist or be empty; return its path.

    ``size`` is one of :data:`~qwen3tts_hw.checkpoint.published.SIZES`. ``tokenizer`` is a directory whose tokenizer
    files are copied; without it a small tokenizer is written. Without ``end_of_speech`` the model never stops by
    itself, so every request runs to its frame limit. The same arguments give the same bytes on every machine.
    ``progress`` is called with the bytes written so far and in all. Raises UnsupportedError for a variant or size that
    does not exist, CheckpointError if ``out`` holds something or cannot be made, or the tokenizer directory is
    incomplete.
    """
    root = Path(out)
    compose(variant, size, _UNKNOWN_TOKENS, 0)  # refuse an unknown variant or size before anything is written
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise CheckpointError(f"{root} already exists and is not an empty directory")
    try:
        (root / CODEC_SUBFOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{root} cannot be made: {error.strerror}") from error
    vocabulary = write_tokenizer(root) if tokenizer is None else copy_tokenizer(Path(tokenizer), root)
    # Published sizes keep the published number of embedding rows, for memory and speed as they will be.
    rows = vocabulary.size if is_small(size) else max(vocabulary.size, PUBLISHED_TEXT_VOCAB_SIZE)
    for path, content in compose(variant, size, vocabulary.tokens, rows).items():
        _write_json(root / path, content)
    config = ModelConfig.from_directory(root)
    main = _Weights(main_tensors(config), seed, not is_small(size), SpeechEnd(config, enabled=end_of_speech))
    codec = _Weights(codec_tensors(config.raw_codec), seed)
    total = main.bytes + codec.bytes
    main.write(root / "model.safetensors", progress, 0, total)
    codec.write(root / CODEC_SUBFOLDER / "model.safetensors", progress, main.bytes, total)
    return root


class _Weights:
    """The tensors of one safetensors file, drawn while they are written."""

    def __init__(self, shapes: Shapes, seed: int, bfloat16: bool = False, end: SpeechEnd | None = None) -> None:
        self._shapes, self._seed, self._bfloat16, self._end = shapes, seed, bfloat16, end
        self._itemsize = 2 if bfloat16 else 4
        self.bytes = sum(math.prod(shape) for shape in shapes.values()) * self._itemsize

    def write(self, path: Path, progress: Progress | None, done: int, total: int) -> None:
        """Write the file under a temporary name and rename it: an interrupted run leaves no file that looks whole."""
        partial = path.with_name(path.name + ".part")
        with partial.open("wb") as file:
            self._write_header(file)
            for name, shape in self._shapes.items():
                for piece in self._pieces(name, shape):
                    file.write(piece.astype(piece.dtype.newbyteorder("<"), copy=False).data)
                    done += piece.nbytes
                    if progress is not None:
                        progress(done, total)
        partial.replace(path)

    def _write_header(self, file: BinaryIO) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, shape in self._shapes.items():
            end = offset + math.prod(shape) * self._itemsize
            dtype = "BF16" if self._bfloat16 else "F32"
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensor data starts 8-byte aligned
        file.write(len(text).to_bytes(8, "little") + text)

    def _pieces(self, name: str, shape: tuple[int, ...]) -> Iterator[Array]:
        if self._end is None or not self._end.concerns(name):
            yield from draw(name, shape, seed=self._seed, bfloat16=self._bfloat16)
            return
        values = np.concatenate(list(draw(name, shape, seed=self._seed, bfloat16=False))).astype(np.float32, copy=False)
        self._end.edit(name, values.reshape(shape))
        yield round_to_bfloat16(values) if self._bfloat16 else values


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
