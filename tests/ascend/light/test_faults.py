"""The emulator catches what it claims to: each test plants one mistake and must see it refused, or see it in data."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

torch_npu = pytest.importorskip("torch_npu", reason="runs in the light bed: make test-ascend-light")

import torch  # noqa: E402
from ascend_emulator import layer  # noqa: E402

from qwen3tts_hw.attention_ops.npu_fusion import compressed_causal_mask  # noqa: E402
from tests.ascend.light.device import counting  # noqa: E402

NPU = torch.device("npu")
V3 = torch_npu.npu_fusion_attention_v3
FIA = torch_npu.npu_fused_infer_attention_score


def heads(count: int, length: int, dtype: torch.dtype = torch.bfloat16, size: int = 128) -> torch.Tensor:
    return torch.randn(2, count, length, size).to(dtype).npu()


def capture(function):
    """Warm up, capture, return the graph and the captured result."""
    function()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = function()
    return graph, result


class TestMemory:
    def test_fresh_memory_is_poisoned_when_new_and_when_used_before(self):
        for _ in range(2):
            block = torch.empty(1000, device=NPU)
            assert block.isnan().all()
            block.fill_(1.0)
            del block
        assert (torch.empty(7, device=NPU, dtype=torch.int32) == -1).all()

    def test_memory_allocated_in_a_graph_is_poisoned_at_every_replay(self):
        source = torch.ones(4, device=NPU)

        def forgets_half():
            result = torch.empty(4, device=NPU)
            result[:2] = source[:2]
            return result

        graph, result = capture(forgets_half)
        for _ in range(2):
            graph.replay()
            assert result[:2].tolist() == [1.0, 1.0]
            assert result[2:].isnan().all()
            result.fill_(3.0)

    def test_a_stale_input_buffer_shows(self):
        kept = [torch.ones(1 << 20, device=NPU)]
        graph, result = capture(lambda: kept[0] * 2)
        graph.replay()
        assert result[0].item() == 2.0
        kept.clear()  # the graph still reads this address
        torch.npu.synchronize()
        intruder = torch.full((1 << 20,), 5.0, device=NPU)
        graph.replay()
        assert result[0].item() == 10.0
        del intruder


class TestCapture:
    @pytest.mark.parametrize(
        ("mistake", "message"),
        [
            (lambda x: x.sum().item(), "host wait"),
            (lambda x: x[x > 0], "boolean mask"),
            (lambda x: x.nonzero(), "host wait"),
            (lambda x: x.cpu(), "host wait"),
            (lambda x: x.copy_(torch.zeros(4), non_blocking=True), "pageable"),
            (lambda x: x.copy_(torch.zeros(4).pin_memory()), "host wait"),
            (lambda x: torch.npu.current_stream().synchronize(), "107030|SynchronizeStream"),
            (lambda x: x.to(torch.int32) >> 3, "cannot be captured.*AI CPU"),
            (lambda x: x[torch.tensor([0, 1])], "host tensor"),
        ],
        ids=[
            "item",
            "boolean index",
            "nonzero",
            "cpu",
            "pageable copy",
            "blocking copy",
            "sync",
            "shift",
            "host index",
        ],
    )
    def test_what_a_device_cannot_capture_is_refused(self, mistake, message):
        x = torch.ones(4, device=NPU)
        graph = torch.npu.NPUGraph()
        with pytest.raises(RuntimeError, match=message), torch.npu.graph(graph):
            mistake(x * 2)

    def test_an_asynchronous_copy_from_pinned_memory_may_be_captured(self):
        source, target = torch.ones(4).pin_memory(), torch.zeros(4, device=NPU)
        graph, _ = capture(lambda: target.copy_(source, non_blocking=True))
        source.fill_(7.0)
        graph.replay()
        assert target.tolist() == [7.0] * 4

    def test_a_nested_replay_is_refused_below_us(self):
        x = torch.ones(4, device=NPU)
        inner, _ = capture(lambda: x + 1)
        outer = torch.npu.NPUGraph()
        with pytest.raises(RuntimeError, match=r"107030|during capturing stage"), torch.npu.graph(outer):
            inner.replay()

    def test_the_eager_only_attention_is_refused(self):
        q = heads(4, 1)
        with pytest.raises(RuntimeError, match="aclgraph"):
            capture(lambda: torch_npu.npu_fusion_attention(q, q, q, 4, "BNSD"))


class TestUpdates:
    def fia(self, lengths):
        return FIA(self.q, self.k, self.v, num_heads=4, num_key_value_heads=2, input_layout="BNSD", scale=0.1,
                   actual_seq_lengths_kv=lengths)[0]  # fmt: skip

    @pytest.fixture(autouse=True)
    def tensors(self):
        self.q, self.k, self.v = heads(4, 1), heads(2, 16), heads(2, 16)

    def test_lengths_are_constants_until_they_are_updated(self):
        self.fia([4, 4])
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph, auto_dispatch_capture=True):
            result = self.fia([4, 4])
        for lengths in ([5, 9], [16, 1]):
            graph.replay()
            graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
            torch.npu.synchronize()
            assert torch.equal(result.cpu(), self.fia(lengths).cpu())
            assert not torch.equal(result.cpu(), self.fia([4, 4]).cpu()), "wrong lengths must give another result"

    def test_a_missing_update_is_a_deadlock_that_ends_with_an_error(self):
        program = """
