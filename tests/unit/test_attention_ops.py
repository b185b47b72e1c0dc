"""Attention ops: one meaning on every kernel, and a guard that lets no misread mask through.

Every op is compared with a plain float32 softmax written here.
"""

from __future__ import annotations

import pytest
import torch

from qwen3tts_hw import attention_ops, backends
from qwen3tts_hw.attention_ops.npu_fusion import (
    NpuFusionAttention,
    check_compressed_mask,
    check_mask_content,
    compressed_causal_mask,
    fused_infer_kernel,
    sparse_mode_for,
)
from qwen3tts_hw.attention_ops.npu_reference import npu_fusion_attention
from qwen3tts_hw.errors import AttentionMaskError, UnsupportedError

CPU = torch.device("cpu")
OPS = [("sdpa", "cpu"), ("npu_reference", "cpu"), pytest.param("sdpa", "cuda", marks=pytest.mark.cuda)]
NPU_OPS = ("npu_fusion", "npu_fusion_v3", "npu_fused_infer")
EVERY_OP = pytest.mark.parametrize(
    ("name", "device"), [*OPS, *(pytest.param(op, "npu", marks=pytest.mark.npu) for op in NPU_OPS)]
)
TEMPLATE = compressed_causal_mask(CPU)


def heads(count, length, *, batch=2, size=16):
    return torch.randn(batch, count, length, size)


def plain_attention(query, key, value, scale, visible):
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", query.double(), key.double()) * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, value.double()).float()


def causal(num_queries, num_keys, offset):
    return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(offset)


@EVERY_OP
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (2, 2), (1, 17), (33, 33), (130, 130)])
@pytest.mark.parametrize(("query_heads", "key_heads"), [(4, 4), (4, 2), (6, 1)])
def test_op_matches_plain_attention(name, device, num_queries, num_keys, query_heads, key_heads):
    backend = backends.resolve(device)
    op = attention_ops.create(name, backend)
    query, key, value = heads(query_heads, num_queries), heads(key_heads, num_keys), heads(key_heads, num_keys)
    dtype = torch.bfloat16 if name == "npu_fused_infer" else torch.float32
    moved = (tensor.to(backend.device, dtype) for tensor in (query, key, value))
    visible = causal(num_queries, num_keys, num_keys - num_queries)
    result = op(*moved, scale=0.3).float().cpu()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(result, plain_attention(query, key, value, 0.3, visible), atol=tolerance, rtol=tolerance)


@EVERY_OP
def test_op_reads_strided_keys(name, device):
    backend = backends.resolve(device)
    op = attention_ops.create(name, backend)
    dtype = torch.bfloat16 if name == "npu_fused_infer" else torch.float32
    cache = torch.randn(2, 2, 20, 16).to(backend.device, dtype)
    query = heads(4, 1).to(backend.device, dtype)
    strided = op(query, cache[:, :, :7], cache[:, :, 7:14], scale=0.25)
    whole = op(query, cache[:, :, :7].contiguous(), cache[:, :, 7:14].contiguous(), scale=0.25)
    assert torch.equal(strided, whole)


@pytest.mark.parametrize("name", ["sdpa", "npu_reference"])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(2, 5), (5, 2), (3, 4)])
def test_lengths_without_an_implied_mask_are_refused(name, num_queries, num_keys):
    op = attention_ops.create(name, backends.resolve("cpu"))
    with pytest.raises(AttentionMaskError, match=f"from {num_queries} queries to {num_keys} keys"):
        op(heads(2, num_queries), heads(2, num_keys), heads(2, num_keys), scale=1.0)


@pytest.mark.parametrize("name", ["sdpa", "npu_reference"])
def test_bfloat16_softmax_is_not_done_in_bfloat16(name):
    op = attention_ops.create(name, backends.resolve("cpu"))
    query, key, value = (heads(2, 200).bfloat16() for _ in range(3))
    exact = plain_attention(query, key, value, 0.25, causal(200, 200, 0))
    # A bfloat16 softmax over 200 keys is off by some 1e-2; what remains is the rounding of the weights and the result.
    assert (op(query, key, value, scale=0.25).float() - exact).abs().mean() < 2e-3


