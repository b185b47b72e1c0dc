"""Cloned voices: prompt rows, codes, hidden states and samples are those of the official package.

Float32 on the CPU, greedy, for both widths, both text modes, with and without the reference in the prompt. The local
engine is given the recording and encodes it itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qwen3tts_hw.engine.local import LocalEngine, SpeechResult
from qwen3tts_hw.prompt.layout import PromptLayout, build_layout
from qwen3tts_hw.prompt.request import SpeechRequest, build_request
from qwen3tts_hw.prompt.tokenizer import TextTokenizer
from qwen3tts_hw.settings import Settings
from qwen3tts_hw.types import NUM_CODEBOOKS, SAMPLES_PER_FRAME, ClonedVoice
from tests.parity.test_local_golden import assert_close, assert_equal_codes
from tests.parity.test_prompt_rows import TOLERANCE as ROW_TOLERANCE
from tests.parity.test_prompt_rows import RawEmbeddings
from tests.parity.voice_golden import CloneFile, clone_files

# The official sum of a frame's 16 embeddings is rounded to float32 after each addition, ours here is in float64: up to
# half a unit in the last place of partial sums, 16 times, relative to the row's size.
FRAME_ROW_TOLERANCE = NUM_CODEBOOKS * float(np.finfo(np.float32).eps)

# One checkpoint after the other, so that one engine at a time is enough.
CLONES = sorted(clone_files(), key=lambda clone: (clone.checkpoint.key, clone.id))


def request_for(engine: LocalEngine, clone: CloneFile) -> SpeechRequest:
    """The request of a golden file in the voice that the engine itself hears in the recording."""
    asked = clone.request
    encoded = engine.encode_voice(clone.audio(), with_codes=not asked["x_vector_only"])
    request = build_request(
        engine.config,
        Settings(),
        text=asked["text"],
        voice=ClonedVoice(encoded.embedding, asked["ref_text"] or "", encoded.codes),
        language=asked["language"],
        text_mode=asked["text_mode"],
        temperature=0.0,
        seed=0,
    )
    return replace(request, max_frames=asked["max_frames"])


@pytest.fixture(scope="module")
def engine_for(golden_checkpoint: Callable[[CloneFile], Path]) -> Callable[[CloneFile], LocalEngine]:
    """Return a function from a golden file to an engine; the last one is kept."""
    kept: dict[Path, LocalEngine] = {}

    def load(clone: CloneFile) -> LocalEngine:
        directory = golden_checkpoint(clone)
        if directory not in kept:
            kept.clear()
            kept[directory] = LocalEngine.load(directory, device="cpu", dtype="float32")
        return kept[directory]

    return load


@pytest.fixture(scope="module")
def result_for(engine_for: Callable[[CloneFile], LocalEngine]) -> Callable[[CloneFile], SpeechResult]:
    """Return a function from a golden file to the local result, computed once."""
    results: dict[str, SpeechResult] = {}

    def run(clone: CloneFile) -> SpeechResult:
        if clone.id not in results:
            engine = engine_for(clone)
            results[clone.id] = engine.synthesize(request_for(engine, clone), keep_hidden=True)
        return results[clone.id]

    return run


@pytest.mark.parametrize("clone", CLONES, ids=lambda clone: clone.id)
class TestLocalEngine:
    def test_codes_are_identical(self, clone, result_for):
        assert_equal_codes(result_for(clone).codes, clone.arrays["codes"])

    def test_finish_reason_is_equal(self, clone, result_for):
        assert result_for(clone).finish_reason == clone.finish_reason

    def test_hidden_states_agree(self, clone, result_for):
        assert_close(result_for(clone).hidden, clone.arrays["hidden"], "hidden")

    def test_waveform_agrees(self, clone, result_for):
        assert_close(result_for(clone).pcm, clone.arrays["waveform"], "waveform")

    def test_streamed_waveform_agrees(self, clone, engine_for):
        """The codec is primed with the reference instead of decoding it with the speech."""
        engine = engine_for(clone)
        streamed = np.concatenate(list(engine.stream(request_for(engine, clone))))
        assert_close(streamed, clone.arrays["waveform"], "waveform")


@pytest.mark.parametrize("clone", CLONES, ids=lambda clone: clone.id)
class TestPromptRows:
    @pytest.fixture
    def directory(self, clone, golden_checkpoint):
        return golden_checkpoint(clone)

    @pytest.fixture
    def layout(self, clone, directory, engine_for) -> PromptLayout:
        engine = engine_for(clone)
        return build_layout(engine.config, engine.tokenizer, request_for(engine, clone))

    def test_prompt_rows_agree(self, clone, directory, layout):
        embeddings, expected = RawEmbeddings(directory), clone.arrays["prompt_rows"]
        rows = embeddings.text(layout.text_ids) + embeddings.codec(layout.codec_ids)
        assert rows.shape == expected.shape
        rows[layout.speaker_row] += clone.arrays["speaker_embedding"]
        if layout.reference_start is not None:
            place = slice(layout.reference_start, layout.reference_start + layout.reference_frames)
            rows[place] += frames_of(embeddings, clone.arrays["ref_codes"])
        assert (np.abs(rows - expected) / np.maximum(1.0, np.abs(expected))).max() <= FRAME_ROW_TOLERANCE

    def test_trailing_rows_agree(self, clone, directory, layout):
        found = RawEmbeddings(directory).text(layout.trailing_text_ids)
        assert found.shape == clone.arrays["trailing_rows"].shape
        assert np.abs(found - clone.arrays["trailing_rows"]).max() <= ROW_TOLERANCE

    def test_reference_text_ids_agree(self, clone, directory):
        if not clone.request["x_vector_only"]:
            found = TextTokenizer.from_directory(directory).encode(clone.request["ref_text"])
            assert found == clone.arrays["ref_ids"][3:-2].tolist()

    def test_length_is_that_of_the_reference(self, clone, layout):
        expected = 0 if clone.request["x_vector_only"] else -(-clone.request["ref_samples"] // SAMPLES_PER_FRAME)
        assert layout.reference_frames == expected


def frames_of(embeddings: RawEmbeddings, codes: np.ndarray) -> np.ndarray:
    """Sum of the embeddings of each frame's codes."""
    total = embeddings.codec(codes[:, 0])
    for group in range(1, NUM_CODEBOOKS):
        total = total + embeddings.weight(f"code_predictor.model.codec_embedding.{group - 1}.weight")[codes[:, group]]
    return total
