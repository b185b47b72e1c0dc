"""The text tokenizer against ids of the published one, and its refusal of damaged files."""

from __future__ import annotations

import json
import shutil
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3tts_hw.checkpoint.tokenizer_files import SPECIAL_TOKENS, byte_symbols, copy_tokenizer, write_tokenizer
from qwen3tts_hw.errors import CheckpointError, ConfigError
from qwen3tts_hw.prompt.tokenizer import TextTokenizer
from tests.unit.published_configs import SUBSET, subset_tokenizer

PUBLISHED = subset_tokenizer()
FIRST_SPECIAL = 151_643
SYMBOLS = {index: symbol for symbol, index in json.loads((SUBSET / "vocab.json").read_text(encoding="utf-8")).items()}
BYTE_OF = {symbol: value for value, symbol in byte_symbols().items()}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    vocabulary = write_tokenizer(directory)
    return directory, vocabulary, TextTokenizer.from_directory(directory)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world.", [9707, 1879, 13]),
        ("你好。", [108386, 1773]),
        (" Hi.", [21018, 13]),
        ("Good morning.", [15216, 6556, 13]),
        ("Very happy.", [25756, 6247, 13]),
        ("Café", [34, 2577, 963]),
        ("Cafe\N{COMBINING ACUTE ACCENT}", [34, 2577, 963]),
        ("assistant", [77091]),
        ("", []),
    ],
)
def test_published_vectors(text, ids):
    assert PUBLISHED.encode(text) == ids


def test_role_ids():
    assert (PUBLISHED.newline_id, PUBLISHED.user_id) == (198, 872)


def test_words_with_inner_capitals_are_not_split():
    # Another pattern in circulation cuts them in two before the capital: " i" + "Phone".
    assert PUBLISHED.encode("my iPhone and YouTube") == [2408, 12167, 323, 13370]


@pytest.mark.parametrize("breaks", ["\n", "\r\n", "  \n", "\n\n \t\n", "\N{IDEOGRAPHIC SPACE}\n"])
def test_leading_line_breaks_are_dropped(breaks):
    assert PUBLISHED.encode(f"{breaks}Hi.") == PUBLISHED.encode("Hi.")
    assert PUBLISHED.encode(f"{breaks} Hi.") == PUBLISHED.encode(" Hi.")


def test_other_line_breaks_are_kept():
    assert PUBLISHED.newline_id in PUBLISHED.encode("Hi\nHi")
    assert PUBLISHED.encode("Hi.\n") != PUBLISHED.encode("Hi.")


@pytest.mark.parametrize("special", SPECIAL_TOKENS)
def test_special_strings_are_plain_text(special, small):
    _, vocabulary, tokenizer = small
    first = vocabulary.tokens.im_start - 1
    assert all(index < first for index in tokenizer.encode(f"a {special} b"))
    assert all(index < FIRST_SPECIAL for index in PUBLISHED.encode(f"a {special} b"))


@given(st.text())
def test_any_text_is_encoded_without_loss(text):
    """Only normalisation and leading line breaks change the text: the tokens' bytes are the rest of it."""
    symbols = "".join(SYMBOLS[index] for index in PUBLISHED.encode(text))
    decoded = bytes(BYTE_OF[symbol] for symbol in symbols).decode("utf-8")
    normal = unicodedata.normalize("NFC", text)
    assert normal.endswith(decoded)
    dropped = normal.removesuffix(decoded)
    assert not dropped or (not dropped.strip() and dropped[-1] in "\r\n")


def test_small_vocabulary_has_the_prompt_words_as_single_tokens(small):
    directory, vocabulary, tokenizer = small
    assert tokenizer.encode("assistant") == [vocabulary.tokens.assistant]
    assert tokenizer.newline_id == 198
    assert len(tokenizer.encode("Hello world")) == 2
    assert len(tokenizer.encode("你好")) == 2
    assert vocabulary.size % 64 == 0
    decoder = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))["added_tokens_decoder"]
    assert [entry["content"] for entry in decoder.values()] == list(SPECIAL_TOKENS)
    assert max(map(int, decoder)) < vocabulary.size


def test_given_files_keep_their_ids(tmp_path):
    vocabulary = copy_tokenizer(SUBSET, tmp_path)
    tokens = vocabulary.tokens
    assert (tokens.im_start, tokens.im_end, tokens.assistant) == (151_644, 151_645, 77_091)
    assert (tokens.tts_pad, tokens.tts_bos, tokens.tts_eos) == (151_671, 151_672, 151_673)
    assert vocabulary.size == 151_936
    assert TextTokenizer.from_directory(tmp_path).encode("Hello world.") == [9707, 1879, 13]


def test_incomplete_given_files_are_refused(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(SUBSET, source)
    out.mkdir()
    (source / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="no token '<|im_start|>'".replace("|", r"\|")):
        copy_tokenizer(source, out)
    (source / "merges.txt").unlink()
    with pytest.raises(CheckpointError, match=r"lacks merges\.txt"):
        copy_tokenizer(source, out)


class TestDamagedFiles:
    @pytest.fixture
    def directory(self, tmp_path):
        shutil.copytree(SUBSET, tmp_path / "t")
        return tmp_path / "t"

    def edit_vocabulary(self, directory, edit):
        path = directory / "vocab.json"
        vocabulary = json.loads(path.read_text(encoding="utf-8"))
        edit(vocabulary)
        path.write_text(json.dumps(vocabulary), encoding="utf-8")

    def test_missing_vocabulary(self, directory):
        (directory / "vocab.json").unlink()
        with pytest.raises(ConfigError, match=r"vocab\.json does not exist"):
            TextTokenizer.from_directory(directory)

    def test_missing_merges(self, directory):
        (directory / "merges.txt").unlink()
        with pytest.raises(CheckpointError, match=r"merges\.txt cannot be read"):
            TextTokenizer.from_directory(directory)

    def test_missing_byte_symbol(self, directory):
        self.edit_vocabulary(directory, lambda vocabulary: vocabulary.pop("q"))
        with pytest.raises(CheckpointError, match="lacks 1 of the 256 byte symbols"):
            TextTokenizer.from_directory(directory)

    @pytest.mark.parametrize("index", ["7", -1, 1.5, None, True])
    def test_impossible_id(self, directory, index):
        self.edit_vocabulary(directory, lambda vocabulary: vocabulary.update(q=index))
        with pytest.raises(CheckpointError, match="no id"):
            TextTokenizer.from_directory(directory)

    @pytest.mark.parametrize("line", ["q zz", "one", "a b c"])
    def test_merge_that_does_not_fit(self, directory, line):
        with (directory / "merges.txt").open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        with pytest.raises(CheckpointError, match=r"merges\.txt, line 99"):
            TextTokenizer.from_directory(directory)

    def test_prompt_word_in_pieces(self, directory):
        path = directory / "merges.txt"
        kept = [line for line in path.read_text(encoding="utf-8").split("\n") if line != "us er"]
        path.write_text("\n".join(kept), encoding="utf-8")
        with pytest.raises(CheckpointError, match="splits 'user' into 2 tokens"):
            TextTokenizer.from_directory(directory)

    def test_version_line_is_no_merge(self, directory):
        path = directory / "merges.txt"
        path.write_text("#version: 0.2\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
        assert TextTokenizer.from_directory(directory).encode("Hello world.") == [9707, 1879, 13]
