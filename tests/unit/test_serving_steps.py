"""Requests through the engine as a server runs it, with all parts real: the same audio on every device, and no waiting.

On a device that can tell, whatever makes the host wait for it is an error while requests come, run and go.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from qwen3tts_hw import codec_kernels, graph_wrappers
from qwen3tts_hw.backends import cuda
from qwen3tts_hw.engine.audio import AudioPump
from qwen3tts_hw.engine.codec_steps import CodecSteps
from qwen3tts_hw.engine.frame_step import frame_buckets, frame_step_inputs
from qwen3tts_hw.engine.speech_engine import SpeechEngine
from qwen3tts_hw.engine.state import Admission
from qwen3tts_hw.prompt.layout import PromptLayout
from qwen3tts_hw.types import SamplingSpec
from tests.ascend.light.device import ROWS, Parts

PROMPT, FRAMES, DEADLINE_S = 5, 11, 60.0
LAYOUT = PromptLayout((1, 2, 3, 4, 5), (-1, -1, 2155, 2148, 2149), (6,), 7)
NAMES = ("a", "b", "c")
# The codec's fused form at its default precision differs by up to 6e-4 of full scale.
DEVICES = [
    pytest.param("cpu", 0, id="cpu"),
    pytest.param("cuda", 40, id="cuda", marks=pytest.mark.skipif(cuda.missing() is not None, reason="no CUDA device")),
]


@contextmanager
def never_waiting(device: str) -> Iterator[None]:
    if device != "cuda":
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def speak(directory: Path, device: str) -> dict[str, np.ndarray]:
    """Samples of three requests that come one after the other, run together and go."""
    parts = Parts(directory, device, "sdpa", torch.float32)
    backend, packets = parts.backend, []
    parts.predictor.adopt("auto", backend)
    form = codec_kernels.create("auto", backend, precision="medium")
    if form is not None:
        parts.codec.use(form)
    wrap = graph_wrappers.create("auto", backend)
    inputs = frame_step_inputs(parts.config, parts.table, hidden_dtype=torch.float32, logits_dtype=torch.float32)
    frame = wrap(parts.step, buckets=frame_buckets(ROWS), inputs=inputs, name="frame step")
    steps = CodecSteps(parts.codec, ROWS + 1, wrap)
    pump = AudioPump(parts.table, steps, backend, packets.append, first_frames=1, steady_frames=4)
    engine = SpeechEngine(parts.table, frame, pump, backend)
    frame.capture()
    pump.capture()
    rng = torch.Generator().manual_seed(7)
    width, vocabulary = parts.config.talker.hidden_size, parts.config.talker_vocab_size
    hidden = torch.randn(len(NAMES), FRAMES, width, generator=rng).to(backend.device)
    logits = 3 * torch.randn(len(NAMES), FRAMES, vocabulary, generator=rng).to(backend.device)
    picks = [list(range(count)) for count in range(len(NAMES) + 1)]
    rows = [torch.tensor(pick, device=backend.device) for pick in picks]
    backend.synchronize()
    with never_waiting(device):
        made: dict[str, int] = {}
        for _ in range(FRAMES):
            if len(made) < len(NAMES):  # one more in every step
                name = NAMES[len(made)]
                engine.admit(name, Admission(LAYOUT, SamplingSpec(seed=len(made)), 2 * FRAMES))
                made[name] = 0
            names = list(made)
            index = rows[len(names)]
            positions = np.array([PROMPT - 1 + made[name] for name in names])
            staged = engine.stage(engine.slots_of(names), positions)
            place = max(made.values())
            engine.step(hidden[index, place], logits[index, place], staged)
            made = {name: count + 1 for name, count in made.items()}
        for name in NAMES:
            engine.finish(name)
    pump.shut_down(DEADLINE_S)
    samples = dict.fromkeys(NAMES, b"")
    for packet in packets:
        samples[packet.request_id] += packet.pcm
    return {name: np.frombuffer(pcm, np.int16) for name, pcm in samples.items()}


@pytest.fixture(scope="module")
def expected(tiny_checkpoint: Callable[..., Path]) -> dict[str, np.ndarray]:
    return speak(tiny_checkpoint(), "cpu")


@pytest.mark.parametrize(("device", "bound"), DEVICES)
def test_requests_come_run_and_go_without_waiting(
    tiny_checkpoint: Callable[..., Path], expected: dict[str, np.ndarray], device: str, bound: int
) -> None:
    found = speak(tiny_checkpoint(), device)
    for index, name in enumerate(NAMES):
        assert len(found[name]) == (FRAMES - index) * 1920
        assert found[name].std() > 100, "silence would prove nothing"
        assert np.abs(found[name].astype(int) - expected[name].astype(int)).max() <= bound
