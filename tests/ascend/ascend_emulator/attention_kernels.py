"""Reference kernels of the fused attention operators, with the refusals that their documentation states.

Computed in float32 from what the arguments mean; the kernels' tiling and rounding are not modelled. Written apart from
the package's own reference (qwen3tts_hw.attention_ops.npu_reference), so that the two can disagree.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from ascend_emulator import layer
from ascend_emulator.reference import References, require

NPU = References("npu")
UNBOUNDED = 2_147_483_647
TEMPLATE = 2048  # side of the compressed mask, whatever the sequence lengths
# A device refuses float32 here. Allowing it lets a whole server be compared exactly with a float32 reference, which shows
# that rows, positions and states are right; a run without it shows that the dtypes are.
FLOAT32_ALLOWED = os.environ.get("ASCEND_EMULATOR_ALLOW_FLOAT32") == "1"
_COMPRESSED = (2, 3, 4)
_HEADS_AT = {"BNSD": 1, "BSND": 2}


@dataclass(frozen=True)
class Mask:
    """The mask arguments that the operators share."""

    tensor: torch.Tensor | None
    mode: int
    before: int = UNBOUNDED
    after: int = UNBOUNDED

    def hidden(self, queries: int, keys: int) -> torch.Tensor | None:
        """Which keys each query may not see, broadcastable to ``[B, N, Sq, Skv]``; None if it sees all."""
        rows, columns = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
        offset = keys - queries
        if self.mode in _COMPRESSED:
            self._check_template()
            if self.mode == 2:
                return columns > rows
            if self.mode == 3:
                return columns > rows + offset
            return (columns > rows + offset + self.after) | (columns < rows + offset - self.before)
        require(self.mode in (0, 1), f"sparse_mode {self.mode} is not emulated")
        require(self.mode == 0 or self.tensor is not None, "sparse_mode 1 needs atten_mask")
        if self.tensor is None:
            return None
        require(self.tensor.dtype in (torch.bool, torch.uint8, torch.int8), f"atten_mask is {self.tensor.dtype}")
        require(tuple(self.tensor.shape[-2:]) == (queries, keys),
                f"atten_mask is {list(self.tensor.shape)} for {queries} queries and {keys} keys")  # fmt: skip
        return self.tensor.bool()

    def _check_template(self) -> None:
        require(self.tensor is not None, f"sparse_mode {self.mode} needs atten_mask")
        assert self.tensor is not None
        require(self.tensor.dtype in (torch.bool, torch.uint8, torch.int8), f"atten_mask is {self.tensor.dtype}")
        require(tuple(self.tensor.shape[-2:]) == (TEMPLATE, TEMPLATE) and self.tensor.numel() == TEMPLATE**2,
                f"set the atten_mask shape to [{TEMPLATE}, {TEMPLATE}] in sparse_mode {self.mode}, "
                f"got {list(self.tensor.shape)}")  # fmt: skip
        if not layer.shape_pass():
            template = torch.ones(TEMPLATE, TEMPLATE, dtype=torch.bool).triu(1)
            require(torch.equal(self.tensor.reshape(TEMPLATE, TEMPLATE).bool(), template),
                    "the compressed atten_mask is not triu(diagonal=1); a device would compute nonsense")  # fmt: skip


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, hidden: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of ``[B, N, Sq, D]`` to ``[B, Nkv, Skv, D]`` in float32: output, row maximum, row sum."""
    group = query.shape[1] // key.shape[1]
    key, value = key.float().repeat_interleave(group, 1), value.float().repeat_interleave(group, 1)
    scores = query.float() @ key.transpose(-1, -2) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    maximum = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - maximum.masked_fill(maximum.isinf(), 0.0))
    total = weights.sum(-1, keepdim=True)
    return weights @ value / total.clamp(min=1e-38), maximum, total


