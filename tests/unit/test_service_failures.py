"""The speech service over a scripted engine: failures of the engine, slow clients, and streams closed half-way."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.errors import GenerationError
from qwen3tts_hw.prompt.tokenizer import TextTokenizer
from qwen3tts_hw.settings import Settings
from qwen3tts_hw.types import SAMPLES_PER_FRAME
from tests.unit.scripted_engine import DEADLINE_S, HANG, chunks_of, replace_vllm, runner


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


async def fails(stream, match, chunks=None):
    """Read until the error; return the chunks before it and the error."""
    chunks = [] if chunks is None else chunks
    with pytest.raises(GenerationError, match=match) as raised:
        async for chunk in stream:
            chunks.append(chunk)  # a comprehension would lose them
    return chunks, raised.value


async def until(condition):
    while not condition():  # the test's own deadline ends it
        await asyncio.sleep(0.002)


class TestEngineFailures:
    def test_while_streaming(self, run):
        cause = RuntimeError("engine core died")

        async def test(service, engine, request):
            stream = await service.submit(request)
            await asyncio.sleep(0.05)  # the failure has happened, audio is waiting
            _, error = await fails(stream, "the engine failed while request .* was running: engine core died")
            assert error.__cause__ is cause
            assert stream.outcome is None
            assert service.outcome(stream.request_id) is None

        run(test, ("audio", 1), ("audio", 2), ("fail", cause))

    def test_before_any_audio(self, run):
        async def test(service, engine, request):
            chunks, _ = await fails(await service.submit(request), "ValueError|no such")
            assert chunks == []

        run(test, ("fail", ValueError("no such parameter")))

    def test_after_the_last_audio(self, run):
        async def test(service, engine, request):
            stream = await service.submit(request)
            _, error = await fails(stream, "the engine failed")
            assert isinstance(error.__cause__, RuntimeError)
            assert stream.outcome is None

        run(test, ("audio", 1), ("last", 1), ("fail", RuntimeError("died")))

    def test_of_a_stream_that_nobody_reads(self, run):
        async def test(service, engine, request):
            stream = await service.submit(request)
            await asyncio.sleep(0.02)
            await stream.aclose()

        run(test, ("fail", RuntimeError("died")))

    def test_the_tail_never_comes(self, run):
        async def test(service, engine, request):
            stream = await service.submit(request)
            chunks, _ = await fails(stream, "its last audio did not arrive")
            assert [chunk.frames for chunk in chunks] == [1, 2]
            assert stream.outcome is None

        run(test, ("audio", 1), ("audio", 2), ("finish", "stop"), tail_timeout_s=0.1)

    @pytest.mark.parametrize("script", [(("audio", 1), HANG), (("last", 1), HANG)], ids=["midway", "before the end"])
    def test_a_stop_that_requests_are_not_told_of(self, run, script):
        async def test(service, engine, request):
            stream = await service.submit(request)
            reader = asyncio.create_task(fails(stream, "the engine has stopped"))
            await asyncio.sleep(0.05)
            engine.errored = True
            await reader
            assert stream.outcome is None

        run(test, *script)


class TestSlowClients:
    def test_too_much_waiting_audio_ends_the_request(self, run):
        limit = 5 * SAMPLES_PER_FRAME * 2

        async def test(service, engine, request):
            stream, other = await service.submit(request), await service.submit(request)
            read = []
            reader = asyncio.create_task(fails(other, "closed|cancelled", read))
            await until(lambda: stream._inbox.failure)
            chunks, _ = await fails(stream, "reads too slowly: .*max_queue_bytes")
            assert chunks == []
            assert engine.aborted == [stream.request_id]
            await until(lambda: len(read) == 20)  # whoever reads in time is not concerned
            await other.aclose()
            await reader

        run(test, *[("audio", 1)] * 20, HANG, settings=Settings(max_queue_bytes=limit))

    def test_lost_audio_ends_the_request(self, run):
        async def test(service, engine, request):
            stream = await service.submit(request)
            iterator = aiter(stream)
            assert (await anext(iterator)).frames == 1
            stream._inbox.expected += 1  # as if a packet between had been dropped
            engine.send(stream.request_id, 1)
            with pytest.raises(GenerationError, match="audio was lost on its way"):
                await anext(iterator)
            assert engine.aborted == [stream.request_id]

        run(test, ("audio", 1), HANG)


class TestClosing:
    def test_aborts_the_request(self, run):
        async def test(service, engine, request):
            stream = await service.submit(request)
            iterator = aiter(stream)
            await anext(iterator)
            await stream.aclose()
            await stream.aclose()
            assert engine.aborted == [stream.request_id]
            assert stream.outcome is None

        run(test, ("audio", 1), HANG)

    def test_before_the_engine_was_reached(self, run):
        async def test(service, engine, request):
            await (await service.submit(request)).aclose()
            await asyncio.sleep(0.02)
            assert engine.started == []

        run(test, HANG)

    def test_while_another_task_reads(self, run):
        async def test(service, engine, request):
            stream = await service.submit(request)
            reader = asyncio.create_task(fails(stream, "closed|cancelled"))
            await asyncio.sleep(0.05)
            await stream.aclose()
            assert len((await reader)[0]) == 1

        run(test, ("audio", 1), HANG)

    def test_while_another_task_waits_for_the_tail(self, run):
        async def test(service, engine, request):
            stream = await service.submit(request)
            reader = asyncio.create_task(fails(stream, "closed"))
            await asyncio.sleep(0.05)
            await stream.aclose()
            await reader  # at once, not after the time allowed for the tail

        run(test, ("audio", 1), ("finish", "stop"), tail_timeout_s=100 * DEADLINE_S)

    def test_a_cancelled_reader_aborts_the_request(self, run):
        async def test(service, engine, request):
            stream = await service.submit(request)
            reader = asyncio.create_task(chunks_of(stream))
            await asyncio.sleep(0.05)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
            assert reader.cancelled()
            await stream.aclose()
            assert engine.aborted == [stream.request_id]

        run(test, ("audio", 1), HANG)

    def test_after_the_end_changes_nothing(self, run):
        async def test(service, engine, request):
            stream = await service.submit(request)
            await chunks_of(stream)
            await stream.aclose()
            assert engine.aborted == []
            assert stream.outcome is not None

        run(test, ("last", 1), ("finish", "length"))

    def test_shutting_down_aborts_everything(self, run):
        async def test(service, engine, request):
            streams = [await service.submit(request) for _ in range(3)]
            await asyncio.sleep(0.02)
            await service.shut_down()
            assert sorted(engine.aborted) == sorted(stream.request_id for stream in streams)
            assert service.hub._socket.closed

        run(test, HANG)