import torch, torch_npu
q, k = torch.ones(2, 4, 1, 128).bfloat16().npu(), torch.ones(2, 2, 16, 128).bfloat16().npu()
f = lambda: torch_npu.npu_fused_infer_attention_score(q, k, k, num_heads=4, num_key_value_heads=2,
    input_layout="BNSD", scale=0.1, actual_seq_lengths_kv=[4, 4])[0]
f()
g = torch.npu.NPUGraph()
with torch.npu.graph(g, auto_dispatch_capture=True):
    f()
g.replay()
torch.npu.synchronize()
"""
        finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert finished.returncode != 0
        assert "deadlock, tasks wait for an event or a value that never comes" in finished.stderr
        assert "507014" in finished.stderr


class TestOperators:
    def test_an_operator_without_reference_kernel_fails_with_its_name(self):
        with pytest.raises(RuntimeError, match=r"npu::npu_geglu has no reference kernel"):
            torch.ops.npu.npu_geglu(torch.ones(2, 4, device=NPU))

    def test_an_operator_that_would_fall_back_to_the_host_fails_with_its_name(self):
        with pytest.raises(RuntimeError, match=r"aten::_weight_norm_interface has no kernel for this device"):
            torch._weight_norm_interface(torch.ones(2, 4, device=NPU), torch.ones(2, 1, device=NPU))

    def test_float64_is_refused(self):
        x = torch.ones(2, dtype=torch.float64).npu()
        with pytest.raises(RuntimeError, match=r"aten::add\.Tensor does not take Double"):
            x + x

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"atten_mask": torch.ones(16, 16, dtype=torch.bool)}, r"\[2048, 2048\]"),
            ({"atten_mask": compressed_causal_mask(torch.device("cpu")).T}, "not triu"),
            ({"atten_mask": ~compressed_causal_mask(torch.device("cpu"))}, "not triu"),
            ({"atten_mask": compressed_causal_mask(torch.device("cpu")).float()}, "atten_mask is torch.float32"),
            ({"atten_mask": None}, "needs atten_mask"),
            ({"sparse_mode": 9}, "sparse_mode 9"),
            ({"head_num": 3}, "head_num 3"),
            ({"input_layout": "BSH"}, "layout BNSD"),
            ({"key": heads(3, 16), "value": heads(3, 16)}, "4 heads over 3"),
            ({"key": heads(2, 16, torch.float16)}, "and the same"),
            ({"value": heads(2, 15)}, "disagree"),
            ({"key": heads(2, 16)[:1], "value": heads(2, 16)[:1]}, "disagree"),
            ({"query": heads(4, 16, torch.float64)}, "Double|the same"),
            ({"value": heads(2, 16, size=256)}, "head sizes 128, 128, 256"),
            ({"query": heads(4, 16, size=784), "key": heads(2, 16, size=784), "value": heads(2, 16, size=784)}, "784"),
            ({"query": heads(258, 16), "head_num": 258}, "258 heads"),
            ({"sparse_mode": 1, "atten_mask": None}, "sparse_mode 1 needs"),
            ({"sparse_mode": 3, "atten_mask": torch.ones(2047, 2048, dtype=torch.bool).triu(1)}, r"\[2048, 2048\]"),
            ({"sparse_mode": 0, "atten_mask": torch.zeros(2, 1, 1, 16, dtype=torch.bool)}, "16 queries and 16 keys"),
            ({"sparse_mode": 0, "atten_mask": torch.zeros(16, 16, dtype=torch.bool)}, "unsupported atten_mask shape"),
            ({"sparse_mode": 0, "atten_mask": torch.zeros(3, 1, 16, 16, dtype=torch.bool)}, "unsupported atten_mask"),
            ({"sparse_mode": 0, "atten_mask": torch.zeros(2, 1, 16, 16)}, "atten_mask is torch.float32"),
            ({"sparse_mode": 0, "atten_mask": None, "next_tockens": 0}, "must agree with the mask"),
            ({"prefix": [1, 2]}, "prefix is not emulated"),
            ({"keep_prob": 0.5}, "keep_prob is not emulated"),
        ],
    )
    def test_documented_refusals_of_the_fusion_operator(self, changes, message):
        good = {"query": heads(4, 16), "key": heads(2, 16), "value": heads(2, 16), "head_num": 4, "sparse_mode": 2,
                "input_layout": "BNSD", "atten_mask": compressed_causal_mask(NPU)}  # fmt: skip
        V3(**good)
        mask = changes.get("atten_mask")
        changed = {**good, **changes, **({"atten_mask": mask.npu()} if mask is not None else {})}
        with pytest.raises(RuntimeError, match=message):
            V3(**changed)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"query": heads(4, 1, torch.float32)}, "float16 or bfloat16 only"),
            ({"key": heads(16, 2).transpose(1, 2)}, "key is not contiguous"),
            (
                {"query": heads(4, 1, size=24), "key": heads(2, 16, size=24), "value": heads(2, 16, size=24)},
                "multiple of 16",
            ),
            ({"query": heads(4, 1, torch.float16)}, "must be the same"),
            ({"query": heads(4, 1, torch.float64)}, "Double|float16 or bfloat16 only"),
            ({"query": heads(4, 1, size=528), "key": heads(2, 16, size=528), "value": heads(2, 16, size=528)}, "528"),
            ({"num_key_value_heads": 3}, "heads per key/value head"),
            ({"num_heads": 130, "query": heads(130, 1)}, "at most 64 heads per key/value head"),
            ({"query": heads(4, 16), "atten_mask": torch.ones(16, 16), "sparse_mode": 3}, "atten_mask is torch.float"),
            ({"query": heads(4, 16), "sparse_mode": 3}, "needs atten_mask"),
            ({"query": heads(4, 16), "sparse_mode": 5}, "sparse_mode 5"),
            (
                {"query": heads(4, 16), "atten_mask": torch.ones(16, 16, dtype=torch.bool).triu(1), "sparse_mode": 3},
                r"\[2048, 2048\]",
            ),
            (
                {"query": heads(4, 16), "atten_mask": torch.ones(16, 8, dtype=torch.bool), "sparse_mode": 0},
                "16 queries and 16 keys",
            ),
            ({"input_layout": "BNSD_NBSD"}, "is not emulated"),
            ({"block_table": torch.zeros(2, 1, dtype=torch.int32), "block_size": 24}, "block_size 24"),
        ],
    )
    def test_documented_refusals_of_the_inference_operator(self, changes, message):
        good = {"query": heads(4, 1), "key": heads(2, 16), "value": heads(2, 16), "num_heads": 4,
                "num_key_value_heads": 2, "input_layout": "BNSD", "scale": 0.1}  # fmt: skip
        FIA(**good)
        on_device = {name: value.npu() if torch.is_tensor(value) else value for name, value in changes.items()}
        with pytest.raises(RuntimeError, match=message):
            FIA(**{**good, **on_device})

    @pytest.mark.parametrize(
        ("size", "lengths", "message"),
        [
            (64, [3, 5], "head sizes 128 and 192"),
            (128, None, "needs actual_seq_lengths"),
            (128, [3, 4], "the last of actual_seq_lengths is 4, but there are 5 rows"),
        ],
    )
    def test_documented_refusals_of_packed_sequences(self, size, lengths, message):
        rows = torch.randn(5, 4, size).bfloat16().npu()
        good = {"num_heads": 4, "num_key_value_heads": 4, "input_layout": "TND", "scale": 0.1}
        with pytest.raises(RuntimeError, match=message):
            FIA(rows, rows, rows, actual_seq_lengths=lengths, actual_seq_lengths_kv=lengths, **good)

    def test_a_mask_or_length_that_is_wrong_but_legal_changes_the_result(self):
        q, k = heads(4, 16), heads(2, 16)
        right = V3(q, k, k, 4, "BNSD", atten_mask=compressed_causal_mask(NPU), sparse_mode=2)[0]
        assert not torch.equal(right, V3(q, k, k, 4, "BNSD")[0])


def test_work_that_is_not_ordered_goes_wrong_when_nothing_runs_by_luck():
    program = """
