"""The audio pump beside an emulated device: whole audio from several slots, the codec there or on a device of its own.

Some streams continue a reference that the codec has heard before, and begin with a copy of its state.

With deferred execution (ASCEND_EMULATOR_DEFER set), what a stream reads too late or too early shows as wrong audio.
"""

from __future__ import annotations

import pytest

torch_npu = pytest.importorskip("torch_npu", reason="runs in the light bed: make test-ascend-light")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from qwen3tts_hw import graph_wrappers  # noqa: E402
from qwen3tts_hw.codec.pcm import to_pcm16  # noqa: E402
from qwen3tts_hw.engine.audio import AudioPump  # noqa: E402
from qwen3tts_hw.engine.codec_steps import CodecSteps  # noqa: E402
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS, SAMPLES_PER_FRAME  # noqa: E402
from tests.ascend.light.device import ROWS, Parts, counting  # noqa: E402

PROMPT, FRAMES, STREAMS = 7, 13, 3
WAIT_S = 60.0


@pytest.fixture(scope="module")
def parts(tiny_checkpoint):
    directory = tiny_checkpoint(size="tiny-heads128")
    return {name: Parts(directory, name, "sdpa", torch.float32) for name in ("cpu", "npu")}


@pytest.fixture
def run(parts):
    """Play frames of several slots at once through a pump; returns samples by request and what the steps waited for."""
    pumps = []

    def run(codec, mode, rounds=1, references=None, snapshots=0):
        table, place = parts["npu"].table, parts[codec]
        packets = []
        steps = CodecSteps(
            place.codec, ROWS + 1, graph_wrappers.create(mode, place.backend), most_rows=STREAMS, snapshots=snapshots
        )
        pump = AudioPump(table, steps, place.backend, packets.append, first_frames=1, steady_frames=4)
        pumps.append(pump)
        pump.capture()
        for turn in range(rounds):
            with counting() as counts:
                play(pump, table, turn, references or [b""] * STREAMS)
        pump.shut_down(WAIT_S)
        samples = {}
        for packet in packets:
            samples[packet.request_id] = samples.get(packet.request_id, b"") + packet.pcm
        return {name: np.frombuffer(pcm, np.int16) for name, pcm in samples.items()}, counts

    yield run
    for pump in pumps:
        pump.shut_down(WAIT_S)


def play(pump, table, turn, references):
    """Open all slots at once, make all frames, close all."""
    slots = np.arange(STREAMS)
    for slot in slots:
        table.frontier[int(slot)] = table.prompt_rows[int(slot)] = PROMPT
        pump.open(f"{turn}-{slot}", int(slot), PROMPT, reference=references[slot])
    for frame in range(FRAMES):
        table.frontier[:STREAMS] += 1
        pump.advance(slots, np.full(STREAMS, PROMPT + frame - 1))
    for slot in slots:
        pump.close(int(slot))


@pytest.fixture
def codes(parts):
    """Codes ``[STREAMS, 16, FRAMES]`` that are in the device's slot table."""
    made = torch.randint(0, CODEBOOK_SIZE, (STREAMS, FRAMES, NUM_CODEBOOKS), generator=torch.Generator().manual_seed(1))
    parts["npu"].table.codes[:STREAMS, PROMPT : PROMPT + FRAMES] = made.to(torch.int16).npu()
    return made.transpose(1, 2)


@pytest.mark.parametrize("mode", ["off", "on"])
def test_slots_opened_at_once_all_start_anew(parts, codes, run, mode):
    """Twice, because only a stream that follows another in its slot needs the reset."""
    expected = to_pcm16(parts["cpu"].codec.decode(codes)).numpy()
    found, counts = run("npu", mode, rounds=2)
    assert len(found) == 2 * STREAMS
    for name, samples in found.items():
        assert np.abs(samples.astype(int) - expected[int(name[-1])]).max() <= 1, name
    assert counts["device_syncs"] == counts["stream_syncs"] == 0


def test_the_codec_may_have_a_device_of_its_own(parts, codes, run):
    expected = to_pcm16(parts["cpu"].codec.decode(codes)).numpy()
    found, _ = run("cpu", "off")
    for name, samples in found.items():
        assert np.abs(samples.astype(int) - expected[int(name[-1])]).max() <= 1, name


@pytest.fixture
def references(parts):
    """Codes ``[STREAMS, 16, PROMPT]`` that end the slots' prompts: two streams of one voice, one of another."""
    made = torch.randint(0, CODEBOOK_SIZE, (2, PROMPT, NUM_CODEBOOKS), generator=torch.Generator().manual_seed(2))
    heard = made[[0, 1, 0]]
    parts["npu"].table.codes[:STREAMS, :PROMPT] = heard.to(torch.int16).npu()
    return heard.transpose(1, 2)


@pytest.mark.parametrize(("codec", "mode"), [("npu", "off"), ("npu", "on"), ("cpu", "off")])
@pytest.mark.parametrize("snapshots", [0, 1, 2])
def test_references_are_heard_first(parts, codes, references, run, codec, mode, snapshots):
    """With room for one voice only, a state is replaced while a stream is still to be decoded from it."""
    whole = to_pcm16(parts["cpu"].codec.decode(torch.cat((references, codes), 2))).numpy()
    expected = whole[:, PROMPT * SAMPLES_PER_FRAME :]
    sent = [one.T.to(torch.int16).contiguous().numpy().tobytes() for one in references]
    found, counts = run(codec, mode, rounds=3, references=sent, snapshots=snapshots)
    assert len(found) == 3 * STREAMS
    for name, samples in found.items():
        assert np.abs(samples.astype(int) - expected[int(name[-1])]).max() <= 1, name
    if codec == "npu":
        assert counts["device_syncs"] == counts["stream_syncs"] == 0
