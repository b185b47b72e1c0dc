"""Every attention op of the package on the emulated device, against torch's own attention on the CPU."""

from __future__ import annotations

import pytest

torch_npu = pytest.importorskip("torch_npu", reason="runs in the light bed: make test-ascend-light")

import torch  # noqa: E402

from qwen3tts_hw import attention_ops  # noqa: E402
from qwen3tts_hw.attention_ops.npu_fusion import NpuFusionAttention, check_compressed_mask, load_kernel  # noqa: E402
from qwen3tts_hw.errors import AttentionMaskError, UnsupportedError  # noqa: E402
from tests.ascend.light.device import backend, counting, operators  # noqa: E402

OPERATORS = {
    "npu_fusion": "npu::npu_fusion_attention",
    "npu_fusion_v3": "npu::npu_fusion_attention_v3",
    "npu_fused_infer": "npu::npu_fused_infer_attention_score",
    "sdpa": "npu::npu_fusion_attention_v3",  # torch_npu's own kernel of scaled_dot_product_attention calls it
}
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}  # of values around 1: one rounding to bfloat16 is 4e-3


def tensors(batch, queries, keys, dtype, *, heads=16, kv_heads=8, size=128):
    return (
        torch.randn(batch, heads, queries, size).to(dtype),
        torch.randn(batch, kv_heads, keys, size).to(dtype),
        torch.randn(batch, kv_heads, keys, size).to(dtype),
    )


@pytest.mark.parametrize("lengths", [(2, 2), (1, 5), (1, 17), (17, 17)], ids=str)
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*OPERATORS, "npu_reference"])
def test_equals_sdpa_on_the_cpu_and_takes_its_path(name, dtype, batch, lengths):
    if name == "npu_fused_infer" and dtype == torch.float32:
        pytest.skip("the operator takes float16 and bfloat16 only")
    query, key, value = tensors(batch, *lengths, dtype)
    expected = attention_ops.create("sdpa", backend("cpu"))(query, key, value, scale=128**-0.5)
    op = attention_ops.create(name, backend("npu"))
    on_device = query.npu(), key.npu(), value.npu()
    with counting() as counts:
        found = op(*on_device, scale=128**-0.5)
    assert (found.cpu() - expected).abs().max() <= TOLERANCE[dtype]
    if name in OPERATORS:
        assert counts[f"eager {OPERATORS[name]}"] == 1, operators(counts)
    if name in ("npu_fusion_v3", "npu_fusion"):
        assert set(operators(counts)) == {OPERATORS[name]}, "no copy, no expanded head, no mask made per call"
    assert counts["host_syncs"] == 0


def test_cached_keys_may_be_a_view_of_a_larger_cache():
    query, key, value = tensors(3, 1, 17, torch.bfloat16)
    expected = attention_ops.create("sdpa", backend("cpu"))(query, key[:, :, :5], value[:, :, :5], scale=0.1)
    key, value = key.npu()[:, :, :5], value.npu()[:, :, :5]
    for name in OPERATORS:
        found = attention_ops.create(name, backend("npu"))(query.npu(), key, value, scale=0.1)
        assert (found.cpu() - expected).abs().max() <= TOLERANCE[torch.bfloat16], name


@pytest.mark.parametrize("name", ["npu_fusion", "npu_fusion_v3", "npu_fused_infer"])
def test_sequences_longer_than_the_mask_are_accepted(name):
    dtype = torch.bfloat16 if name == "npu_fused_infer" else torch.float32
    query, key, value = tensors(1, 2500, 2500, dtype, heads=2, kv_heads=1, size=16)
    expected = attention_ops.create("sdpa", backend("cpu"))(query, key, value, scale=0.25)
    found = attention_ops.create(name, backend("npu"))(query.npu(), key.npu(), value.npu(), scale=0.25)
    assert (found.cpu() - expected).abs().max() <= 2 * TOLERANCE[dtype]


def test_one_query_over_more_keys_than_the_mask_has_is_accepted():
    for name in OPERATORS:
        query, key, value = tensors(2, 1, 3000, torch.bfloat16, heads=4, kv_heads=2, size=128)
        expected = attention_ops.create("sdpa", backend("cpu"))(query, key, value, scale=0.1)
        found = attention_ops.create(name, backend("npu"))(query.npu(), key.npu(), value.npu(), scale=0.1)
        assert (found.cpu() - expected).abs().max() <= TOLERANCE[torch.bfloat16], name


def test_float32_is_refused_by_the_inference_operator_with_the_way_out():
    op = attention_ops.create("npu_fused_infer", backend("npu"))
    with pytest.raises(UnsupportedError, match="use the attention op npu_fusion_v3 for float32"):
        op(*(tensor.npu() for tensor in tensors(1, 1, 4, torch.float32)), scale=0.1)


@pytest.mark.parametrize("kernel", ["npu_fusion_attention_v3", "npu_fusion_attention"])
@pytest.mark.parametrize(
    ("mask", "mode", "lengths"),
    [
        (torch.ones(17, 17, dtype=torch.bool).triu(1), 2, (17, 17)),
        (torch.ones(1, 1, 2048, 2048, dtype=torch.bool).triu(1), 2, (17, 17)),
        (torch.ones(2048, 2048).triu(1), 2, (17, 17)),
        (torch.ones(2048, 2048, dtype=torch.bool).triu(1), 2, (2, 5)),
        (torch.ones(2048, 2048, dtype=torch.bool).triu(1), 3, (5, 2)),
        (None, 2, (17, 17)),
        (None, 0, (17, 17)),
        (torch.ones(2048, 2048, dtype=torch.bool).triu(1), 0, (17, 17)),
        (torch.ones(2048, 2048, dtype=torch.bool).triu(1), 1, (17, 17)),
        (torch.ones(2048, 2048, dtype=torch.bool).triu(1), 4, (17, 17)),
        (torch.ones(4096, 4096, dtype=torch.bool).triu(1), 2, (4096, 4096)),
        (torch.ones(2048, 2048, dtype=torch.int32).triu(1), 2, (17, 17)),
    ],
    ids=[
        "own size",
        "4-d",
        "float",
        "mode 2, more keys",
        "mode 3, fewer keys",
        "none in mode 2",
        "none in mode 0",
        "one in mode 0",
        "mode 1",
        "mode 4",
        "larger",
        "int32",
    ],
)
def test_our_guard_refuses_before_the_operator_sees_it(kernel, mask, mode, lengths):
    with pytest.raises(AttentionMaskError):
        check_compressed_mask(mask, mode, *lengths)
    assert load_kernel(kernel, backend("npu").device)


@pytest.mark.parametrize("wrong", ["inverted", "lower", "diagonal"])
def test_a_mask_with_wrong_contents_is_refused_when_the_op_is_built(monkeypatch, wrong):
    from qwen3tts_hw.attention_ops import npu_fusion

    right = npu_fusion.compressed_causal_mask(torch.device("cpu"))
    masks = {"inverted": ~right, "lower": right.T, "diagonal": right | torch.eye(2048, dtype=torch.bool)}
    original = npu_fusion.compressed_causal_mask
    monkeypatch.setattr(
        npu_fusion, "compressed_causal_mask", lambda at: masks[wrong].to(at) if at.type == "npu" else original(at)
    )
    device = backend("npu").device
    with pytest.raises(AttentionMaskError, match=r"inverted|lower triangle|diagonal is masked"):
        NpuFusionAttention(load_kernel("npu_fusion_attention_v3", device), device, name="v3")