import torch, torch_npu
x, host = torch.zeros(4, device="npu"), torch.zeros(4).pin_memory()
side, ready = torch.npu.Stream(), torch.npu.Event()
torch.npu.synchronize()
x.fill_(1.0)
if ORDERED:
    side.wait_stream(torch.npu.current_stream())
with torch.npu.stream(side):
    host.copy_(x, non_blocking=True)
    ready.record()
before = host.tolist()
ready.synchronize()
print(before[0], host.tolist()[0])
"""
    for ordered, found in (("True", "0.0 1.0"), ("False", "0.0 0.0")):
        finished = subprocess.run(
            [sys.executable, "-c", program.replace("ORDERED", ordered)],
            capture_output=True, text=True, check=True, env={**os.environ, "ASCEND_EMULATOR_DEFER": "1"},
        )  # fmt: skip
        assert finished.stdout.splitlines()[-1] == found


def test_counters_tell_graphs_from_eager_work():
    x = torch.ones(4, device=NPU)
    graph, _ = capture(lambda: x * 2 + 1)
    torch.npu.synchronize()
    with counting() as counts:
        graph.replay()
        x.copy_(torch.ones(4).pin_memory(), non_blocking=True)
        (x + 1).sum().item()
    assert counts["graph_replays"] == 1
    assert counts["eager aten::add.Tensor"] == counts["eager aten::sum"] == counts["host_syncs"] == 1
    assert counts["copies_host_to_device"] == 1
    assert layer.counters()["captures"] == 0


def test_counters_tell_who_asked():
    program = """
import torch, torch_npu
from ascend_emulator import layer, origins
from qwen3tts_hw import backends, graph_wrappers
from qwen3tts_hw.graph_wrappers import InputSpec

backend = backends.resolve("npu")
wrap = graph_wrappers.create("on", backend)
twice = wrap(lambda x: x * 2, buckets=(1,), inputs=(InputSpec("x", (4,), torch.float32),), name="twice")
twice.capture()
x = torch.ones(1, 4, device=backend.device)
torch.npu.synchronize()
origins.attribute()
layer.reset_counters()
twice(x)
(x + 1).sum().item()
counts = layer.counters()
for owner in ("package", "other"):
    found = origins.of(counts, owner)
    print(owner, *(found[name] for name in ("graph_replays", "eager copy on device", "eager aten::sum", "host_syncs")))
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert finished.stdout.splitlines()[-2:] == ["package 1 1 0 0", "other 0 0 1 1"]
