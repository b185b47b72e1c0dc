"""The codec's captured steps: lengths, buckets, padding, and equality with the decoder itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qwen3tts_hw import backends, graph_wrappers
from qwen3tts_hw.codec import CodecDecoder, to_pcm16
from qwen3tts_hw.engine.codec_steps import CodecSteps, row_buckets, split_frames, whole_steps
from qwen3tts_hw.errors import GraphCaptureError
from tests.unit.test_codec import CONFIG, random_codes, random_weights, slots


@pytest.fixture(scope="module")
def decoder() -> CodecDecoder:
    made = CodecDecoder(CONFIG, "cpu", torch.float32)
    made.load_weights(random_weights(made).items())
    return made


def recording(decoder: CodecDecoder, *, most_rows: int = 2) -> CodecSteps:
    wrap = graph_wrappers.create("recording", backends.resolve("cpu"))
    return CodecSteps(decoder, 5, wrap, most_rows=most_rows)


@pytest.mark.parametrize(
    ("frames", "lengths"), [(1, [1]), (2, [2]), (3, [2, 1]), (5, [4, 1]), (8, [8]), (25, [8, 8, 8, 1])]
)
def test_frames_are_split_largest_first(frames: int, lengths: list[int]) -> None:
    assert split_frames(frames) == lengths


@pytest.mark.parametrize(
    ("left", "decoded"), [(0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (7, 8), (8, 8), (9, 9), (11, 12), (21, 24)]
)
def test_what_is_left_of_a_stream_takes_one_step_beside_the_longest(left: int, decoded: int) -> None:
    assert whole_steps(np.array([left])).tolist() == [decoded]
    assert len([length for length in split_frames(decoded) if length < 8]) <= 1


@pytest.mark.parametrize(("most", "top"), [(1, 1), (3, 4), (64, 64), (65, 96), (500, 128)])
def test_buckets_reach_the_rows_asked_for(most: int, top: int) -> None:
    assert row_buckets(most)[-1] == top


def test_graphs_of_the_plain_form_stay_small(decoder: CodecDecoder) -> None:
    wrap = graph_wrappers.create("recording", backends.resolve("cpu"))
    steps = CodecSteps(decoder, 129, wrap, most_rows=128)
    largest = {count: max(row_buckets_of(step)) for count, step in steps._steps.items()}
    assert largest == {8: 8, 4: 16, 2: 32, 1: 64}


def row_buckets_of(step: graph_wrappers.GraphWrapper) -> list[int]:
    return [int(name.removeprefix("replays_")) for name in step.counters if name.startswith("replays_")]


def test_captured_steps_equal_the_decoder(decoder: CodecDecoder) -> None:
    steps, codes = recording(decoder), random_codes(3, 7)
    steps.capture()
    at = slots(3, 0, 1)
    pcm = torch.cat([steps.decode(codes[:, :, :1], at), steps.decode(codes[:, :, 1:], at)], 1)
    assert (pcm.int() - to_pcm16(decoder.decode(codes)).int()).abs().max() <= 1
    assert steps.state.frames.tolist()[:4] == [7, 7, 0, 7]


def test_replays_are_counted_over_all_lengths(decoder: CodecDecoder) -> None:
    steps = recording(decoder)
    steps.capture()
    steps.decode(random_codes(3, 5), slots(0, 1, 2))  # 4 + 1 frames, 2 + 1 rows each
    assert steps.mode == "graph"
    assert steps.counters["replays"] == 4 and steps.counters["padding_rows"] == 0


def test_padding_rows_touch_the_scratch_slot_only(decoder: CodecDecoder) -> None:
    steps = recording(decoder, most_rows=4)
    steps.capture()
    steps.reset(torch.arange(5))
    steps.decode(random_codes(3, 1), slots(0, 1, 2))
    assert steps.state.frames.tolist()[:4] == [1, 1, 1, 0]
    assert all(table[3].eq(0).all() for table in steps.state.tables)


def test_a_reset_stream_starts_afresh(decoder: CodecDecoder) -> None:
    steps, codes = recording(decoder), random_codes(1, 2)
    steps.capture()
    first = steps.decode(codes, slots(1))
    steps.reset(slots(1))
    assert torch.equal(steps.decode(codes, slots(1)), first)


def test_a_copied_stream_goes_on_as_its_source(decoder: CodecDecoder) -> None:
    state, after = decoder.new_state(5), random_codes(1, 5)
    decoder.decode_step(random_codes(2, 30), state, slots(1, 4))  # what the copy must take the place of, too
    state.copy(1, 4)
    assert torch.equal(decoder.decode_step(after, state, slots(4)), decoder.decode_step(after, state, slots(1)))
    assert state.frames.tolist() == [0, 35, 0, 0, 35]
    assert all(table[[0, 2, 3]].eq(0).all() for table in state.tables)


def test_a_stream_goes_on_from_a_snapshot(decoder: CodecDecoder) -> None:
    wrap = graph_wrappers.create("recording", backends.resolve("cpu"))
    steps, codes = CodecSteps(decoder, 3, wrap, snapshots=2), random_codes(1, 12)
    steps.capture()
    steps.decode(codes[:, :, :9], slots(0))
    steps.keep(0, 1)
    expected = steps.decode(codes[:, :, 9:], slots(0))
    for slot in (1, 0):
        steps.restore(1, slot)
        assert torch.equal(steps.decode(codes[:, :, 9:], slots(slot)), expected)
    assert steps.state.frames.tolist()[3:] == [0, 9], "padding rows belong into the scratch slot"


def test_other_weights_have_another_number(decoder: CodecDecoder) -> None:
    changing = CodecDecoder(CONFIG, "cpu", torch.float32)
    steps, seen = CodecSteps(changing, 2), set()
    for _ in range(2):
        changing.load_weights(random_weights(changing).items())
        seen.add(steps.weights)
    assert len(seen) == 2


def test_graphs_are_captured_before_the_first_request(decoder: CodecDecoder) -> None:
    with pytest.raises(GraphCaptureError, match="codec step of 2 frames was called before capture"):
        recording(decoder).decode(random_codes(1, 2), slots(0))


def test_without_graphs_nothing_needs_capture(decoder: CodecDecoder) -> None:
    steps = CodecSteps(decoder, 3)
    assert steps.mode == "eager"
    assert steps.decode(random_codes(1, 3), slots(0)).shape == (1, 3 * 1_920)


def test_dtypes_are_the_same_whatever_torchs_default_is() -> None:
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it builds a model of that dtype
    try:
        built = CodecDecoder(CONFIG, "cpu", torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {tensor.dtype for tensor in built.state_dict().values()} == {torch.float32}
