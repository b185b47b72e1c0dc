"""The encoders of reference audio give what the official package gave: equal codes, embeddings within 1e-4.

Also that the stored data is complete, and that a cloned waveform is the decoded speech after exactly 1,920 samples per
frame of reference. Float32 on the CPU.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from qwen3tts_hw.checkpoint.reader import open_checkpoint
from qwen3tts_hw.codec import CodecDecoder, CodecEncoder
from qwen3tts_hw.types import NUM_CODEBOOKS, SAMPLES_PER_FRAME
from qwen3tts_hw.voice.audio_input import resample
from qwen3tts_hw.voice.mel import MelSpectrogram
from qwen3tts_hw.voice.speaker_encoder import SpeakerEncoder
from tests.parity.reference_audio import audio_checksum, reference_audio
from tests.parity.voice_golden import CLONE_ARRAYS, REFERENCE_ARRAYS, clone_files, reference_files

TOLERANCE = 1e-4
MAX_BYTES = 1_000_000
REFERENCES, CLONES = reference_files(), clone_files()
CHECKPOINTS = {"base-tiny", "base-tiny-0.6B"}
# Lengths around a frame, appendix B's 1.25 s, the longest of the common clips, and one beyond the encoder's window.
LENGTHS = [1_919, 1_920, 1_921, 24_000, 30_000, 72_007, 120_001, 237_600, 312_000]

each_file = pytest.mark.parametrize("file", REFERENCES, ids=lambda file: file.id)
each_length = pytest.mark.parametrize("samples", LENGTHS)
each_clone = pytest.mark.parametrize("clone", CLONES, ids=lambda clone: clone.id)
both_ways = pytest.mark.parametrize("stft", [True, False], ids=["stft", "matmul"])


@pytest.fixture(scope="module")
def encoders(golden_checkpoint):
    """Return a function from a golden file to its codec encoder, codec decoder and both speaker encoders."""
    kept = {}

    def load(file):
        directory = golden_checkpoint(file)
        if directory not in kept:
            checkpoint = open_checkpoint(directory)
            encoder = CodecEncoder(checkpoint.config.codec_encoder, "cpu")
            decoder = CodecDecoder(checkpoint.config.codec, "cpu", torch.float32)
            speakers = {
                stft: SpeakerEncoder(checkpoint.config.speaker_encoder, "cpu", stft=stft) for stft in (True, False)
            }
            for codec in (encoder, decoder):
                codec.load_weights(checkpoint.iter_codec())
            for speaker in speakers.values():
                speaker.load_weights(checkpoint.iter_main())
            kept[directory] = (encoder, decoder, speakers)
        return kept[directory]

    return load


def assert_equal_codes(found: torch.Tensor, expected: np.ndarray) -> None:
    """Fail naming the first frame and codebook that differ."""
    codes = found.numpy()
    assert codes.shape == expected.shape
    for frame, codebook in np.argwhere(codes != expected)[:1]:
        raise AssertionError(
            f"codes differ first at frame {frame}, codebook {codebook}: {codes[frame, codebook]}, "
            f"official {expected[frame, codebook]}"
        )


class TestData:
    def test_both_widths_are_there(self):
        assert {file.checkpoint.name for file in REFERENCES} == CHECKPOINTS
        for name in CHECKPOINTS:
            asked = {
                (clone.request["x_vector_only"], clone.request["text_mode"])
                for clone in CLONES
                if clone.checkpoint.name == name
            }
            assert asked == {(only, mode) for only in (True, False) for mode in ("whole", "streaming")}

    def test_streaming_references_are_longer_and_shorter_than_their_text(self):
        for name in CHECKPOINTS:
            left_over = [
                len(clone.arrays["trailing_rows"])
                for clone in CLONES
                if clone.checkpoint.name == name
                and clone.request["text_mode"] == "streaming"
                and not clone.request["x_vector_only"]
            ]
            assert min(left_over) == 1
            assert max(left_over) > 1

    @pytest.mark.parametrize("file", [*REFERENCES, *CLONES], ids=lambda file: file.id)
    def test_files_are_small_and_say_where_they_come_from(self, file):
        assert file.path.stat().st_size <= MAX_BYTES
        assert {"versions", "command", "settings", "checkpoint", "audio_sha256"} <= set(file.metadata)

    @each_file
    def test_recordings_are_the_same_again(self, file):
        assert file.lengths == LENGTHS
        assert {samples: audio_checksum(file.audio(samples)) for samples in LENGTHS} == file.audio_checksums

    @each_clone
    def test_clones_are_complete(self, clone):
        arrays, request = clone.arrays, clone.request
        assert set(arrays) == CLONE_ARRAYS | (set() if request["x_vector_only"] else REFERENCE_ARRAYS)
        assert request["x_vector_only"] == (request["ref_text"] is None)
        assert audio_checksum(clone.audio()) == clone.metadata["audio_sha256"]
        frames = len(arrays["codes"])
        assert arrays["waveform"].shape == (frames * SAMPLES_PER_FRAME,)
        assert arrays["hidden"].shape == (frames, len(arrays["speaker_embedding"]))
        assert clone.finish_reason == "stop" or frames == request["max_frames"]


class TestCodecEncoder:
    @each_length
    @each_file
    def test_codes_are_identical(self, file, samples, encoders):
        encoder, _, _ = encoders(file)
        codes = encoder.encode(torch.from_numpy(file.audio(samples)))
        assert codes.shape == (math.ceil(samples / SAMPLES_PER_FRAME), NUM_CODEBOOKS)
        assert_equal_codes(codes, file.arrays[f"codes_{samples}"])

    @each_file
    def test_the_window_is_not_applied(self, file, encoders, golden_checkpoint):
        """The stored codes of 13 s tell the two apart, those of 9.9 s do not."""
        checkpoint = open_checkpoint(golden_checkpoint(file))
        windowed = CodecEncoder(checkpoint.config.codec_encoder, "cpu", windowed=True)
        windowed.load_weights(checkpoint.iter_codec())
        same = [
            np.array_equal(windowed.encode(torch.from_numpy(file.audio(n))).numpy(), file.arrays[f"codes_{n}"])
            for n in (237_600, 312_000)
        ]
        assert same == [True, False]

    @each_clone
    def test_codes_of_clones_are_identical(self, clone, encoders):
        if not clone.request["x_vector_only"]:
            encoder, _, _ = encoders(clone)
            assert_equal_codes(encoder.encode(torch.from_numpy(clone.audio())), clone.arrays["ref_codes"])


class TestSpeakerEncoder:
    @both_ways
    @each_length
    @each_file
    def test_embedding_agrees(self, file, samples, stft, encoders):
        _, _, speakers = encoders(file)
        embedding = speakers[stft].embed(torch.from_numpy(file.audio(samples))).numpy()
        expected = file.arrays[f"embedding_{samples}"]
        assert embedding.shape == expected.shape
        assert np.abs(embedding - expected).max() <= TOLERANCE

    @both_ways
    @each_clone
    def test_embedding_of_clones_agrees(self, clone, stft, encoders):
        _, _, speakers = encoders(clone)
        embedding = speakers[stft].embed(torch.from_numpy(clone.audio())).numpy()
        assert np.abs(embedding - clone.arrays["speaker_embedding"]).max() <= TOLERANCE

    @both_ways
    @each_file
    def test_mel_frames_agree(self, file, stft):
        frames = MelSpectrogram(128, "cpu", stft=stft)(torch.from_numpy(file.audio(30_000))).numpy().T
        expected = file.arrays["mel_30000"]
        assert frames.shape == expected.shape == (117, 128)
        assert np.abs(frames - expected).max() <= 2e-4  # logarithms of very small sums


@each_file
@pytest.mark.parametrize("rate_hz", [8_000, 44_100, 48_000])
def test_resampled_audio_agrees(file, rate_hz):
    expected = file.arrays[f"resampled_{rate_hz}"]
    found = resample(reference_audio(6_000, seed=0), rate_hz)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-6


@each_clone
def test_the_waveform_begins_after_the_reference(clone, encoders):
    _, decoder, _ = encoders(clone)
    arrays = clone.arrays
    codes = arrays["codes"]
    reference = arrays.get("ref_codes", codes[:0])
    together = torch.from_numpy(np.concatenate([reference, codes]).T[None])
    pcm = decoder.decode(together)[0, SAMPLES_PER_FRAME * len(reference) :].numpy()
    assert np.abs(pcm - arrays["waveform"]).max() <= TOLERANCE
