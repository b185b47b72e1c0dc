"""Code predictor, frame step and codec on the emulated device, eager and captured, equal to the CPU in float32.

The state of every slot, the codes and the audio are compared, for one row, three rows in a bucket of four, and eight.
"""

from __future__ import annotations

import pytest

torch_npu = pytest.importorskip("torch_npu", reason="runs in the light bed: make test-ascend-light")

import torch  # noqa: E402

from qwen3tts_hw import graph_wrappers  # noqa: E402
from qwen3tts_hw.engine.frame_step import frame_step_inputs  # noqa: E402
from qwen3tts_hw.engine.state import Admission  # noqa: E402
from qwen3tts_hw.errors import UnsupportedError  # noqa: E402
from qwen3tts_hw.graph_wrappers import InputSpec  # noqa: E402
from qwen3tts_hw.model.sampling import SamplingRows, frame_key, mix  # noqa: E402
from qwen3tts_hw.model.sampling_check import check_hash  # noqa: E402
from qwen3tts_hw.prompt.layout import PromptLayout  # noqa: E402
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS, SamplingSpec  # noqa: E402
from tests.ascend.light.device import ROWS, Parts, counting, operators  # noqa: E402

NPU = torch.device("npu", 0)
BUCKETS = (1, 2, 4, 8)
FRAMES, PROMPT = 5, 7
BATCHES = [1, 3, 8]
ATTENTION = ["npu_fusion_v3", "sdpa"]


@pytest.fixture(scope="module")
def directory(tiny_checkpoint):
    return tiny_checkpoint(size="tiny-heads128")


@pytest.fixture(scope="module")
def on_cpu(directory):
    return Parts(directory, "cpu", "sdpa", torch.float32)


@pytest.fixture(scope="module", params=ATTENTION)
def on_npu(request, directory):
    return Parts(directory, "npu", request.param, torch.float32)


def random_rows(parts, count, seed):
    """Talker states and logits as a talker could give them."""
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, parts.config.talker.hidden_size, generator=rng)
    return hidden, 3 * torch.randn(count, parts.config.talker_vocab_size, generator=rng)


def admit_all(parts, count):
    """Put requests into the first slots: every other one greedy, the others sampled."""
    layout = PromptLayout(tuple(range(PROMPT)), (-1,) * (PROMPT - 2) + (2148, 2149), (3, 4), 5)
    for slot in range(count):
        spec = SamplingSpec(temperature=0.0) if slot % 2 else SamplingSpec(seed=slot, top_p=0.9)
        parts.table.admit(slot, Admission(layout, spec, 20))


def run_frames(parts, frame, count):
    """Make FRAMES frames in ``count`` slots; returns the slot table's contents and the tokens."""
    admit_all(parts, count)
    tokens = []
    for place in range(FRAMES):
        hidden, logits = random_rows(parts, count, place)
        slots, positions = torch.arange(count), torch.full((count,), PROMPT + place - 1)
        tokens.append(frame(*parts.to(hidden, logits, slots, positions))[0].cpu())
    table = {name: value.cpu()[:count] for name, value in vars(parts.table).items() if torch.is_tensor(value)}
    return table, torch.stack(tokens)


def wrapped_step(parts, mode):
    inputs = frame_step_inputs(parts.config, parts.table, hidden_dtype=torch.float32, logits_dtype=torch.float32)
    wrap = graph_wrappers.create(mode, parts.backend)
    return wrap(parts.step, buckets=BUCKETS, inputs=inputs, name="frame step")


@pytest.mark.parametrize("count", BATCHES)
@pytest.mark.parametrize("mode", ["off", "on"])
def test_the_frame_step_equals_the_cpu(on_cpu, on_npu, mode, count):
    expected, expected_tokens = run_frames(on_cpu, wrapped_step(on_cpu, "off"), count)
    frame = wrapped_step(on_npu, mode)
    frame.capture()
    found, tokens = run_frames(on_npu, frame, count)
    assert torch.equal(tokens, expected_tokens)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    made = expected["codes"][:, PROMPT : PROMPT + FRAMES]
    assert (made >= 0).all()
    assert len(made.unique()) > count * FRAMES, "codes that are all alike would prove nothing"
    if mode == "on":
        bucket = {1: 1, 3: 4, 8: 8}[count]
        assert frame.counters[f"replays_{bucket}"] == FRAMES


def test_an_admission_is_one_copy_and_waits_for_nothing(on_npu):
    admit_all(on_npu, 2)
    with counting() as counts:
        admit_all(on_npu, 1)
    assert counts["copies_host_to_device"] == 1
    assert counts["host_syncs"] == counts["device_syncs"] == counts["event_syncs"] == 0
    assert counts["copies_device_to_host"] == 0


def test_a_captured_frame_is_one_replay_and_waits_for_nothing(on_npu):
    frame = wrapped_step(on_npu, "on")
    frame.capture()
    admit_all(on_npu, 3)
    rows = on_npu.to(*random_rows(on_npu, 3, 0), torch.arange(3), torch.full((3,), PROMPT - 1))
    with counting() as counts:
        frame(*rows)
    eager = operators(counts)
    assert counts["graph_replays"] == 1
    assert counts["host_syncs"] == counts["device_syncs"] == counts["event_syncs"] == 0
    assert counts["copies_host_to_device"] == counts["copies_device_to_host"] == 0
    # Four inputs copied in, their padding row filled, the result cloned.
    assert eager == {"copy on device": 4, "aten::fill_.Scalar": 4, "aten::clone": 1}, eager


