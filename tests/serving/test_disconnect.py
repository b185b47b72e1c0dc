"""A client that leaves, at any moment, ends its request: the engine's stream is closed, once."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import anyio
import httpx
import pytest
from starlette.requests import ClientDisconnect

from qwen3tts_hw.serving.streams import AudioFraming, SpeechRun, SpeechStreamResponse, while_connected
from qwen3tts_hw.types import SamplingSpec
from tests.serving.fake_service import FakeService, Script, saw_tooth
from tests.serving.speech_server import MODEL, SpeechServer, wait_until

BODY = {"model": MODEL, "input": "Hello.", "voice": "ryan"}


@pytest.mark.parametrize("extra", [{}, {"response_format": "pcm"}, {"stream_format": "sse"}], ids=["wav", "pcm", "sse"])
def test_leaving_a_stream_closes_it(server: SpeechServer, extra: dict[str, Any]) -> None:
    server.service.script = Script(chunks=(1,), endless=True, delay_s=0.001)
    with httpx.stream("POST", f"{server.url}/v1/audio/speech", json=BODY | extra) as response:
        assert response.status_code == 200
        parts = response.iter_raw()  # kept: httpx closes the connection when it is collected
        assert next(parts)
        assert server.service.streams[0].closes == 0
    server.wait_all_closed()
    server.assert_speaks()


@pytest.mark.parametrize("hang_at", [0, 2], ids=["before the first chunk", "later"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "unstreamed"])
def test_leaving_a_request_that_hangs_closes_it(server: SpeechServer, hang_at: int, stream: bool) -> None:
    server.service.script = Script(hang_at=hang_at)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/audio/speech", json=BODY | {"stream": stream}, timeout=0.2)
    server.wait_all_closed()
    assert len(server.service.streams) == 1
    server.assert_speaks()


def test_leaving_while_the_body_is_sent_starts_nothing(server: SpeechServer) -> None:
    def parts() -> Any:
        yield b'{"input": "'
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        httpx.post(f"{server.url}/v1/audio/speech", content=parts(), headers={"content-type": "application/json"})
    server.assert_speaks()
    assert len(server.service.streams) == 1


def test_a_client_that_does_not_read_holds_the_stream_back_and_may_leave(server: SpeechServer) -> None:
    server.service.script = Script(chunks=(64,), endless=True)
    with httpx.stream("POST", f"{server.url}/v1/audio/speech", json=BODY) as response:
        stream = server.service.streams[0]
        seen = [-1]

        def held_back() -> bool:  # nothing more is made for a while: the send waits for the client
            seen.append(stream.produced_frames)
            time.sleep(0.3)
            return seen[-1] == seen[-2]

        wait_until(held_back)
        assert stream.produced_frames > 0
        assert server.service.streams[0].closes == 0
        assert response.status_code == 200
    server.wait_all_closed()
    server.assert_speaks()


def test_many_clients_that_leave_at_different_moments_leak_nothing(server: SpeechServer) -> None:
    server.service.script = Script(chunks=(1,) * 12, delay_s=0.001)

    async def ask(client: httpx.AsyncClient, reads: int) -> int:
        async with client.stream("POST", "/v1/audio/speech", json=BODY | {"response_format": "pcm"}) as response:
            received = 0
            async for part in response.aiter_raw():
                received += len(part)
                reads -= 1
                if reads == 0:
                    return -1
            return received

    async def ask_all() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            return await asyncio.gather(*(ask(client, 1 + i % 3 if i % 3 else 10_000) for i in range(24)))

    received = asyncio.run(ask_all())
    assert received[::3] == [len(saw_tooth(0, 12))] * 8
    server.wait_all_closed()
    assert len(server.service.streams) == 24


async def _connected() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


async def _start_run(service: FakeService) -> SpeechRun:
    class _Request:
        sampling = SamplingSpec(seed=1)

    return SpeechRun(await service.submit(_Request()))  # type: ignore[arg-type]


def test_cancelling_the_response_closes_the_stream() -> None:
    service = FakeService(script=Script(chunks=(1,), endless=True))

    async def scenario() -> None:
        run = await _start_run(service)
        first = await run.next_chunk()
        assert first is not None
        sending = asyncio.Event()

        async def send(message: Any) -> None:
            sending.set()
            await asyncio.Event().wait()

        task = asyncio.ensure_future(SpeechStreamResponse(run, first, AudioFraming("wav"), {})({}, _connected, send))
        await sending.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert [stream.closes for stream in service.streams] == [1]


def test_a_send_that_fails_because_the_client_left_is_no_error() -> None:
    service = FakeService()

    async def scenario() -> None:
        run = await _start_run(service)
        first = await run.next_chunk()
        assert first is not None

        async def send(message: Any) -> None:
            raise BrokenPipeError

        await SpeechStreamResponse(run, first, AudioFraming("pcm"), {})({}, _connected, send)

    asyncio.run(scenario())
    assert [stream.closes for stream in service.streams] == [1]


def test_work_is_cancelled_when_the_client_leaves() -> None:
    cancelled = False

    async def work() -> None:
        nonlocal cancelled
        try:
            await asyncio.Event().wait()
        finally:
            cancelled = True

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnect):
        asyncio.run(while_connected(receive, work()))
    assert cancelled


def test_work_that_fails_raises_its_own_error() -> None:
    async def work() -> None:
        raise KeyError("reason")

    with pytest.raises(KeyError, match="reason"):
        asyncio.run(while_connected(_connected, work()))


def test_closing_twice_closes_once() -> None:
    service = FakeService()

    async def scenario() -> None:
        run = await _start_run(service)
        await run.close()
        await run.close()

    asyncio.run(scenario())
    assert [stream.closes for stream in service.streams] == [1]


def test_closing_is_finished_in_a_cancelled_scope() -> None:
    service = FakeService()

    async def scenario() -> None:
        run = await _start_run(service)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await run.close()

    asyncio.run(scenario())
    assert [stream.closes for stream in service.streams] == [1]
