"""Graph wrappers: the same behaviour eagerly, through recorded graphs on a CPU, and through real device graphs.

The function under test, ``Accumulator``, reads its inputs, keeps a sum per slot in a table that it closes over and
writes in place, and returns results made from both, so a mistake in padding, slicing, stale buffers or aliasing changes
numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from qwen3tts_hw import backends, graph_wrappers
from qwen3tts_hw.errors import GraphCaptureError, UnsupportedError
from qwen3tts_hw.graph_wrappers import DeviceGraphWrapper, InputSpec
from qwen3tts_hw.graph_wrappers.recording import RecordingDriver

SLOTS = 16
SCRATCH = SLOTS
WIDTH = 3
BUCKETS = (1, 4, 8)
INPUTS = (InputSpec("rows", (WIDTH,), torch.float32), InputSpec("slots", (), torch.int64, pad_value=SCRATCH))

GRAPHS = [
    ("recording", "cpu"),
    pytest.param("on", "cuda", marks=pytest.mark.cuda),
    pytest.param("on", "npu", marks=pytest.mark.npu),
]
EVERY_GRAPH = pytest.mark.parametrize(("mode", "device"), GRAPHS)
EVERY_WRAPPER = pytest.mark.parametrize(("mode", "device"), [("off", "cpu"), *GRAPHS])


class Accumulator:
    """Add each row to its slot's sum; return twice the new sums, and each row's mean. Counts its Python calls."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(SLOTS + 1, WIDTH, device=device)
        self.python_calls = 0

    def __call__(self, rows: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.python_calls += 1
        self.sums.index_put_((slots,), rows, accumulate=True)
        return self.sums[slots] * 2, rows.mean(dim=1)


def build(mode: str, device: str, buckets: tuple[int, ...] = BUCKETS):
    backend = backends.resolve(device)
    function = Accumulator(backend.device)
    wrapper = graph_wrappers.create(mode, backend)(function, buckets=buckets, inputs=INPUTS, name="accumulator")
    wrapper.capture()
    return wrapper, function, backend.device


def arguments(rows: int, device: torch.device, first_slot: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    slots = (torch.arange(rows) + first_slot) % SLOTS
    return torch.randn(rows, WIDTH).to(device), slots.to(device)


@EVERY_WRAPPER
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8])
def test_results_equal_the_function(mode, device, rows):
    wrapper, function, on = build(mode, device)
    values, slots = arguments(rows, on)
    doubled, mean = wrapper(values, slots)
    torch.testing.assert_close(doubled, values * 2)
    torch.testing.assert_close(mean, values.mean(dim=1))
    torch.testing.assert_close(function.sums[slots], values)


@EVERY_WRAPPER
def test_state_is_written_once_per_call_and_only_in_the_slots_of_real_rows(mode, device):
    wrapper, function, on = build(mode, device)
    assert not function.sums[:SCRATCH].any()  # capture touches the scratch slot alone
    values, slots = arguments(3, on, first_slot=5)
    for count in (1, 2, 3):
        (doubled, _) = wrapper(values, slots)
        torch.testing.assert_close(doubled, values * 2 * count)
    expected = torch.zeros(SLOTS, WIDTH, device=on)
    expected[5:8] = values * 3
    torch.testing.assert_close(function.sums[:SCRATCH], expected)


@EVERY_WRAPPER
def test_outputs_survive_the_next_call(mode, device):
    wrapper, _, on = build(mode, device)
    first_call = arguments(4, on)
    first = wrapper(*first_call)
    kept = [result.clone() for result in first]
    wrapper(*arguments(4, on))
    assert all(torch.equal(result, copy) for result, copy in zip(first, kept, strict=True))


@EVERY_WRAPPER
def test_outputs_may_be_changed_by_the_caller(mode, device):
    wrapper, _, on = build(mode, device)
    values, slots = arguments(4, on)
    wrapper(values, slots)[1].fill_(99.0)
    assert torch.equal(wrapper(values, slots)[1], values.mean(dim=1))


