"""Audio out of band: from the worker straight to the API-server process that owns the request, over ZMQ.

:class:`AudioOutbox` (worker, PUSH) sends; :class:`AudioHub` (API server, PULL) sorts by key into one bounded queue per
request. The address and a random key travel with the request, so any number of engines and API servers work together. A
client that reads too slowly loses its request, never the server's memory.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import uuid
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from qwen3tts_hw.engine.audio import Packet
from qwen3tts_hw.vllm_plugin.payload import KEY_BYTES, Ticket

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<IIIB")  # sequence number, frames, frames before, last
_SEND_QUEUE = 100_000  # messages per address; reached only if a process stops reading altogether
_SCHEMES = ("ipc://", "tcp://")


class AudioOutbox:
    """Sends packets to the hubs their requests came from; ``send`` is called by the audio thread alone."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._tickets: dict[str, tuple[Ticket, int]] = {}
        self.sent = 0
        self.dropped = 0

    @property
    def open_tickets(self) -> int:
        """Number of requests whose last packet has not been sent."""
        return len(self._tickets)

    def open(self, request_id: str, ticket: Ticket) -> None:
        """Remember where the audio of a request goes."""
        if not ticket.address.startswith(_SCHEMES):
            logger.error("request %s names a bad audio address; its audio is dropped", request_id)
            return
        self._tickets[request_id] = (ticket, 0)

    def send(self, packet: Packet) -> None:
        """Send one packet without blocking; a packet nobody can take is counted and dropped."""
        known = self._tickets.get(packet.request_id)
        if known is None:
            self.dropped += 1
            return
        ticket, sequence = known
        header = _HEADER.pack(sequence, packet.frames, packet.frames_before, packet.last)
        try:
            self._socket(ticket.address).send_multipart([ticket.key, header, packet.pcm, packet.codes], zmq.NOBLOCK)
            self.sent += 1
        except zmq.ZMQError as error:
            self.dropped += 1
            logger.warning("audio of request %s dropped: %s", packet.request_id, error)
        if packet.last:
            del self._tickets[packet.request_id]
        else:
            self._tickets[packet.request_id] = (ticket, sequence + 1)

    def answer(self, ticket: Ticket, answer: bytes) -> None:
        """Send the answer that a ticket of :meth:`AudioHub.ask` waits for."""
        if not ticket.address.startswith(_SCHEMES):
            logger.error("an answer has a bad address and is dropped")
            return
        try:
            self._socket(ticket.address).send_multipart([ticket.key, answer], zmq.NOBLOCK)
            self.sent += 1
        except zmq.ZMQError as error:
            self.dropped += 1
            logger.warning("an answer was dropped: %s", error)

    def close(self) -> None:
        """Close all sockets; unsent messages are given a moment."""
        for socket in self._sockets.values():
            socket.close(linger=200)
        self._sockets.clear()
        self._context.term()

    def _socket(self, address: str) -> zmq.Socket[bytes]:
        socket = self._sockets.get(address)
        if socket is None:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
            socket.setsockopt(zmq.LINGER, 0)
            try:
                socket.connect(address)
            except zmq.ZMQError:
                socket.close()  # an open socket would make close() wait forever
                raise
            self._sockets[address] = socket
        return socket


@dataclass(slots=True)
class Inbox:
    """Packets of one request that have arrived and not been read."""

    ticket: Ticket
    limit_bytes: int
    queue: asyncio.Queue[Packet | None] = field(default_factory=asyncio.Queue)
    held_bytes: int = 0
    expected: int = 0  # next sequence number
    failure: str = ""  # why no more can be read

    def put(self, packet: Packet, sequence: int) -> None:
        """Add a packet; fail if it is too much, or if one before it was lost. Nothing is kept after a failure."""
        size = len(packet.pcm) + len(packet.codes)
        if self.failure:
            return
        if sequence != self.expected:
            self.fail(f"audio was lost on its way: packet {sequence} came where {self.expected} was expected")
        elif self.held_bytes + size > self.limit_bytes:
            self.fail(f"the client reads too slowly: {self.limit_bytes} bytes (setting max_queue_bytes) are waiting")
        else:
            self.expected += 1
            self.held_bytes += size
            self.queue.put_nowait(packet)

    def fail(self, reason: str) -> None:
        """Drop what has not been read, and let readers have the reason instead."""
        if not self.failure:
            self.failure = reason
            self.held_bytes = 0
            while not self.queue.empty():
                self.queue.get_nowait()
            self.queue.put_nowait(None)  # wakes a reader that waits

    async def get(self) -> Packet | None:
        """Wait for the next packet; None once the inbox has failed."""
        packet = None if self.failure else await self.queue.get()
        if packet is None or self.failure:
            return None
        self.held_bytes -= len(packet.pcm) + len(packet.codes)
        return packet


@dataclass(frozen=True, slots=True)
class Question:
    """Something asked of workers: the first answer counts."""

    ticket: Ticket
    answer: asyncio.Future[bytes]


class AudioHub:
    """Receives audio, and answers to questions, for all requests of one API-server process. Lives on one event loop.

    ``host`` empty: a Linux abstract ipc address, which leaves no file behind; else ``tcp://host:<free port>`` for
    workers on other machines.
    """

    def __init__(self, *, host: str = "", limit_bytes: int) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        if host:
            port = self._socket.bind_to_random_port(f"tcp://{host}")
            self.address = f"tcp://{host}:{port}"
        else:
            self.address = f"ipc://@qwen3tts-{uuid.uuid4().hex}"
            self._socket.bind(self.address)
        self._limit_bytes = limit_bytes
        self._inboxes: dict[bytes, Inbox] = {}
        self._questions: dict[bytes, Question] = {}
        self._task: asyncio.Task[None] | None = None
        self.orphans = 0  # messages nobody waits for any more

    @property
    def open_inboxes(self) -> int:
        """Number of requests waiting for audio."""
        return len(self._inboxes)

    def start(self) -> None:
        """Begin to receive on the running event loop; may be called again."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._receive(), name="qwen3tts-audio-hub")

    def open(self) -> Inbox:
        """A new inbox with a key of its own."""
        key = uuid.uuid4().bytes
        assert len(key) == KEY_BYTES
        inbox = self._inboxes[key] = Inbox(Ticket(self.address, key), self._limit_bytes)
        return inbox

    def close(self, inbox: Inbox) -> None:
        """Forget an inbox; what still arrives for it is dropped, and whoever waits for it is told."""
        self._inboxes.pop(inbox.ticket.key, None)
        inbox.fail("it was closed")

    def ask(self) -> Question:
        """A question with a key of its own, for a worker to answer; call on the running event loop."""
        key = uuid.uuid4().bytes
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        question = self._questions[key] = Question(Ticket(self.address, key), answer)
        return question

    def forget(self, question: Question) -> None:
        """Wait no longer for an answer."""
        self._questions.pop(question.ticket.key, None)

    async def shut_down(self) -> None:
        """Stop receiving and release the socket."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close(linger=0)
        self._context.term()

    async def _receive(self) -> None:
        while True:
            parts = await self._socket.recv_multipart()
            if len(parts) == 2 and parts[0] in self._questions:
                answer = self._questions.pop(parts[0]).answer
                if not answer.done():
                    answer.set_result(parts[1])
                continue
            inbox = self._inboxes.get(parts[0])
            if inbox is None or len(parts) != 4 or len(parts[1]) != _HEADER.size:
                self.orphans += 1
                continue
            sequence, frames, before, last = _HEADER.unpack(parts[1])
            inbox.put(Packet("", frames, before, bool(last), parts[2], parts[3]), sequence)