def test_auto_takes_what_the_backend_prefers():
    assert attention_ops.create("auto", backends.resolve("cpu")).name == "sdpa"


def test_unknown_op_is_refused_with_the_known_names():
    with pytest.raises(UnsupportedError, match="unknown attention op 'fusoin'; supported: sdpa, npu_fusion"):
        attention_ops.create("fusoin", backends.resolve("cpu"))


@pytest.mark.parametrize("name", NPU_OPS)
def test_fused_ops_are_refused_off_their_device(name):
    with pytest.raises(UnsupportedError, match="needs an npu device, but the backend's device is cpu"):
        attention_ops.create(name, backends.resolve("cpu"))


def record_calls(calls):
    def kernel(query, key, value, head_num, input_layout, **options):
        calls.append((head_num, input_layout, options))
        return npu_fusion_attention(query, key, value, head_num, input_layout, **options)

    return kernel


def test_fusion_op_gives_scale_layout_and_one_kept_mask():
    calls = []
    op = NpuFusionAttention(record_calls(calls), CPU, name="recorded")
    op(heads(4, 3), heads(2, 3), heads(2, 3), scale=0.5)
    op(heads(4, 5), heads(2, 5), heads(2, 5), scale=0.25)
    op(heads(4, 1), heads(2, 9), heads(2, 9), scale=0.25)
    assert [(call[0], call[1], call[2]["scale"], call[2]["sparse_mode"]) for call in calls] == [
        (4, "BNSD", 0.5, 2),
        (4, "BNSD", 0.25, 2),
        (4, "BNSD", 0.25, 0),
    ]
    first, second, third = (call[2]["atten_mask"] for call in calls)
    assert first is second
    assert torch.equal(first, torch.triu(torch.ones(2048, 2048, dtype=torch.bool), 1))
    assert third is None


def test_inference_kernel_is_given_contiguous_tensors_and_key_heads():
    seen = {}

    def operator(query, key, value, **options):
        seen.update(options, contiguous=all(tensor.is_contiguous() for tensor in (query, key, value)))
        return query, None

    cache = torch.zeros(2, 2, 8, 16, dtype=torch.bfloat16)[:, :, :5]
    op = NpuFusionAttention(fused_infer_kernel(operator), CPU, name="inference")
    op(heads(4, 1).bfloat16(), cache, cache, scale=0.5)
    expected = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD", "scale": 0.5, "sparse_mode": 0}
    assert seen == {**expected, "atten_mask": None, "contiguous": True}
    with pytest.raises(UnsupportedError, match=r"takes float16 and bfloat16, got torch\.float32"):
        op(heads(4, 1), heads(2, 5), heads(2, 5), scale=0.5)


def test_modes_follow_from_the_lengths():
    assert [sparse_mode_for(*lengths) for lengths in ((1, 1), (1, 9), (4, 4), (4, 9))] == [0, 0, 2, 3]