@EVERY_WRAPPER
def test_a_result_that_is_a_view_of_state_is_still_the_callers(mode, device):
    backend = backends.resolve(device)
    table = torch.zeros(4, 1, device=backend.device)

    def add(rows: torch.Tensor) -> torch.Tensor:
        table.add_(rows)
        return table[:]

    inputs = (InputSpec("rows", (1,), torch.float32),)
    wrapper = graph_wrappers.create(mode, backend)(add, buckets=(4,), inputs=inputs, name="add")
    wrapper.capture()
    ones = torch.ones(4, 1, device=backend.device)
    (first,) = wrapper(ones)
    (second,) = wrapper(ones)
    assert torch.equal(second - first, ones)
    assert torch.equal(first, ones)


@EVERY_WRAPPER
def test_more_rows_than_the_largest_bucket_run_in_slices(mode, device):
    wrapper, function, on = build(mode, device)
    values, slots = arguments(21, on)  # slots repeat after 16, in a later slice
    _, mean = wrapper(values, slots)
    torch.testing.assert_close(mean, values.mean(dim=1))
    expected = torch.zeros(SLOTS, WIDTH, device=on)
    expected.index_put_((slots,), values, accumulate=True)
    torch.testing.assert_close(function.sums[:SCRATCH], expected)
    assert (wrapper.counters["calls"], wrapper.counters["rows"]) == (1, 21)
    if wrapper.mode == "graph":
        assert {bucket: wrapper.counters[f"replays_{bucket}"] for bucket in BUCKETS} == {1: 0, 4: 0, 8: 3}
        assert wrapper.counters["padding_rows"] == 3


@EVERY_WRAPPER
def test_no_rows_give_empty_results(mode, device):
    wrapper, function, on = build(mode, device)
    doubled, mean = wrapper(*arguments(0, on))
    assert (doubled.shape, mean.shape) == ((0, WIDTH), (0,))
    assert not function.sums[:SCRATCH].any()


@EVERY_WRAPPER
def test_calls_work_inside_and_outside_of_inference_mode(mode, device):
    with torch.inference_mode():
        wrapper, _, on = build(mode, device)
        values, slots = arguments(3, on)
        wrapper(values, slots)
    values, slots = arguments(3, on, first_slot=8)
    (doubled, _) = wrapper(values, slots)
    assert not doubled.is_inference()
    torch.testing.assert_close(doubled, values * 2)


@EVERY_WRAPPER
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows, slots: (rows,), r"accumulator takes 2 tensors \(rows, slots\), got 1"),
        (lambda rows, slots: (rows[:, :2], slots), r"'rows' has shape \[4, 2\]; expected \[rows, 3\]"),
        (lambda rows, slots: (rows, slots[:, None]), r"'slots' has shape \[4, 1\]; expected \[rows\]"),
        (lambda rows, slots: (rows.double(), slots), r"'rows' is torch\.float64; expected torch\.float32"),
        (lambda rows, slots: (rows, slots.int()), r"'slots' is torch\.int32; expected torch\.int64"),
        (lambda rows, slots: (rows, slots[:3]), "'slots' has 3 rows, but 'rows' has 4"),
        (lambda rows, slots: (rows, slots[0]), r"'slots' has shape \[\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(mode, device, change, message):
    wrapper, _, on = build(mode, device)
    with pytest.raises(GraphCaptureError, match=message):
        wrapper(*change(*arguments(4, on)))


@EVERY_GRAPH
def test_replay_runs_no_python_of_the_function(mode, device):
    wrapper, function, on = build(mode, device)
    calls = function.python_calls
    wrapper(*arguments(3, on))
    wrapper(*arguments(8, on))
    assert function.python_calls == calls
    assert wrapper.mode == "graph"


@EVERY_GRAPH
@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (2, 4), (4, 4), (5, 8), (8, 8)])
def test_the_smallest_bucket_that_holds_the_rows_is_replayed(mode, device, rows, bucket):
    wrapper, _, on = build(mode, device)
    wrapper(*arguments(rows, on))
    replayed = {name: count for name, count in wrapper.counters.items() if count}
    expected = {"calls": 1, "rows": rows, "replays": 1, f"replays_{bucket}": 1, "padding_rows": bucket - rows}
    assert replayed == {name: count for name, count in expected.items() if count}


