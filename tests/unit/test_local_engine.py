"""The local engine: ends and limits, streaming against one pass, and that requests do not influence each other."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from qwen3tts_hw.checkpoint.reader import Checkpoint
from qwen3tts_hw.engine.local import LocalEngine
from qwen3tts_hw.errors import CheckpointError, GenerationError, RequestError, UnsupportedError
from qwen3tts_hw.prompt.request import build_request
from qwen3tts_hw.settings import Settings
from qwen3tts_hw.types import NUM_CODEBOOKS, SAMPLES_PER_FRAME, FinishReason

TEXT = "Good morning, how are you?"
END = 2150


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    return LocalEngine.load(tiny_checkpoint(end_of_speech=False), device="cpu", settings=Settings())


def request(engine, frames, **options):
    options = {"text": TEXT, "voice": "ryan", "seed": 3} | options
    return replace(build_request(engine.config, engine.settings, **options), max_frames=frames)


@pytest.fixture
def raise_end(monkeypatch):
    """Make end of speech the likeliest code from a step of the talker on."""

    def start(engine, step):
        original, calls = engine._talker.logits, []

        def logits(hidden):
            found = original(hidden)
            calls.append(found)
            if len(calls) > step:
                found[:, END] = 1e4
            return found

        monkeypatch.setattr(engine._talker, "logits", logits)

    return start


class TestEnds:
    @pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {}], ids=["greedy", "sampled"])
    def test_end_of_speech_from_the_first_step_gives_two_frames(self, engine, raise_end, sampling):
        raise_end(engine, 0)
        result = engine.synthesize(request(engine, 30, **sampling))
        assert result.codes.shape == (2, NUM_CODEBOOKS)
        assert result.finish_reason is FinishReason.STOP
        assert len(result.pcm) == 2 * SAMPLES_PER_FRAME

    @pytest.mark.parametrize("frames", [7, 8, 9, 15, 16])
    def test_end_of_speech_around_the_check_for_it(self, engine, raise_end, frames):
        """The host looks every 8 frames whether the request has ended."""
        expected = engine.synthesize(request(engine, 20)).codes[:frames]
        raise_end(engine, frames)
        result = engine.synthesize(request(engine, 20))
        assert result.finish_reason is FinishReason.STOP
        assert np.array_equal(result.codes, expected)

    @pytest.mark.parametrize("limit", [1, 2, 8, 11])
    def test_the_limit_counts_frames(self, engine, limit):
        result = engine.synthesize(request(engine, limit))
        assert (len(result.codes), result.finish_reason) == (limit, FinishReason.LENGTH)
        assert np.array_equal(result.codes, engine.synthesize(request(engine, limit + 5)).codes[:limit])

    def test_results(self, engine):
        result = engine.synthesize(request(engine, 4), keep_hidden=True)
        assert (result.codes.dtype, result.pcm.dtype, result.hidden.dtype) == (np.int64, np.float32, np.float32)
        assert result.hidden.shape == (4, engine.config.talker.hidden_size)
        assert 0 <= result.codes.min() <= result.codes.max() < 2048
        assert 0.01 < np.abs(result.pcm).max() <= 1.0
        assert engine.synthesize(request(engine, 4)).hidden is None

    def test_progress(self, engine):
        seen = []
        engine.synthesize(request(engine, 19), progress=lambda done, total: seen.append((done, total)))
        assert seen == [(8, 19), (16, 19), (19, 19)]


class TestStreaming:
    @pytest.mark.parametrize("frames", [1, 8, 13])
    def test_a_stream_equals_one_pass(self, engine, frames):
        blocks = list(engine.stream(request(engine, frames)))
        assert [len(block) // SAMPLES_PER_FRAME for block in blocks] == [8] * (frames // 8) + [frames % 8] * (
            frames % 8 > 0
        )
        whole = engine.synthesize(request(engine, frames)).pcm
        assert np.abs(np.concatenate(blocks) - whole).max() <= 1e-4

    def test_a_stream_that_was_abandoned_leaves_nothing_behind(self, engine):
        expected = engine.synthesize(request(engine, 10)).codes
        stream = engine.stream(request(engine, 30, seed=8))
        next(stream)
        assert np.array_equal(engine.synthesize(request(engine, 10)).codes, expected)
        with pytest.raises(GenerationError, match="another request was started"):
            next(stream)  # the engine holds the state of one request only


class TestRequests:
    def test_requests_do_not_influence_each_other(self, engine):
        first = engine.synthesize(request(engine, 6), keep_hidden=True)
        engine.synthesize(request(engine, 12, text="Something else, and much longer than the first.", seed=99))
        again = engine.synthesize(request(engine, 6), keep_hidden=True)
        assert np.array_equal(first.codes, again.codes)
        assert np.array_equal(first.hidden, again.hidden)
        assert np.array_equal(first.pcm, again.pcm)

    def test_what_a_request_says_matters(self, engine):
        found = {
            engine.synthesize(request(engine, 3, **options)).codes.tobytes()
            for options in (
                {},
                {"seed": 3 + 2**32},
                {"voice": "vivian"},
                {"language": "english"},
                {"text": "Good evening, how are you?"},
                {"instruct": "Very happy."},
                {"text_mode": "streaming"},
                {"temperature": 0.3},
                {"temperature": 0.0},
            )
        }
        assert len(found) == 9

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_graphs_give_the_same_codes(self, tiny_checkpoint, dtype):
        results = []
        for graphs in ("off", "recording"):
            engine = LocalEngine.load(tiny_checkpoint(), device="cpu", dtype=dtype, settings=Settings(graphs=graphs))
            assert engine.graph_mode == ("eager" if graphs == "off" else "graph")
            results.append(engine.synthesize(request(engine, 5)).codes)
        assert np.array_equal(*results)

    def test_other_forms_speak(self, tiny_checkpoint):
        small = LocalEngine.load(tiny_checkpoint(size="tiny-0.6B"), device="cpu")
        assert len(small.synthesize(request(small, 3)).codes) == 3
        design = LocalEngine.load(tiny_checkpoint(variant="voice_design"), device="cpu")
        assert len(design.synthesize(request(design, 3, voice=None, instruct="An old man.")).codes) == 3


class TestRefusals:
    def test_a_prompt_longer_than_the_model(self, tiny_checkpoint, tmp_path):
        shutil.copytree(tiny_checkpoint(), tmp_path / "short")
        path = tmp_path / "short" / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["talker_config"]["max_position_embeddings"] = 40
        path.write_text(json.dumps(config), encoding="utf-8")
        engine = LocalEngine.load(tmp_path / "short", device="cpu")
        with pytest.raises(RequestError, match="the model has 40 positions") as raised:
            engine.synthesize(request(engine, 5, text="word " * 60))
        assert raised.value.field == "input"
        result = engine.synthesize(request(engine, 1_000, text="Hi"))
        assert len(result.codes) <= 40 - result.prompt_rows
        shutil.rmtree(tmp_path / "short")

    def test_bad_choices(self, tiny_checkpoint, tmp_path):
        with pytest.raises(UnsupportedError, match="dtype 'float16' is not supported; choose one of float32, bfloat16"):
            LocalEngine.load(tiny_checkpoint(), device="cpu", dtype="float16")
        with pytest.raises(UnsupportedError, match="tpu"):
            LocalEngine.load(tiny_checkpoint(), device="tpu")
        with pytest.raises(UnsupportedError, match="graphs are on"):
            LocalEngine.load(tiny_checkpoint(), device="cpu", settings=Settings(graphs="on"))
        with pytest.raises(CheckpointError, match="does not exist"):
            LocalEngine.load(tmp_path / "none", device="cpu")

    @pytest.mark.parametrize(
        "setting", ["graphs=on", "predictor=fused", "weight_layout=packed", "attention_op=npu_fusion"]
    )
    def test_what_the_device_cannot_do_is_said_before_weights_are_read(self, tiny_checkpoint, monkeypatch, setting):
        monkeypatch.setattr(Checkpoint, "iter_main", lambda self: pytest.fail("weights were read"))
        settings = Settings(**dict([setting.split("=")]))
        with pytest.raises(UnsupportedError):
            LocalEngine.load(tiny_checkpoint(), device="cpu", settings=settings)
