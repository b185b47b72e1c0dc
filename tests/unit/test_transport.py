"""Audio out of band, over real sockets on this machine: order, loss, overflow, strangers, and a clean end."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import zmq

from qwen3tts_hw.engine.audio import Packet
from qwen3tts_hw.vllm_plugin.payload import KEY_BYTES, Ticket
from qwen3tts_hw.vllm_plugin.transport import AudioHub, AudioOutbox, Inbox

DEADLINE_S = 20.0
LIMIT = 1 << 20
TICKET = Ticket("ipc://@nowhere", b"k" * KEY_BYTES)

both_transports = pytest.mark.parametrize("host", ["", "127.0.0.1"], ids=["ipc", "tcp"])


def packet(number, *, name="r", last=False, size=8):
    return Packet(name, 1, number, last, bytes([number % 256]) * size, b"codes" if number % 2 else b"")


def contents(item):
    return (item.frames, item.frames_before, item.last, item.pcm, item.codes)


def run(test):
    """Run a coroutine function with a hub and an outbox, which are closed afterwards."""

    async def body(host="", limit_bytes=LIMIT):
        hub, outbox = AudioHub(host=host, limit_bytes=limit_bytes), AudioOutbox()
        hub.start()
        try:
            await asyncio.wait_for(test(hub, outbox), DEADLINE_S)
        finally:
            outbox.close()
            await hub.shut_down()

    return lambda **options: asyncio.run(body(**options))


async def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


class TestDelivery:
    @both_transports
    def test_packets_arrive_whole_and_in_order(self, host):
        sent = {name: [packet(i, name=name, last=i == 40) for i in range(41)] for name in ("a", "b", "c")}

        @run
        async def deliver(hub, outbox):
            assert hub.address.startswith("tcp://127.0.0.1:" if host else "ipc://@")
            inboxes = {name: hub.open() for name in sent}
            for name, inbox in inboxes.items():
                outbox.open(name, inbox.ticket)
            for group in zip(*sent.values(), strict=True):
                for item in group:
                    outbox.send(item)
            for name, inbox in inboxes.items():
                got = [contents(await inbox.get()) for _ in sent[name]]
                assert got == [contents(item) for item in sent[name]]
                assert inbox.held_bytes == 0
            assert (outbox.sent, outbox.dropped, outbox.open_tickets, hub.orphans) == (123, 0, 0, 0)

        deliver(host=host)

    def test_two_hubs_share_an_outbox(self):
        async def body():
            hubs, outbox = [AudioHub(limit_bytes=LIMIT), AudioHub(host="127.0.0.1", limit_bytes=LIMIT)], AudioOutbox()
            inboxes = []
            for number, hub in enumerate(hubs):
                hub.start()
                inboxes.append(hub.open())
                outbox.open(str(number), inboxes[-1].ticket)
            for number in (1, 0):
                outbox.send(packet(number, name=str(number), last=True))
            for number, inbox in enumerate(inboxes):
                assert (await inbox.get()).frames_before == number
            outbox.close()
            for hub in hubs:
                await hub.shut_down()

        asyncio.run(asyncio.wait_for(body(), DEADLINE_S))

    def test_sending_from_another_thread(self):
        @run
        async def deliver(hub, outbox):
            inbox = hub.open()
            outbox.open("r", inbox.ticket)
            thread = threading.Thread(target=lambda: [outbox.send(packet(i, last=i == 9)) for i in range(10)])
            thread.start()
            assert [(await inbox.get()).frames_before for _ in range(10)] == list(range(10))
            thread.join()

        deliver()

    def test_a_hub_may_be_started_again(self):
        @run
        async def deliver(hub, outbox):
            hub.start()
            hub.start()
            inbox = hub.open()
            outbox.open("r", inbox.ticket)
            for number in range(4):
                outbox.send(packet(number))
            assert [(await inbox.get()).frames_before for _ in range(4)] == [0, 1, 2, 3]

        deliver()


class TestQuestions:
    def test_each_gets_its_first_answer(self):
        @run
        async def deliver(hub, outbox):
            asked = [hub.ask() for _ in range(3)]
            for number in (2, 0, 1):
                outbox.answer(asked[number].ticket, b"%d" % number)
            assert [await question.answer for question in asked] == [b"0", b"1", b"2"]
            outbox.answer(asked[0].ticket, b"again")
            await until(lambda: hub.orphans == 1)

        deliver()

    def test_nobody_waits_for_a_forgotten_one(self):
        @run
        async def deliver(hub, outbox):
            forgotten, kept, inbox = hub.ask(), hub.ask(), hub.open()
            hub.forget(forgotten)
            forgotten.answer.cancel()
            kept.answer.cancel()
            for question in (forgotten, kept):
                outbox.answer(question.ticket, b"late")
            outbox.answer(Ticket("http://127.0.0.1:1", b"k" * KEY_BYTES), b"nowhere")
            outbox.open("r", inbox.ticket)
            outbox.send(packet(0))
            assert (await inbox.get()).frames_before == 0
            assert hub.orphans == 1

        deliver()


class TestStrangers:
    def test_packets_nobody_waits_for(self):
        @run
        async def deliver(hub, outbox):
            gone, kept = hub.open(), hub.open()
            outbox.open("gone", gone.ticket)
            outbox.open("kept", kept.ticket)
            outbox.open("foreign", Ticket(hub.address, b"?" * KEY_BYTES))
            hub.close(gone)
            assert hub.open_inboxes == 1
            for name in ("gone", "foreign", "kept"):
                outbox.send(packet(0, name=name))
            assert (await kept.get()).frames_before == 0
            assert hub.orphans == 2

        deliver()

    @pytest.mark.parametrize(
        "parts", [lambda key: [b""], lambda key: [key], lambda key: [key, b"short", b"", b""], lambda key: [key] * 9]
    )
    def test_messages_of_another_form(self, parts):
        @run
        async def deliver(hub, outbox):
            inbox = hub.open()
            with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
                stranger.connect(hub.address)
                stranger.send_multipart(parts(inbox.ticket.key))
                await until(lambda: hub.orphans == 1)
            outbox.open("r", inbox.ticket)
            outbox.send(packet(0))
            assert (await inbox.get()).frames_before == 0

        deliver()

    @pytest.mark.parametrize(
        ("address", "opened"),
        [("http://127.0.0.1:1", 0), ("inproc://x", 0), ("", 0), ("tcp://no port", 1), ("ipc://" + "x" * 500, 1)],
    )
    def test_bad_addresses(self, address, opened, caplog):
        @run
        async def deliver(hub, outbox):
            outbox.open("bad", Ticket(address, b"k" * KEY_BYTES))
            assert outbox.open_tickets == opened
            outbox.send(packet(0, name="bad"))
            outbox.send(packet(1, name="bad", last=True))
            assert (outbox.sent, outbox.dropped, outbox.open_tickets) == (0, 2, 0)
            inbox = hub.open()
            outbox.open("good", inbox.ticket)
            outbox.send(packet(0, name="good"))
            assert (await inbox.get()).frames_before == 0

        deliver()
        assert "request bad" in caplog.text

    def test_packets_of_unknown_requests_are_counted(self):
        @run
        async def deliver(hub, outbox):
            outbox.send(packet(0, name="never opened"))
            assert (outbox.sent, outbox.dropped) == (0, 1)

        deliver()


class TestInbox:
    def get(self, inbox):
        return asyncio.run(asyncio.wait_for(inbox.get(), DEADLINE_S))

    def test_too_many_bytes(self):
        inbox = Inbox(TICKET, limit_bytes=100)
        for number in range(4):
            inbox.put(packet(2 * number, size=25), number)
        assert not inbox.failure
        assert inbox.held_bytes == 100
        inbox.put(packet(8, size=1), 4)
        assert "max_queue_bytes" in inbox.failure
        assert self.get(inbox) is None

    def test_reading_makes_room(self):
        inbox = Inbox(TICKET, limit_bytes=50)
        for number in range(20):
            inbox.put(packet(2 * number, size=40), number)
            assert self.get(inbox).frames_before == 2 * number
        assert not inbox.failure

    def test_codes_count(self):
        inbox = Inbox(TICKET, limit_bytes=10)
        inbox.put(packet(1, size=6), 0)  # with 5 bytes of codes
        assert inbox.failure

    @pytest.mark.parametrize("sequence", [0, 2, 7])
    def test_a_lost_or_repeated_packet(self, sequence):
        inbox = Inbox(TICKET, LIMIT)
        inbox.put(packet(0), 0)
        inbox.put(packet(1), sequence)
        assert f"packet {sequence} came where 1 was expected" in inbox.failure
        assert self.get(inbox) is None
        assert self.get(inbox) is None

    def test_nothing_is_kept_after_a_failure(self):
        """Else a client that does not read would fill the memory although its request has failed."""
        inbox = Inbox(TICKET, limit_bytes=100)
        for number in range(1_000):
            inbox.put(packet(number, size=60), number)
        assert inbox.held_bytes == 0
        assert inbox.queue.qsize() <= 1

    def test_a_waiting_reader_is_told(self):
        async def body():
            inbox = Inbox(TICKET, LIMIT)
            reader = asyncio.create_task(inbox.get())
            await asyncio.sleep(0)
            inbox.put(packet(0), 3)
            return await asyncio.wait_for(reader, DEADLINE_S)

        assert asyncio.run(body()) is None

    def test_closing_tells_a_waiting_reader(self):
        @run
        async def deliver(hub, outbox):
            inbox = hub.open()
            reader = asyncio.create_task(inbox.get())
            await asyncio.sleep(0)
            hub.close(inbox)
            hub.close(inbox)
            assert await reader is None

        deliver()

    def test_keys_differ(self):
        @run
        async def deliver(hub, outbox):
            keys = {hub.open().ticket.key for _ in range(50)}
            assert len(keys) == 50
            assert {len(key) for key in keys} == {KEY_BYTES}

        deliver()


class TestEnd:
    @both_transports
    def test_nothing_is_left(self, host):
        threads = set(threading.enumerate())
        kept = []

        @run
        async def deliver(hub, outbox):
            kept.extend((hub, outbox))
            inbox = hub.open()
            outbox.open("r", inbox.ticket)
            outbox.open("nobody reads this", Ticket(f"ipc://@{'0' * 20}", b"k" * KEY_BYTES))
            outbox.send(packet(0))
            outbox.send(packet(0, name="nobody reads this"))
            assert (await inbox.get()).frames_before == 0

        start = time.monotonic()
        deliver(host=host)
        assert time.monotonic() - start < DEADLINE_S
        hub, outbox = kept
        assert hub._socket.closed
        assert hub._context.closed
        assert hub._task.done()
        assert outbox._context.closed
        assert outbox._sockets == {}
        assert set(threading.enumerate()) <= threads

    def test_what_was_sent_before_closing_still_arrives(self):
        @run
        async def deliver(hub, outbox):
            inbox, sender = hub.open(), AudioOutbox()
            sender.open("r", inbox.ticket)
            sender.send(packet(0, last=True))
            await asyncio.to_thread(sender.close)
            assert (await inbox.get()).last

        deliver()