def test_nothing_in_a_frame_runs_on_the_slow_processor(on_npu):
    with counting() as counts:
        wrapped_step(on_npu, "on").capture()
    assert [name for name in counts if name.startswith("ai_cpu")] == []
    assert [name for name in counts if name.startswith("refused")] == []


def test_a_captured_frame_survives_other_allocations_between_replays(on_cpu, on_npu):
    expected, _ = run_frames(on_cpu, wrapped_step(on_cpu, "off"), 3)
    frame = wrapped_step(on_npu, "on")
    frame.capture()

    def disturbed(*rows):
        keep = [torch.full((1 << n,), 9.0, device="npu") for n in range(8, 20)]
        results = frame(*rows)
        del keep
        return results

    found, _ = run_frames(on_npu, disturbed, 3)
    assert torch.equal(found["codes"], expected["codes"])


def test_our_wrapper_refuses_a_nested_replay_before_torch_npu_does(on_npu):
    from qwen3tts_hw.errors import GraphCaptureError

    frame = wrapped_step(on_npu, "on")
    frame.capture()
    rows = on_npu.to(*random_rows(on_npu, 1, 0), torch.arange(1), torch.arange(1))
    outer = torch.npu.NPUGraph()
    with pytest.raises(GraphCaptureError, match="a graph cannot be replayed into a graph"), torch.npu.graph(outer):
        frame(*rows)


@pytest.mark.parametrize("count", BATCHES)
def test_the_predictor_alone_equals_the_cpu(on_cpu, on_npu, count):
    rng = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, on_cpu.config.talker.hidden_size, generator=rng)
    code0 = torch.randint(0, CODEBOOK_SIZE, (count,), generator=rng)
    key = frame_key(*torch.randint(0, 2**31 - 1, (3, count), generator=rng).to(torch.int32))
    rows = (torch.full((count,), 0.8), torch.full((count,), 50), torch.ones(count))
    expected = on_cpu.predictor(hidden, code0, SamplingRows(*rows), key)
    on_device = on_npu.to(hidden, code0, key, *rows)
    found = on_npu.predictor(on_device[0], on_device[1], SamplingRows(*on_device[3:]), on_device[2])
    assert torch.equal(found.cpu(), expected)


def test_the_integer_hash_wraps_as_on_the_cpu(on_npu):
    values = torch.randint(-(2**31), 2**31 - 1, (4096,)).to(torch.int32)
    with counting() as counts:
        found = mix(values.to(on_npu.backend.device))
    assert torch.equal(found.cpu(), mix(values))
    used = set(operators(counts)) - {"copy host to device", "copy device to host"}
    assert not any("shift" in name for name in used), used
    assert not any(name.startswith("ai_cpu") for name in counts)


def saturating_product(x, y):
    """A product that does not wrap around."""
    exact = torch.mul(x.cpu().to(torch.int64), y)
    return exact.clamp(-(2**31), 2**31 - 1).to(x.device, x.dtype)


def test_the_check_of_the_hash_at_load_is_one_read_and_finds_a_wrong_product(monkeypatch):
    with counting() as counts:
        check_hash(NPU)
    assert counts["copies_device_to_host"] == counts["host_syncs"] - counts["copies_host_to_device"] == 1
    assert not any(name.startswith("ai_cpu") for name in counts)
    monkeypatch.setattr(torch.Tensor, "__mul__", saturating_product)
    with pytest.raises(UnsupportedError, match=r"npu:0 computes .* the product with 0x7FEB352D of the int32 2 is"):
        check_hash(NPU)


@pytest.mark.parametrize("count", BATCHES)
@pytest.mark.parametrize("mode", ["off", "on"])
def test_the_codec_decodes_chunks_as_on_the_cpu(on_cpu, on_npu, mode, count):
    rng = torch.Generator().manual_seed(count)
    codes = torch.randint(0, CODEBOOK_SIZE, (count, NUM_CODEBOOKS, 6), generator=rng)
    expected = on_cpu.codec.decode(codes)
    state = on_npu.codec.new_state(ROWS + 1)
    wrap = graph_wrappers.create(mode, on_npu.backend)
    inputs = (InputSpec("codes", (NUM_CODEBOOKS, 2), torch.int64), InputSpec("slots", (), torch.int64, ROWS))
    step = wrap(lambda c, s: on_npu.codec.decode_step(c, state, s), buckets=BUCKETS, inputs=inputs, name="codec step")
    step.capture()
    state.reset(torch.arange(ROWS + 1).npu())
    slots = torch.arange(count).npu()
    parts = []
    for start in range(0, 6, 2):
        with counting() as counts:
            parts.append(step(codes[:, :, start : start + 2].npu(), slots)[0].cpu())
        assert counts["device_syncs"] == 0
        assert [name for name in counts if name.startswith("ai_cpu")] == []
    assert (torch.cat(parts, 1) - expected).abs().max() <= 1e-5