@pytest.mark.parametrize(("mode", "num_queries", "num_keys"), [(2, 2, 2), (2, 5_000, 5_000), (3, 4, 9), (3, 4, 4)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_guard_accepts_the_template_at_any_length(mode, num_queries, num_keys, dtype):
    check_compressed_mask(TEMPLATE.to(dtype), mode, num_queries, num_keys)


@pytest.mark.parametrize(
    ("mask", "mode", "lengths", "message"),
    [
        (TEMPLATE[:17, :17], 2, (17, 17), r"shape \[17, 17\]; it must be \[2048, 2048\]"),
        (TEMPLATE[None, None], 2, (17, 17), r"shape \[1, 1, 2048, 2048\]"),
        (torch.zeros(4096, 4096, dtype=torch.bool), 2, (4096, 4096), r"shape \[4096, 4096\]"),
        (TEMPLATE.float(), 2, (17, 17), r"dtype torch\.float32; it must be torch\.bool or torch\.uint8"),
        (None, 2, (17, 17), "sparse_mode 2 needs the compressed causal mask"),
        (None, 3, (4, 17), "sparse_mode 3 needs the compressed causal mask"),
        (TEMPLATE, 2, (4, 17), "sparse_mode 2 aligns the diagonal at the top left"),
        (TEMPLATE, 2, (17, 4), "sparse_mode 2 aligns the diagonal at the top left"),
        (TEMPLATE, 3, (17, 4), "would leave queries that see nothing"),
        (TEMPLATE, 0, (17, 17), "17 queries, mask given"),
        (None, 0, (17, 17), "17 queries, mask absent"),
        (TEMPLATE, 4, (17, 17), "sparse_mode is 4"),
    ],
)
def test_guard_refuses_what_the_kernel_would_misread(mask, mode, lengths, message):
    with pytest.raises(AttentionMaskError, match=message):
        check_compressed_mask(mask, mode, *lengths)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (TEMPLATE.T, "it is the lower triangle"),
        (~TEMPLATE, "it is inverted"),
        (TEMPLATE | torch.eye(2048, dtype=torch.bool), "its diagonal is masked"),
        (torch.zeros(2048, 2048, dtype=torch.bool), "2096128 of its entries differ"),
        (TEMPLATE[:17, :17], r"shape \[17, 17\]"),
    ],
)
def test_content_check_names_what_is_wrong_with_a_template(mask, message):
    with pytest.raises(AttentionMaskError, match=message):
        check_mask_content(mask)


def reference(query, key, value, **options):
    return npu_fusion_attention(query, key, value, query.shape[1], "BNSD", scale=0.3, **options)


@pytest.mark.parametrize(
    ("mode", "num_queries", "num_keys"), [(2, 7, 7), (2, 7, 300), (2, 300, 7), (3, 7, 300), (3, 300, 300), (3, 5, 6)]
)
def test_reference_places_the_diagonal_by_mode(mode, num_queries, num_keys):
    query, key, value = heads(4, num_queries), heads(2, num_keys), heads(2, num_keys)
    visible = causal(num_queries, num_keys, 0 if mode == 2 else num_keys - num_queries)
    expected = plain_attention(query, key, value, 0.3, visible)
    result = reference(query, key, value, atten_mask=TEMPLATE, sparse_mode=mode)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_reference_gives_zeros_to_queries_that_see_nothing():
    query, key, value = heads(2, 5), heads(2, 3), heads(2, 3)
    result = reference(query, key, value, atten_mask=TEMPLATE, sparse_mode=3)
    assert torch.equal(result[:, :, :2], torch.zeros(2, 2, 2, 16))
    expected = plain_attention(query[:, :, 2:], key, value, 0.3, causal(3, 3, 0))
    torch.testing.assert_close(result[:, :, 2:], expected, atol=1e-5, rtol=1e-5)


def test_sequences_longer_than_the_template_are_causal():
    op = attention_ops.create("npu_reference", backends.resolve("cpu"))
    query, key, value = (heads(1, 2_200, batch=1, size=4) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.5)
    torch.testing.assert_close(op(query, key, value, scale=0.5), expected, atol=1e-5, rtol=1e-5)


def test_a_wrong_template_gives_a_wrong_result_in_the_reference():
    query, key, value = heads(2, 9), heads(2, 9), heads(2, 9)
    right = reference(query, key, value, atten_mask=TEMPLATE, sparse_mode=2)
    assert not torch.allclose(right, reference(query, key, value, atten_mask=TEMPLATE.T, sparse_mode=2), atol=1e-3)


@pytest.mark.parametrize(("past", "future"), [(0, 0), (2, 0), (3, 1), (2_147_483_647, 0), (400, 2)])
def test_reference_band_is_counted_from_the_bottom_right(past, future):
    query, key, value = heads(2, 140), heads(2, 300), heads(2, 300)
    offset = 300 - 140
    visible = causal(140, 300, offset + future) & ~causal(140, 300, max(offset - past - 1, -1_000))
    result = reference(query, key, value, atten_mask=TEMPLATE, sparse_mode=4, pre_tockens=past, next_tockens=future)
    torch.testing.assert_close(result, plain_attention(query, key, value, 0.3, visible), atol=1e-5, rtol=1e-5)