@EVERY_GRAPH
def test_rows_of_a_larger_earlier_call_are_gone(mode, device):
    backend = backends.resolve(device)
    total = torch.zeros(1, device=backend.device)

    def mix(rows: torch.Tensor) -> torch.Tensor:  # every row sees the whole bucket, padding included
        total.copy_(rows.sum())
        return rows + rows.sum()

    inputs = (InputSpec("rows", (), torch.float32, pad_value=0.5),)
    wrapper = graph_wrappers.create(mode, backend)(mix, buckets=(4, 8), inputs=inputs, name="mix")
    wrapper.capture()
    wrapper(torch.full((8,), 100.0, device=backend.device))
    wrapper(torch.full((4,), 100.0, device=backend.device))
    (result,) = wrapper(torch.ones(2, device=backend.device))
    assert result.tolist() == [4.0, 4.0]  # 1 + (1 + 1 + 0.5 + 0.5)
    assert float(total) == 3.0
    (result,) = wrapper(torch.ones(5, device=backend.device))
    assert result.tolist() == [7.5] * 5


@EVERY_GRAPH
def test_padding_rows_do_not_influence_real_rows(mode, device):
    one_bucket, _, on = build(mode, device, buckets=(8,))
    exact, _, _ = build(mode, device, buckets=(3,))
    values, slots = arguments(3, on)
    for padded, unpadded in zip(one_bucket(values, slots), exact(values, slots), strict=True):
        assert torch.equal(padded, unpadded)


@EVERY_GRAPH
def test_call_before_capture_is_refused(mode, device):
    backend = backends.resolve(device)
    function = Accumulator(backend.device)
    wrapper = graph_wrappers.create(mode, backend)(function, buckets=BUCKETS, inputs=INPUTS, name="accumulator")
    with pytest.raises(GraphCaptureError, match=r"accumulator was called before capture\(\)"):
        wrapper(*arguments(1, backend.device))
    assert function.python_calls == 0


@EVERY_GRAPH
def test_second_capture_is_refused(mode, device):
    wrapper, _, _ = build(mode, device)
    with pytest.raises(GraphCaptureError, match="captured already"):
        wrapper.capture()


@EVERY_GRAPH
def test_replay_inside_of_another_capture_is_refused(mode, device):
    backend = backends.resolve(device)
    factory = graph_wrappers.create(mode, backend)
    inner = factory(lambda rows: rows * 2, buckets=(2,), inputs=INPUTS[:1], name="inner")
    inner.capture()
    capturing = False

    def nested(rows: torch.Tensor) -> torch.Tensor:
        return inner(rows + 1)[0] if capturing else rows

    outer = factory(nested, buckets=(2,), inputs=INPUTS[:1], name="outer")
    capturing = True
    with pytest.raises(GraphCaptureError, match="inner was called while the current stream is capturing"):
        outer.capture()
    (result,) = inner(torch.ones(2, WIDTH, device=backend.device))  # the device is usable afterwards
    assert torch.equal(result.cpu(), torch.full((2, WIDTH), 2.0))


def first_item(rows: torch.Tensor) -> torch.Tensor:
    return rows * float(rows[0, 0])


def boolean_index(rows: torch.Tensor) -> torch.Tensor:
    return rows + rows[rows > 0].sum()


def nonzero_count(rows: torch.Tensor) -> torch.Tensor:
    return rows + rows.nonzero().shape[0]


def branch_on_value(rows: torch.Tensor) -> torch.Tensor:
    return rows + 1 if rows.sum() > 0 else rows


def host_list_index(rows: torch.Tensor) -> torch.Tensor:
    return (rows + 1)[:, [0, 2, 1]]


@EVERY_GRAPH
@pytest.mark.parametrize("function", [first_item, boolean_index, nonzero_count, branch_on_value, host_list_index])
def test_operations_that_need_the_host_cannot_be_captured(mode, device, function: Callable[..., torch.Tensor]):
    backend = backends.resolve(device)
    wrapper = graph_wrappers.create(mode, backend)(function, buckets=(2,), inputs=INPUTS[:1], name=function.__name__)
    with pytest.raises(GraphCaptureError, match=f"{function.__name__} could not be captured for 2 rows: "):
        wrapper.capture()
    with pytest.raises(GraphCaptureError, match="before capture"):
        wrapper(torch.ones(2, WIDTH, device=backend.device))


