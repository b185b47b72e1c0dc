"""Requests that arrive together begin one by one, so that the event loop can pass audio on in between."""

from __future__ import annotations

import asyncio
import itertools

from qwen3tts_hw.serving.routes import Turns


def test_between_two_beginnings_the_loop_does_other_work() -> None:
    events: list[str] = []

    async def request(turns: Turns) -> None:
        await turns.next()
        events.append("begin")

    async def audio() -> None:
        while events.count("begin") < 20:
            events.append("audio")
            await asyncio.sleep(0)

    async def everything() -> None:
        turns = Turns()
        await asyncio.gather(*(request(turns) for _ in range(20)), audio())

    asyncio.run(everything())
    beginnings = [index for index, event in enumerate(events) if event == "begin"]
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(beginnings))


def test_a_request_that_gives_up_does_not_hold_the_others_up() -> None:
    async def everything() -> None:
        turns = Turns()
        waiting = [asyncio.ensure_future(turns.next()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait_for(asyncio.gather(*waiting[1:]), 10)

    asyncio.run(everything())
