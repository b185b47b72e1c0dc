"""The speech service over a scripted engine: what a stream yields, what the engine is given, what is kept."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.errors import CapacityError, GenerationError, RequestError
from qwen3tts_hw.prompt.layout import build_layout
from qwen3tts_hw.prompt.request import build_request
from qwen3tts_hw.prompt.tokenizer import TextTokenizer
from qwen3tts_hw.settings import Settings
from qwen3tts_hw.types import SAMPLES_PER_FRAME, FinishReason, SpeechOutcome
from qwen3tts_hw.vllm_plugin.payload import unpack
from tests.unit.scripted_engine import HANG, MAX_ROWS, chunks_of, replace_vllm, runner


@pytest.fixture(scope="module")
def parts(tiny_checkpoint):
    directory = tiny_checkpoint()
    return ModelConfig.from_directory(directory), TextTokenizer.from_directory(directory)


@pytest.fixture
def run(parts, monkeypatch, caplog):
    replace_vllm(monkeypatch)
    yield runner(*parts)
    # asyncio reports forgotten exceptions and destroyed tasks in its log only.
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


class TestStreams:
    WHOLE = (("audio", 1), ("audio", 2), ("last", 4), ("finish", "stop"))

    @pytest.mark.parametrize(
        "script",
        [
            WHOLE,
            (("audio", 1), ("audio", 2), ("late last", 4), ("finish", "stop")),
            (("finish", "stop"), ("audio", 1), ("audio", 2), ("last", 4)),
        ],
        ids=["audio first", "tail after the final output", "final output first"],
    )
    def test_chunks_and_outcome(self, run, script):
        async def test(service, engine, request):
            stream = await service.submit(request)
            assert stream.outcome is None
            chunks = await chunks_of(stream)
            assert [(chunk.frames, chunk.total_frames, chunk.last) for chunk in chunks] == [
                (1, 1, False),
                (2, 3, False),
                (4, 7, True),
            ]
            samples = np.frombuffer(b"".join(chunk.pcm for chunk in chunks), np.int16)
            assert samples.tolist() == np.repeat(np.arange(7), SAMPLES_PER_FRAME).tolist()
            outcome = service.outcome(stream.request_id)
            assert outcome is stream.outcome
            rows = build_layout(service.config, service._tokenizer, request).length
            assert outcome == SpeechOutcome(stream.request_id, FinishReason.STOP, 7, rows, 9, b"")
            assert outcome.audio_seconds == 7 * 0.08
            assert engine.aborted == []

        run(test, *script)

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ("stop", FinishReason.STOP),
            ("length", FinishReason.LENGTH),
            ("abort", FinishReason.ABORT),
            (None, FinishReason.ABORT),
        ],
    )
    def test_finish_reasons(self, run, given, expected):
        async def test(service, engine, request):
            stream = await service.submit(request)
            await chunks_of(stream)
            assert stream.outcome.finish_reason is expected

        run(test, ("last", 1), ("finish", given))

    @pytest.mark.parametrize("wanted", [True, False])
    def test_codes(self, run, wanted):
        async def test(service, engine, request):
            stream = await service.submit(request, include_codes=wanted)
            chunks = await chunks_of(stream)
            assert [len(chunk.codes) for chunk in chunks] == [32 * n * wanted for n in (1, 2, 4)]
            assert stream.outcome.codes == b"".join(chunk.codes for chunk in chunks)

        run(test, *self.WHOLE)

    def test_what_the_engine_is_given(self, run):
        async def test(service, engine, request):
            stream = await service.submit(replace(request, max_frames=50))
            await chunks_of(stream)
            (started,) = engine.started
            layout = build_layout(service.config, service._tokenizer, request)
            assert started.id == stream.request_id
            assert started.prompt == {"prompt_token_ids": [2148] * layout.length}
            assert (started.params.max_tokens, started.params.stop_token_ids) == (50, [2150])
            admission, _, _ = unpack(started.params.extra_args)
            assert (admission.layout, admission.sampling, admission.max_frames) == (layout, request.sampling, 50)

        run(test, *self.WHOLE)

    def test_the_limit_is_what_fits(self, run):
        async def test(service, engine, request):
            stream = await service.submit(request)
            await chunks_of(stream)
            rows = stream.outcome.prompt_rows
            assert engine.started[0].params.max_tokens == MAX_ROWS - rows
            assert unpack(engine.started[0].params.extra_args)[0].max_frames == MAX_ROWS - rows

        run(test, *self.WHOLE)

    def test_many_at_once(self, run):
        async def test(service, engine, request):
            streams = [await service.submit(request) for _ in range(20)]
            assert len({stream.request_id for stream in streams}) == 20
            found = await asyncio.gather(*(chunks_of(stream) for stream in streams))
            assert all(chunks[-1].total_frames == 7 for chunks in found)

        run(test, *self.WHOLE)


class TestRefusals:
    @pytest.mark.parametrize("spare", [0, -5])
    def test_a_prompt_that_does_not_fit(self, run, parts, spare):
        config, tokenizer = parts

        async def test(service, engine, request):
            with pytest.raises(RequestError, match="positions of") as raised:
                await service.submit(request)
            assert raised.value.field == "input"
            assert service.hub.open_inboxes == 0

        request = build_request(config, Settings(), text="Good morning.", voice="ryan", seed=9)
        run(test, max_rows=build_layout(config, tokenizer, request).length + spare)

    def test_too_many_requests(self, run):
        async def test(service, engine, request):
            streams = [await service.submit(request) for _ in range(2)]
            with pytest.raises(CapacityError, match="max_queued_requests"):
                await service.submit(request)
            await streams[0].aclose()
            streams.append(await service.submit(request))
            for stream in streams:
                await stream.aclose()

        run(test, HANG, settings=Settings(max_queued_requests=2))


class TestBookkeeping:
    def outcome(self, number, codes=b""):
        return SpeechOutcome(f"speech-{number}", FinishReason.STOP, 1, 1, 0, codes)

    def test_old_outcomes_are_forgotten(self, run):
        async def test(service, engine, request):
            for number in range(1_500):
                service.remember(self.outcome(number))
            kept = (await service.stats())["outcomes_kept"]
            assert kept == 1_000
            assert service.outcome("speech-1499") is not None
            assert service.outcome("speech-499") is None

        run(test)

    def test_codes_kept_with_them_are_bounded(self, run):
        async def test(service, engine, request):
            megabyte = bytes(1 << 20)
            for number in range(40):
                service.remember(self.outcome(number, megabyte))
            assert sum(len(outcome.codes) for outcome in service._outcomes.values()) <= 16 << 20
            assert service.outcome("speech-39") is not None

        run(test)

    def test_health(self, run):
        async def test(service, engine, request):
            assert (await service.health())["workers"] == [{"method": "qwen3tts_facts"}]
            engine.dead = RuntimeError("engine core died")
            with pytest.raises(RuntimeError, match="died"):
                await service.health()

        run(test)

    def test_stats_count_running_requests(self, run):
        async def test(service, engine, request):
            stream = await service.submit(request)
            stats = await service.stats()
            assert (stats["submitted"], stats["running"], stats["inboxes_open"]) == (1, 1, 1)
            await stream.aclose()
            stats = await service.stats()
            assert (stats["submitted"], stats["running"], stats["inboxes_open"]) == (1, 0, 0)

        run(test, HANG)

    def test_trace(self, run):
        async def test(service, engine, request):
            hidden = await service.trace("speech-0")
            assert hidden.shape == (2, service.config.talker.hidden_size)
            assert hidden[1, 0] == 64.0

        run(test)

    @pytest.mark.parametrize("with_codes", [False, True])
    def test_reference_audio_goes_to_the_workers(self, run, with_codes):
        async def test(service, engine, request):
            voice = await service.encode_voice(np.zeros(100, np.float32), with_codes=with_codes)
            assert voice == engine.heard
            assert engine.recordings == [(400, with_codes)]

        run(test)

    def test_the_first_of_several_answers_counts(self, run):
        async def test(service, engine, request):
            engine.workers = 3
            for _ in range(2):
                assert await service.encode_voice(np.zeros(9, np.float32), with_codes=True) == engine.heard
            while service.hub.orphans < 3:
                await asyncio.sleep(0.001)

        run(test)

    @pytest.mark.parametrize("error", [RuntimeError("out of memory"), CapacityError("32 recordings wait")])
    def test_a_recording_that_workers_cannot_encode(self, run, error):
        async def test(service, engine, request):
            engine.heard = error
            with pytest.raises(type(error), match=str(error)):
                await service.encode_voice(np.zeros(9, np.float32), with_codes=True)

        run(test)

    def test_a_worker_that_dies_over_a_recording(self, run, monkeypatch):
        monkeypatch.setattr("qwen3tts_hw.vllm_plugin.service._ENGINE_CHECK_S", 0.01)

        async def test(service, engine, request):
            engine.heard = None
            waiting = asyncio.create_task(service.encode_voice(np.zeros(9, np.float32), with_codes=True))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            engine.errored = True
            with pytest.raises(GenerationError, match="the engine has stopped"):
                await waiting

        run(test)

    def test_recordings_under_way_are_bounded(self, run):
        async def test(service, engine, request):
            heard, engine.heard = engine.heard, None
            waiting = [
                asyncio.create_task(service.encode_voice(np.zeros(9, np.float32), with_codes=True)) for _ in range(9)
            ]
            await asyncio.sleep(0.05)
            assert len(engine.recordings) == 4
            engine.heard = heard
            for task in waiting[:4]:
                task.cancel()  # clients that leave make room
            assert await asyncio.gather(*waiting[4:]) == [heard] * 5

        run(test)

    def test_a_recording_that_workers_refuse(self, run):
        async def test(service, engine, request):
            engine.heard = RequestError("ref_audio", "too short")
            with pytest.raises(RequestError, match="too short") as caught:
                await service.encode_voice(np.zeros(100, np.float32), with_codes=True)
            assert caught.value.field == "ref_audio"

        run(test)