@EVERY_GRAPH
def test_results_without_all_rows_are_refused(mode, device):
    backend = backends.resolve(device)
    factory = graph_wrappers.create(mode, backend)
    wrapper = factory(lambda rows: (rows, rows.sum()), buckets=(2,), inputs=INPUTS[:1], name="sum")
    with pytest.raises(GraphCaptureError, match=r"result 1 is \[\]; every result must be a tensor of 2 rows"):
        wrapper.capture()


@EVERY_GRAPH
def test_a_function_may_return_nothing(mode, device):
    backend = backends.resolve(device)
    table = torch.zeros(WIDTH, device=backend.device)

    def write(rows: torch.Tensor) -> None:
        table.copy_(rows.sum(dim=0))

    wrapper = graph_wrappers.create(mode, backend)(write, buckets=(4,), inputs=INPUTS[:1], name="write")
    wrapper.capture()
    assert wrapper(torch.ones(3, WIDTH, device=backend.device)) == ()
    assert table.tolist() == [3.0] * WIDTH


def test_running_out_of_memory_says_which_settings_to_lower():
    def allocate(rows: torch.Tensor) -> torch.Tensor:
        if rows.shape[0] == 4:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        return rows + 1

    wrapper = DeviceGraphWrapper(
        allocate, RecordingDriver(), buckets=BUCKETS, inputs=INPUTS[:1], device=torch.device("cpu"), name="allocate"
    )
    expected = r"ran out of memory while allocate was captured for 4 rows of buckets \[1, 4, 8\]; lower .*max_streams"
    with pytest.raises(GraphCaptureError, match=expected):
        wrapper.capture()


@pytest.mark.cuda
def test_running_out_of_device_memory_says_which_settings_to_lower():
    backend = backends.resolve("cuda")
    elements = backend.total_bytes()  # of four bytes each

    def allocate(rows: torch.Tensor) -> torch.Tensor:
        return rows + torch.zeros(elements, device=rows.device)[0] if rows.shape[0] == 4 else rows + 1

    wrapper = graph_wrappers.create("on", backend)(allocate, buckets=BUCKETS, inputs=INPUTS[:1], name="allocate")
    with pytest.raises(GraphCaptureError, match="ran out of memory while allocate was captured for 4 rows"):
        wrapper.capture()


@pytest.mark.parametrize("buckets", [(), (0, 4), (-1,)])
def test_impossible_buckets_are_refused(buckets):
    with pytest.raises(GraphCaptureError, match="at least one is needed, all at least 1"):
        graph_wrappers.create("recording", backends.resolve("cpu"))(
            Accumulator(torch.device("cpu")), buckets=buckets, inputs=INPUTS, name="accumulator"
        )


def test_recording_follows_composite_and_multi_output_operations():
    weight = torch.randn(6, WIDTH)

    def work(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low, high = torch.nn.functional.linear(rows, weight).reshape(-1, 2, 3).unbind(1)
        best, index = torch.cat([low, high], dim=1).topk(2)
        padded = torch.zeros(rows.shape[0], 4)
        padded[:, 1:3] = best
        padded[:, 0] = 7.0
        return padded, index, torch.nn.functional.softmax(low @ high.mT.contiguous(), dim=-1).to(torch.float64)[:, :1]

    wrapper = graph_wrappers.create("recording", backends.resolve("cpu"))(
        work, buckets=(4,), inputs=INPUTS[:1], name="work"
    )
    wrapper.capture()
    for _ in range(2):
        rows = torch.randn(4, WIDTH)
        for replayed, expected in zip(wrapper(rows), work(rows), strict=True):
            assert torch.equal(replayed, expected)


def test_graphs_off_or_auto_on_a_cpu_are_eager():
    backend = backends.resolve("cpu")
    for mode in ("auto", "off"):
        wrapper = graph_wrappers.create(mode, backend)(
            Accumulator(backend.device), buckets=BUCKETS, inputs=INPUTS, name=""
        )
        assert wrapper.mode == "eager"


def test_graphs_on_without_graphs_is_refused():
    with pytest.raises(UnsupportedError, match="graphs are on, but the cpu backend has none"):
        graph_wrappers.create("on", backends.resolve("cpu"))


def test_unknown_graph_mode_is_refused_with_the_known_ones():
    with pytest.raises(UnsupportedError, match="unknown graph mode 'full'; supported: auto, on, off, recording"):
        graph_wrappers.create("full", backends.resolve("cpu"))
