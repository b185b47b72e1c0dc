"""The text tokenizer: Qwen2's byte-level BPE, built from ``vocab.json`` and ``merges.txt``.

Knows no special tokens: a special string in a user's text is tokenised as the plain characters it consists of, so no
text can forge the structure of a prompt. Special ids are added by :mod:`qwen3tts_hw.prompt.layout`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from qwen3tts_hw.errors import CheckpointError
from qwen3tts_hw.json_section import read_json

# English contractions; letters with one character before them; single digits; punctuation; line breaks; spaces.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# White space as the pattern above understands it, up to its last line break, at the very start.
_LEADING_BREAKS = re.compile(r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*[\r\n]")


class TextTokenizer:
    """Text to ids. ``newline_id`` and ``user_id`` are the ids of a line break and of the word ``user``."""

    def __init__(self, model: Tokenizer, where: str) -> None:
        self._model = model
        self.newline_id = self._single("\n", where)
        self.user_id = self._single("user", where)

    @classmethod
    def from_directory(cls, directory: str | Path) -> TextTokenizer:
        """Build from a checkpoint's files; raise ConfigError or CheckpointError if they are missing or damaged."""
        root = Path(directory)
        vocabulary = read_json(root / "vocab.json")
        if not all(type(index) is int and 0 <= index < 2**31 for index in vocabulary.values()):
            raise CheckpointError(f"{root / 'vocab.json'} maps some symbols to something that is no id")
        if missing := sum(symbol not in vocabulary for symbol in ByteLevel.alphabet()):
            raise CheckpointError(f"{root / 'vocab.json'} lacks {missing} of the 256 byte symbols; text would get lost")
        model = Tokenizer(BPE(vocabulary, _merges(root / "merges.txt", vocabulary)))
        model.normalizer = NFC()
        model.pre_tokenizer = Sequence(
            [Split(Regex(QWEN2_PATTERN), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        return cls(model, str(root))

    def encode(self, text: str) -> list[int]:
        """Tokenise a text that will follow a role line and its line break.

        White space at the start that ends in a line break is dropped. The official package tokenises role line and text
        as one string, where such white space merges with the role's own line break into one token and shifts the rows
        of the prompt by one; without it both ways agree. Other leading white space is kept.
        """
        found = _LEADING_BREAKS.match(text)
        return self._ids(text[found.end() :] if found else text)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text, add_special_tokens=False).ids
        return ids

    def _single(self, text: str, where: str) -> int:
        ids = self._ids(text)
        if len(ids) != 1:
            raise CheckpointError(f"the tokenizer in {where} splits {text!r} into {len(ids)} tokens; prompts need one")
        return ids[0]


def _merges(path: Path, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Read the merges in order of rank; one of unknown symbols means that the files are not of one tokenizer."""
    try:
        # Not splitlines(): merges contain characters that it takes for line ends.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    merges = []
    for number, line in enumerate(lines, start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise CheckpointError(f"{path}, line {number}: no merge of two symbols of vocab.json")
        merges.append((left, right))
    return merges