def to_bnsd(tensor: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """View a tensor of one of the four padded layouts as ``[B, N, S, D]``."""
    require(layout in ("BNSD", "BSND", "BSH", "SBH"), f"input_layout {layout!r} is not emulated")
    require(tensor.dim() == len(layout), f"a tensor of shape {list(tensor.shape)} is not of layout {layout}")
    if layout == "BNSD":
        return tensor
    if layout == "BSND":
        return tensor.transpose(1, 2)
    split = tensor.reshape(*tensor.shape[:2], heads, -1)
    return split.transpose(1, 2) if layout == "BSH" else split.permute(1, 2, 0, 3)


def from_bnsd(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The inverse of :func:`to_bnsd`, contiguous."""
    if layout == "BNSD":
        return tensor.contiguous()
    if layout == "BSND":
        return tensor.transpose(1, 2).contiguous()
    if layout == "BSH":
        return tensor.transpose(1, 2).flatten(2)
    return tensor.permute(2, 0, 1, 3).flatten(2)


def _check_fusion(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int) -> None:
    """Refusals of npu_fusion_attention and npu_fusion_attention_v3, all in layout BNSD."""
    dtypes = (query.dtype, key.dtype, value.dtype)
    require(len(set(dtypes)) == 1 and dtypes[0] in (torch.float16, torch.bfloat16, torch.float32),
            f"query, key, value are {dtypes}; they must be float16, bfloat16 or float32, and the same")  # fmt: skip
    require(query.shape[1] == heads, f"head_num {heads} does not match query {list(query.shape)}")
    require(heads <= 256 and heads % key.shape[1] == 0, f"{heads} heads over {key.shape[1]} key/value heads")
    require(query.shape[3] == key.shape[3] >= value.shape[3] and query.shape[3] <= 768,
            f"head sizes {query.shape[3]}, {key.shape[3]}, {value.shape[3]}")  # fmt: skip
    require(key.shape[:3] == value.shape[:3] and key.shape[0] == query.shape[0], "batch or lengths disagree")
    require(max(query.shape[2], key.shape[2]) <= 1 << 20, "sequences are at most 1M long")


def _fusion(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], heads: int, layout: str, scale: float, mask: Mask
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = tensors
    at = _HEADS_AT.get(layout)
    kv_heads = key.shape[at] if at else key.shape[-1] * heads // query.shape[-1]
    q, k, v = to_bnsd(query, layout, heads), to_bnsd(key, layout, kv_heads), to_bnsd(value, layout, kv_heads)
    _check_fusion(q, k, v, heads)
    if mask.mode in (0, 1) and mask.tensor is not None:
        shapes = [(q.shape[0], heads), (q.shape[0], 1), (1, 1)]
        require(tuple(mask.tensor.shape[:-2]) in shapes, f"unsupported atten_mask shape {list(mask.tensor.shape)}")
    output, maximum, total = attend(q, k, v, scale, mask.hidden(q.shape[2], k.shape[2]))
    statistics = [row.expand(*row.shape[:-1], 8).contiguous() for row in (maximum, total)]
    return from_bnsd(output.to(query.dtype), layout), *statistics, torch.empty(0, dtype=query.dtype)


def _only_defaults(given: dict[str, Any], allowed: dict[str, Any]) -> None:
    for name, value in given.items():
        require(name in allowed and (value is None or value == allowed[name]), f"argument {name}={value} is not emulated")


_IGNORED = {  # arguments whose default, or whose listed value, changes nothing without dropout
    "pse": None, "padding_mask": None, "keep_prob": 1.0, "inner_precise": 0, "prefix": None, "actual_seq_qlen": None,
    "actual_seq_kvlen": None, "gen_mask_parallel": True, "sync": False, "softmax_layout": "", "sink": None,
    "dropout_mask": None, "seed": 0, "offset": 0,
}  # fmt: skip


@NPU.kernel("npu_fusion_attention")
def npu_fusion_attention(query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None,
                         scale=1.0, keep_prob=1.0, pre_tockens=UNBOUNDED, next_tockens=UNBOUNDED, inner_precise=0,
                         prefix=None, actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0, *rest, **options):  # fmt: skip
    require(not any(rest), f"positional arguments {rest} are not emulated")
    _only_defaults({"pse": pse, "padding_mask": padding_mask, "keep_prob": keep_prob, "inner_precise": inner_precise,
                    "prefix": prefix, "actual_seq_qlen": actual_seq_qlen, "actual_seq_kvlen": actual_seq_kvlen,
                    **options}, _IGNORED)  # fmt: skip
    mask = Mask(atten_mask, sparse_mode, pre_tockens, next_tockens)
    return *_fusion((query, key, value), head_num, input_layout, scale, mask), 0, 0, 0


@NPU.kernel("npu_fusion_attention_v3")
def npu_fusion_attention_v3(query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None,
                            scale=1.0, keep_prob=1.0, pre_tockens=UNBOUNDED, next_tockens=UNBOUNDED, inner_precise=0,
                            prefix=None, actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0, *rest, **options):  # fmt: skip
    require(input_layout == "BNSD", f"npu_fusion_attention_v3 in a graph supports layout BNSD, got {input_layout}")
    results = npu_fusion_attention(query, key, value, head_num, input_layout, pse, padding_mask, atten_mask, scale,
                                   keep_prob, pre_tockens, next_tockens, inner_precise, prefix, actual_seq_qlen,
                                   actual_seq_kvlen, sparse_mode, *rest, **options)  # fmt: skip
    return *results[:4], torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


@dataclass(frozen=True)
class Inference:
    """Arguments of the inference operator (FIA), under one name for both of its versions."""

    heads: int
    kv_heads: int
    scale: float
    layout: str
    mask: Mask
    query_lengths: list[int] | None
    key_lengths: list[int] | None
    block_table: torch.Tensor | None
    block_size: int
    statistics: bool

    def check(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Refusals that do not depend on contents."""
        dtypes = (torch.float16, torch.bfloat16, *((torch.float32,) if FLOAT32_ALLOWED else ()))
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            require(tensor.dtype in dtypes, f"{name} is {tensor.dtype}; float16 or bfloat16 only")
            require(tensor.is_contiguous(), f"{name} is not contiguous")
        size = query.shape[-1] if "H" not in self.layout else query.shape[-1] // self.heads
        require(size <= 512 and size % 16 == 0, f"head size {size} is not a multiple of 16 up to 512")
        require(self.heads % self.kv_heads == 0 and self.heads // self.kv_heads <= 64, "at most 64 heads per key/value head")
        if self.layout.startswith("TND"):
            require(size in (128, 192), f"layout TND takes head sizes 128 and 192, got {size}")
            require(self.query_lengths is not None, "layout TND needs actual_seq_lengths")
            assert self.query_lengths is not None
            require(self.query_lengths[-1] == query.shape[0],
                    f"the last of actual_seq_lengths is {self.query_lengths[-1]}, but there are {query.shape[0]} rows")  # fmt: skip
        if self.block_table is not None:
            require(self.block_size % 16 == 0 and self.block_size > 0, f"block_size {self.block_size}")

    def sequences(self, key: torch.Tensor, value: torch.Tensor, index: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[Nkv, L, D]`` of one sequence; ``start`` is where it begins in a packed tensor."""
        length = None if self.key_lengths is None else int(self.key_lengths[index])
        if self.block_table is not None:
            assert length is not None
            return tuple(self._paged(cache, self.block_table[index], length) for cache in (key, value))  # type: ignore[return-value]
        if self.layout.startswith("TND"):
            assert length is not None
            return key[start:length].transpose(0, 1), value[start:length].transpose(0, 1)
        both = (to_bnsd(tensor, self.layout, self.kv_heads)[index][:, :length] for tensor in (key, value))
        return tuple(both)  # type: ignore[return-value]

    def _paged(self, cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
        blocks = cache[table[: max(1, -(-length // self.block_size))].long()]
        return blocks.reshape(-1, self.kv_heads, cache.shape[-1] if cache.dim() == 4 else cache.shape[-1] // self.kv_heads)[
            :length
        ].transpose(0, 1)


def _inference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Inference) -> tuple[torch.Tensor, torch.Tensor]:
    options.check(query, key, value)
    if options.layout.startswith("TND"):
        return _packed(query, key, value, options)
    q = to_bnsd(query, options.layout, options.heads)
    output = torch.zeros(q.shape, dtype=query.dtype)
    statistics = torch.full((*q.shape[:3], 1), float("inf")) if options.statistics else torch.empty(0)
    for index in range(q.shape[0]):
        k, v = options.sequences(key, value, index, 0)
        rows = q.shape[2] if options.query_lengths is None else int(options.query_lengths[index])
        if rows == 0 or k.shape[1] == 0:
            continue
        mask = options.mask
        if mask.mode in (0, 1) and mask.tensor is not None:
            rectangles = mask.tensor.reshape(-1, *mask.tensor.shape[-2:])
            mask = Mask(rectangles[min(index, len(rectangles) - 1)][:rows, : k.shape[1]], mask.mode)
        # One query goes to the decode kernel, which ignores sparse_mode and masks by lengths alone.
        hidden = None if q.shape[2] == 1 and mask.mode in _COMPRESSED else mask.hidden(rows, k.shape[1])
        result, maximum, total = attend(q[index : index + 1, :, :rows], k[None], v[None], options.scale, hidden)
        output[index, :, :rows] = result[0].to(query.dtype)
        if options.statistics:
            statistics[index, :, :rows] = (maximum + total.log())[0]
    return from_bnsd(output, options.layout), statistics


def _packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Inference) -> tuple[torch.Tensor, torch.Tensor]:
    """Layout TND: sequences one after the other, ``actual_seq_lengths`` cumulative."""
    output = torch.zeros_like(query)
    statistics = torch.full((query.shape[0], options.heads, 1), float("inf")) if options.statistics else torch.empty(0)
    row = start = 0
    assert options.query_lengths is not None
    for index, end in enumerate(options.query_lengths):
        k, v = options.sequences(key, value, index, start)
        if options.block_table is None and options.key_lengths is not None:
            start = int(options.key_lengths[index])
        if end > row and k.shape[1]:
            q = query[row:end].transpose(0, 1)[None]
            hidden = options.mask.hidden(end - row, k.shape[1])
            result, maximum, total = attend(q, k[None], v[None], options.scale, hidden)
            output[row:end] = result[0].transpose(0, 1).to(query.dtype)
            if options.statistics:
                statistics[row:end] = (maximum + total.log())[0].transpose(0, 1)
        row = int(end)
    return output, statistics


@NPU.kernel("npu_fused_infer_attention_score")
def npu_fused_infer_attention_score(query, key, value, *, num_heads=1, num_key_value_heads=0, scale=1.0,
                                    input_layout="BSH", atten_mask=None, actual_seq_lengths=None,
                                    actual_seq_lengths_kv=None, block_table=None, block_size=0, sparse_mode=0,
                                    pre_tokens=UNBOUNDED, next_tokens=UNBOUNDED, softmax_lse_flag=False,
                                    inner_precise=0, workspace=None, **others):  # fmt: skip
    require(not any(value is not None and value not in (0, False) for value in others.values() if not torch.is_tensor(value))
            and not any(torch.is_tensor(value) for value in others.values()),
            f"arguments {sorted(others)} are not emulated")  # fmt: skip
    options = Inference(num_heads, num_key_value_heads or num_heads, scale, input_layout,
                        Mask(atten_mask, sparse_mode, pre_tokens, next_tokens), actual_seq_lengths,
                        actual_seq_lengths_kv, block_table, block_size, softmax_lse_flag)  # fmt: skip
    return _inference(query, key, value, options)


@NPU.kernel("npu_fused_infer_attention_score.out")
def npu_fused_infer_attention_score_out(query, key, value, *, out, **options):
    output, statistics = npu_fused_infer_attention_score(query, key, value, **options)
    out[0].copy_(output)
    if options.get("softmax_lse_flag"):
        out[1].copy_(statistics)
    return out[0], out[1]


@NPU.kernel("npu_fused_infer_attention_score_v2")
def npu_fused_infer_attention_score_v2(query, key, value, *, num_query_heads=1, softmax_scale=1.0, actual_seq_qlen=None,
                                       actual_seq_kvlen=None, return_softmax_lse=False, **options):  # fmt: skip
    return npu_fused_infer_attention_score(
        query, key, value, num_heads=num_query_heads, scale=softmax_scale, actual_seq_lengths=actual_seq_qlen,
        actual_seq_lengths_kv=actual_seq_kvlen, softmax_lse_flag=return_softmax_lse, **options)  # fmt: skip


@NPU.kernel("npu_fused_infer_attention_score_v2.out")
def npu_fused_infer_attention_score_v2_out(query, key, value, *, out, **options):
    output, statistics = npu_fused_infer_attention_score_v2(query, key, value, **options)
    out[0].copy_(output)
    if options.get("return_softmax_lse"):
        out[1].copy_(statistics)
    return out[0], out[1]


@NPU.kernel("_npu_fused_infer_attention_score_get_max_workspace")
@NPU.kernel("_npu_fused_infer_attention_score_v2_get_max_workspace")
@NPU.kernel("_npu_fusion_attention_v3_get_max_workspace")
def workspace(*_, **__):
    return torch.empty(1024, dtype=torch.uint8)


@NPU.kernel("_npu_fused_infer_attention_score_infer_output")
@NPU.kernel("_npu_fused_infer_attention_score_v2_infer_output")
def inferred_output(query, value, *, input_layout="BSH", **_):
    require("_" not in input_layout, f"input_layout {input_layout!r} is not emulated")
    return torch.empty(query.shape, dtype=query.dtype), torch.empty(1)


def register() -> None:
    """Register the kernels of this file."""
    NPU.register()
