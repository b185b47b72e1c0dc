"""Reference kernels of the fused attention operators, with the refusals that their documentation states.

Computed from what the arguments mean, in float32, or for half precision in float64 and rounded once; how the kernels
tile and round is not modelled. Written apart from the package's own reference
(qwen3tts_hw.attention_ops.npu_reference), so that the two can disagree.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ascend_emulator import layer
from ascend_emulator.reference import Call, References, require

NPU = References("npu")
UNBOUNDED = 2_147_483_647
TEMPLATE = 2048  # side of the compressed mask, whatever the sequence lengths
# A device refuses float32 here. Allowing it lets a whole server be compared exactly with a float32 reference, which
# shows that rows, positions and states are right; a run without it shows that the dtypes are.
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
        banded = self.mode == 0 and (self.before, self.after) != (UNBOUNDED, UNBOUNDED)
        require(not banded, "a band in sparse_mode 0 must agree with the mask; it is not emulated")
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
    """Attention of ``[B, N, Sq, D]`` to ``[B, Nkv, Skv, D]``: output, row maximum and row sum, the latter float32."""
    wide = torch.float32 if query.dtype == torch.float32 else torch.float64
    group = query.shape[1] // key.shape[1]
    key, value = key.to(wide).repeat_interleave(group, 1), value.to(wide).repeat_interleave(group, 1)
    scores = query.to(wide) @ key.transpose(-1, -2) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    maximum = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - maximum.masked_fill(maximum.isinf(), 0.0))
    total = weights.sum(-1, keepdim=True)
    return weights @ value / total.clamp(min=1e-38), maximum.float(), total.float()


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


_FUSION_ARGUMENTS = (
    "query", "key", "value", "head_num", "input_layout", "atten_mask", "scale", "pre_tockens", "next_tockens",
    "sparse_mode", "gen_mask_parallel", "sync", "out", "workspace",
)  # fmt: skip


@NPU.kernel("npu_fusion_attention")
def npu_fusion_attention(call: Call) -> tuple[torch.Tensor | int, ...]:
    """Attention with what a backward pass would need; dropout, packed and prefix layouts are not emulated."""
    call.uses_only(*_FUSION_ARGUMENTS)
    mask = Mask(call.atten_mask, call.sparse_mode, call.pre_tockens, call.next_tockens)
    tensors = (call.query, call.key, call.value)
    return *_fusion(tensors, call.head_num, call.input_layout, call.scale, mask), 0, 0, 0


@NPU.kernel("npu_fusion_attention_v3")
def npu_fusion_attention_v3(call: Call) -> tuple[torch.Tensor | int, ...]:
    """The same in the form for graphs: seed and offset are tensors."""
    require(
        call.input_layout == "BNSD", f"npu_fusion_attention_v3 takes layout BNSD in a graph, not {call.input_layout}"
    )
    seed = torch.zeros(1, dtype=torch.int64)
    return *npu_fusion_attention(call)[:4], seed, seed.clone()


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
        require(query.dtype == key.dtype == value.dtype or query.dtype not in dtypes, "dtypes must be the same")
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            require(tensor.dtype in dtypes, f"{name} is {tensor.dtype}; float16 or bfloat16 only")
            require(tensor.is_contiguous(), f"{name} is not contiguous")
        size = query.shape[-1] if "H" not in self.layout else query.shape[-1] // self.heads
        require(size <= 512 and size % 16 == 0, f"head size {size} is not a multiple of 16 up to 512")
        require(
            self.heads % self.kv_heads == 0 and self.heads // self.kv_heads <= 64, "at most 64 heads per key/value head"
        )
        if self.layout.startswith("TND"):
            require(size in (128, 192), f"layout TND takes head sizes 128 and 192, got {size}")
            require(self.query_lengths is not None, "layout TND needs actual_seq_lengths")
            assert self.query_lengths is not None
            end, rows = self.query_lengths[-1], query.shape[0]
            require(end == rows, f"the last of actual_seq_lengths is {end}, but there are {rows} rows")
        if self.block_table is not None:
            require(self.block_size % 16 == 0 and self.block_size > 0, f"block_size {self.block_size}")

    def sequences(
        self, key: torch.Tensor, value: torch.Tensor, index: int, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[Nkv, L, D]`` of one sequence; ``start`` is where it begins in a packed tensor."""
        length = None if self.key_lengths is None else int(self.key_lengths[index])
        if self.block_table is not None:
            assert length is not None
            table = self.block_table[index]
            return self._paged(key, table, length), self._paged(value, table, length)
        if self.layout.startswith("TND"):
            assert length is not None
            return key[start:length].transpose(0, 1), value[start:length].transpose(0, 1)
        keys, values = to_bnsd(key, self.layout, self.kv_heads), to_bnsd(value, self.layout, self.kv_heads)
        return keys[index][:, :length], values[index][:, :length]

    def _paged(self, cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
        blocks = cache[table[: max(1, -(-length // self.block_size))].long()]
        rows = blocks.reshape(blocks.shape[0] * blocks.shape[1], self.kv_heads, -1)
        return rows[:length].transpose(0, 1)


def _inference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Inference
) -> tuple[torch.Tensor, torch.Tensor]:
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


def _packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Inference
) -> tuple[torch.Tensor, torch.Tensor]:
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


_INFERENCE_ARGUMENTS = (
    "query", "key", "value", "num_heads", "num_key_value_heads", "scale", "input_layout", "atten_mask",
    "actual_seq_lengths", "actual_seq_lengths_kv", "block_table", "block_size", "sparse_mode", "pre_tokens",
    "next_tokens", "softmax_lse_flag", "inner_precise", "workspace", "out",
)  # fmt: skip
_RENAMED = {  # second version -> first
    "num_query_heads": "num_heads", "softmax_scale": "scale", "actual_seq_qlen": "actual_seq_lengths",
    "actual_seq_kvlen": "actual_seq_lengths_kv", "return_softmax_lse": "softmax_lse_flag",
}  # fmt: skip


@NPU.kernel("npu_fused_infer_attention_score")
@NPU.kernel("npu_fused_infer_attention_score.out")
@NPU.kernel("npu_fused_infer_attention_score_v2")
@NPU.kernel("npu_fused_infer_attention_score_v2.out")
def npu_fused_infer_attention_score(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The inference operator; the forms with ``out`` write there."""
    call.uses_only(*_INFERENCE_ARGUMENTS, *_RENAMED)
    for name, first in _RENAMED.items():
        if hasattr(call, name):
            setattr(call, first, getattr(call, name))
    options = Inference(
        heads=call.num_heads,
        kv_heads=call.num_key_value_heads or call.num_heads,
        scale=call.scale,
        layout=call.input_layout,
        mask=Mask(call.atten_mask, call.sparse_mode, call.pre_tokens, call.next_tokens),
        query_lengths=call.actual_seq_lengths,
        key_lengths=call.actual_seq_lengths_kv,
        block_table=call.block_table,
        block_size=call.block_size,
        statistics=call.softmax_lse_flag,
    )
    output, statistics = _inference(call.query, call.key, call.value, options)
    if not hasattr(call, "out"):
        return output, statistics
    call.out[0].copy_(output)
    if options.statistics:
        call.out[1].copy_(statistics)
    return call.out[0], call.out[1]


@NPU.kernel("_npu_fused_infer_attention_score_get_max_workspace")
@NPU.kernel("_npu_fused_infer_attention_score_v2_get_max_workspace")
@NPU.kernel("_npu_fusion_attention_v3_get_max_workspace")
def workspace(call: Call) -> torch.Tensor:
    """Scratch memory that nothing here needs."""
    return torch.empty(1024, dtype=torch.uint8)


@NPU.kernel("_npu_fused_infer_attention_score_infer_output")
@NPU.kernel("_npu_fused_infer_attention_score_v2_infer_output")
def inferred_output(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty results of the right shape, asked for while a graph is captured."""
    require("_" not in call.input_layout, f"input_layout {call.input_layout!r} is not emulated")
    return torch.empty(call.query.shape, dtype=call.query.dtype), torch.empty(1)


def register() -> None:
    """Register the kernels of this file."""
    NPU.register()
