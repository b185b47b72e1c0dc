"""Voice files: the inverse of writing, and everything a stranger's file may hold instead."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from qwen3tts_hw.errors import RequestError
from qwen3tts_hw.types import ClonedVoice
from qwen3tts_hw.voice.voice_file import StoredVoice, check_embedding, from_bytes, to_bytes, to_pcm

EMBEDDING = np.linspace(-1, 1, 8, dtype=np.float32)
CODES = np.arange(48, dtype=np.int16).reshape(3, 16)
VOICE = ClonedVoice(EMBEDDING.tobytes(), "Guten Morgen, schön.", CODES.tobytes())
STORED = StoredVoice("anna", VOICE, True, "2026-01-01T00:00:00+00:00", "f1", 0.25)
METADATA = {"format": "qwen3tts-voice", "version": "1", "name": "anna", "consent": "true", "reference_text": "Hello."}
GOOD = {"speaker_embedding": EMBEDDING, "reference_codes": CODES}


def file_of(arrays, metadata):
    return save(arrays, {"voice": json.dumps(metadata)})


def refusal(data):
    with pytest.raises(RequestError) as caught:
        from_bytes(data)
    return caught.value


def test_reading_is_the_inverse():
    found = from_bytes(to_bytes(STORED))
    for name in ("name", "voice", "consent", "created", "fingerprint", "seconds", "audio"):
        assert getattr(found, name) == getattr(STORED, name)


def test_the_same_voice_is_the_same_bytes():
    assert len({to_bytes(from_bytes(to_bytes(STORED))) for _ in range(8)}) == 1


def test_audio_is_kept():
    samples = np.array([0.0, 0.5, -1.0, 1.5], np.float32)
    found = from_bytes(to_bytes(replace(STORED, audio=to_pcm(samples))))
    assert found.audio.tolist() == [0, 16_384, -32_767, 32_767]


def test_consent_is_kept():
    assert not from_bytes(to_bytes(replace(STORED, consent=False))).consent


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speaker_embedding": None}, "no speaker embedding"),
        ({"speaker_embedding": EMBEDDING.astype(np.float16)}, "no speaker embedding"),
        ({"speaker_embedding": EMBEDDING[None]}, "no speaker embedding"),
        ({"speaker_embedding": EMBEDDING * np.nan}, "no numbers"),
        ({"speaker_embedding": EMBEDDING * 1e9}, "beyond"),
        ({"reference_codes": None}, "not both"),
        ({"reference_codes": CODES.astype(np.int32)}, "unexpected form"),
        ({"reference_codes": CODES[:, :15].copy()}, "unexpected form"),
        ({"reference_codes": CODES[:0]}, "unexpected form"),
        ({"reference_codes": CODES - 1}, "outside"),
        ({"reference_codes": CODES + 2_048}, "outside"),
        ({"audio": EMBEDDING}, "audio"),
        ({"more": EMBEDDING}, "unknown parts"),
    ],
)
def test_bad_contents(changes, said):
    arrays = {name: value for name, value in (GOOD | changes).items() if value is not None}
    error = refusal(file_of(arrays, METADATA))
    assert said in error.message
    assert error.field in ("file", "speaker_embedding")


@pytest.mark.parametrize("changes", [{"format": "other"}, {"version": "2"}, {"format": None}])
def test_other_formats(changes):
    metadata = {name: value for name, value in (METADATA | changes).items() if value is not None}
    assert "no voice" in refusal(file_of(GOOD, metadata)).message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        bytes(8),
        (2**60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{}",
        (60_000).to_bytes(8, "little") + b"[" * 60_000,
        save(GOOD),
        save(GOOD, {"voice": "["}),
        save(GOOD, {"voice": '{"name": 3}'}),
        to_bytes(STORED)[:-1],
        to_bytes(STORED) + b"x",
    ],
    ids=range(12),
)
def test_what_is_no_voice_file(data):
    assert refusal(data).field == "file"


def test_a_header_that_lies_about_sizes():
    data = to_bytes(STORED)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["speaker_embedding"]["data_offsets"][1] += 1_000_000
    changed = json.dumps(header).encode()
    assert refusal(len(changed).to_bytes(8, "little") + changed + data[8 + length :]).field == "file"


@given(st.data())
def test_changed_bytes_never_do_harm(data):
    """A changed file is refused, or it is still a voice whose parts fit each other."""
    changed = bytearray(to_bytes(STORED))
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        voice = from_bytes(bytes(changed)).voice
    except RequestError:
        return
    assert np.isfinite(np.frombuffer(voice.embedding, "<f4")).all()
    codes = np.frombuffer(voice.reference_codes, "<i2")
    assert ((codes >= 0) & (codes < 2_048)).all()


@pytest.mark.parametrize("values", ["abc", [[1.0]], [1.0], ["a", "b"], [1.0, float("nan")], [1.0, 1e30], None])
def test_embeddings_that_do_not_fit(values):
    with pytest.raises(RequestError) as caught:
        check_embedding(values, 2)
    assert caught.value.field == "speaker_embedding"


def test_an_embedding():
    assert np.frombuffer(check_embedding([1, -0.5], 2), "<f4").tolist() == [1.0, -0.5]
