"""No operator of ours is left to the host: what the model asks of the device, looked up in torch_npu's own table.

The operators are those that really reach the device's key of the dispatcher, in whole requests, in captures and in both
encoders of reference audio. The table is read in a process without the emulator's layer, so it is torch_npu's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

torch_npu = pytest.importorskip("torch_npu", reason="runs in the light bed: make test-ascend-light")

from qwen3tts_hw.checkpoint.reader import open_checkpoint  # noqa: E402
from qwen3tts_hw.engine.local import LocalEngine  # noqa: E402
from qwen3tts_hw.engine.voice_encoder import VoiceEncoder  # noqa: E402
from qwen3tts_hw.prompt.request import build_request  # noqa: E402
from qwen3tts_hw.settings import Settings  # noqa: E402
from qwen3tts_hw.types import ClonedVoice  # noqa: E402
from tests.ascend.light.device import backend, counting  # noqa: E402
from tests.parity.reference_audio import reference_audio  # noqa: E402

LOOK_UP = """
import json, sys
import torch, torch_npu
has = torch._C._dispatch_has_kernel_for_dispatch_key
composite = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
names = json.load(sys.stdin)
print(json.dumps({n: has(n, "PrivateUse1") or any(has(n, key) for key in composite) for n in names}))
"""


def has_device_kernel(names):
    """Which of the operators torch_npu computes on the device; the others would run on the host."""
    environment = {name: value for name, value in os.environ.items() if name != "ASCEND_EMULATOR_LIBRARIES"}
    finished = subprocess.run(
        [sys.executable, "-c", LOOK_UP],
        input=json.dumps(sorted(names)), capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    return json.loads(finished.stdout.splitlines()[-1])


def reached(counts):
    """Operators among what was counted."""
    return {
        name.split(" ", 1)[1] for name in counts if name.startswith(("eager ", "captured ", "viewed ")) and "::" in name
    }


@pytest.fixture(scope="module")
def base(tiny_checkpoint):
    return tiny_checkpoint("base", end_of_speech=False)


def encoded(directory, device):
    encoder = VoiceEncoder(open_checkpoint(directory).config, backend(device))
    encoder.load(open_checkpoint(directory))
    return encoder.encode(reference_audio(30_000).astype(np.float32), with_codes=True)


def test_both_encoders_of_reference_audio_equal_the_cpu(base):
    expected = encoded(base, "cpu")
    with counting() as counts:
        found = encoded(base, "npu")
    assert found.codes == expected.codes
    assert len(expected.codes) > 200
    embeddings = [np.frombuffer(voice.embedding, "<f4") for voice in (expected, found)]
    assert np.abs(embeddings[0] - embeddings[1]).max() <= 1e-5
    assert {"aten::stft", "aten::convolution", "aten::argmax.out"} <= reached(counts)


def test_every_operator_of_a_cloned_voices_speech_has_a_device_kernel(base):
    names = set()
    for graphs, attention, dtype in (("off", "sdpa", "float32"), ("on", "npu_fusion_v3", "bfloat16")):
        with counting() as counts:
            settings = Settings(graphs=graphs, attention_op=attention, weight_layout="packed")
            engine = LocalEngine.load(base, device="npu", dtype=dtype, settings=settings)
            voice = engine.encode_voice(reference_audio(30_000).astype(np.float32), with_codes=True)
            cloned = ClonedVoice(voice.embedding, "Good morning.", voice.codes)
            request = build_request(engine.config, settings, text="Hello there.", voice=cloned, max_new_tokens=10)
            assert len(engine.synthesize(request).codes) == 10
            assert sum(len(block) for block in engine.stream(request)) == 10 * 1_920
        names |= reached(counts)
        assert [name for name in counts if name.startswith("refused")] == []
    assert len(names) > 60, "a whole model was run"
    kernels = has_device_kernel(names)
    assert sorted(name for name, found in kernels.items() if not found) == []


def test_the_table_tells_what_falls_back_to_the_host():
    found = has_device_kernel(["aten::_weight_norm_interface", "aten::mm"])
    assert found == {"aten::_weight_norm_interface": False, "aten::mm": True}