def test_reference_takes_a_full_mask_as_what_is_dropped():
    query, key, value = heads(2, 4), heads(2, 6), heads(2, 6)
    dropped = torch.rand(2, 1, 4, 6) > 0.5
    dropped[..., 0] = False
    expected = plain_attention(query, key, value, 0.3, ~dropped)
    for mode in (0, 1):
        result = reference(query, key, value, atten_mask=dropped, sparse_mode=mode)
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_reference_without_a_mask_sees_everything_and_scales_by_one():
    query, key, value = heads(2, 4), heads(2, 6), heads(2, 6)
    expected = plain_attention(query, key, value, 1.0, torch.ones(4, 6, dtype=torch.bool))
    result = npu_fusion_attention(query, key, value, 2, "BNSD", pre_tockens=0, next_tockens=0)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["BSND", "BSH", "SBH"])
def test_reference_layouts_hold_the_same_numbers(layout):
    def arrange(tensor):
        tokens_first = tensor.transpose(1, 2)
        if layout == "BSND":
            return tokens_first
        return tokens_first.flatten(2) if layout == "BSH" else tokens_first.flatten(2).transpose(0, 1)

    query, key, value = heads(4, 5), heads(2, 5), heads(2, 5)
    arguments = {"scale": 0.3, "atten_mask": TEMPLATE, "sparse_mode": 2}
    result = npu_fusion_attention(arrange(query), arrange(key), arrange(value), 4, layout, **arguments)
    expected = npu_fusion_attention(query, key, value, 4, "BNSD", **arguments)
    torch.testing.assert_close(result, arrange(expected))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"atten_mask": TEMPLATE[:4, :4], "sparse_mode": 2}, r"it must be \[2048, 2048\]"),
        ({"atten_mask": TEMPLATE.int(), "sparse_mode": 2}, r"dtype torch\.int32"),
        ({"sparse_mode": 3}, "needs an atten_mask"),
        ({"sparse_mode": 1}, "needs an atten_mask"),
        ({"atten_mask": torch.zeros(2, 1, 1, 4, dtype=torch.bool)}, "unsupported atten_mask shape"),
        ({"atten_mask": torch.zeros(4, 4, dtype=torch.bool)}, "unsupported atten_mask shape"),
        ({"atten_mask": torch.zeros(1, 1, 4, 4, dtype=torch.bool), "next_tockens": 0}, "the two must agree"),
        ({"atten_mask": TEMPLATE, "sparse_mode": 6}, "sparse_mode is 6"),
    ],
)
def test_reference_refuses_masks_as_the_operator_does(options, message):
    with pytest.raises(AttentionMaskError, match=message):
        reference(heads(2, 4), heads(2, 4), heads(2, 4), **options)


@pytest.mark.parametrize(
    ("query", "key", "head_num", "layout", "message"),
    [
        (heads(4, 4), heads(3, 4), 4, "BNSD", "4 query heads, 3 key heads"),
        (heads(4, 4), heads(2, 4), 3, "BNSD", "head_num 3"),
        (heads(4, 4), heads(4, 4).half(), 4, "BNSD", "and the same"),
        (heads(4, 4).double(), heads(4, 4).double(), 4, "BNSD", "one of float16, bfloat16, float32"),
        (heads(4, 4), heads(4, 4, size=8), 4, "BNSD", "query and key must agree"),
        (heads(4, 4), heads(4, 4, batch=3), 4, "BNSD", "disagree on batch or length"),
        (heads(1, 2, size=776), heads(1, 2, size=776), 1, "BNSD", "the largest is 768"),
        (heads(4, 4), heads(4, 4), 4, "TND", "input_layout is 'TND'"),
        (heads(4, 4), heads(4, 4), 4, "BSH", "which is not layout BSH"),
    ],
)
def test_reference_refuses_tensors_as_the_operator_does(query, key, head_num, layout, message):
    with pytest.raises(UnsupportedError, match=message):
        npu_fusion_attention(query, key, key, head_num, layout)
