"""npu_fusion_attention in plain torch: its documented semantics and refusals, for any device.

Owns what the operator means, so that the calls of :mod:`.npu_fusion` can be compared with torch's own attention where
there is no Ascend device. The compressed mask is really used as the kernel uses it, as a template read through windows,
so a wrong template gives a wrong result here too. Not modelled: dropout, prefix and packed (TND) modes, rounding inside
the kernel, and the six results beside the output. Follows the operator documentation of Ascend/op-plugin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import torch

from qwen3tts_hw.errors import AttentionMaskError, UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Unpack

UNBOUNDED = 2_147_483_647  # the operator's default for pre_tockens and next_tockens
TEMPLATE_SIZE = 2048
_WINDOW = 128  # side of the blocks that the template is read in; any size up to half the template gives the same
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_HEADS = 256
_MAX_HEAD_DIM = 768
_MAX_LENGTH = 1_048_576
_LAYOUTS = ("BNSD", "BSND", "BSH", "SBH")


class MaskArguments(TypedDict, total=False):
    """The operator's keyword arguments that decide what is visible, in its own spelling."""

    atten_mask: torch.Tensor | None
    sparse_mode: int
    pre_tockens: int
    next_tockens: int


@dataclass(frozen=True, slots=True)
class MaskOptions:
    """The same with the operator's defaults, and the lengths they apply to."""

    num_queries: int
    num_keys: int
    atten_mask: torch.Tensor | None = None
    sparse_mode: int = 0
    pre_tockens: int = UNBOUNDED
    next_tockens: int = UNBOUNDED


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    scale: float = 1.0,
    **mask_arguments: Unpack[MaskArguments],
) -> torch.Tensor:
    """Return the operator's attention output, in the layout and dtype of ``query``.

    Raises AttentionMaskError for a mask, mode or band that is refused, UnsupportedError for a layout, dtype or size.
    """
    head_dim = _check_query(query, head_num, input_layout)
    queries, keys, values = (_to_bnsd(tensor, input_layout, head_dim) for tensor in (query, key, value))
    _check_heads(queries, keys, values, head_num)
    options = MaskOptions(queries.shape[2], keys.shape[2], **mask_arguments)
    visible = visible_keys(options, queries.shape[0], head_num)
    group = head_num // keys.shape[1]
    scores = queries.float() @ keys.float().repeat_interleave(group, dim=1).mT * scale  # [B, N, Sq, Skv]
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    weights = scores.softmax(dim=-1)
    if visible is not None:
        # A query that sees no key gives zeros: the operator switches its handling of such rows on by itself.
        weights = weights.masked_fill(~visible, 0.0)
    output = (weights @ values.float().repeat_interleave(group, dim=1)).to(query.dtype)
    return _from_bnsd(output, input_layout)


def visible_keys(options: MaskOptions, batch: int, heads: int) -> torch.Tensor | None:
    """Which keys each query sees, bool and broadcastable to ``[B, N, Sq, Skv]``; None if all see all."""
    offset = options.num_keys - options.num_queries
    mode = options.sparse_mode
    if mode == 0:
        return None if options.atten_mask is None else _full_mask(options, batch, heads, check_band=True)
    if mode == 1:
        return _full_mask(options, batch, heads, check_band=False)
    if mode == 2:
        return ~_window(options, 0)
    if mode == 3:
        return ~_window(options, offset)
    if mode == 4:
        too_new = _window(options, offset + options.next_tockens)
        recent = _window(options, offset - options.pre_tockens - 1)  # what the past's edge masks is what is kept
        return ~too_new & recent
    raise AttentionMaskError(f"sparse_mode is {mode}; modelled here: 0 to 4 (5 to 8 are for prefix and packed layouts)")


def _window(options: MaskOptions, offset: int) -> torch.Tensor:
    """Read the template for key > query + offset, block by block, as the kernel's tiling does."""
    template = _template(options)
    rows = torch.arange(options.num_queries, device=template.device)[:, None]
    columns = torch.arange(options.num_keys, device=template.device)[None, :]
    in_row, in_column = rows % _WINDOW, columns % _WINDOW
    distance = (rows - in_row) + offset - (columns - in_column)  # of the block's corner to the diagonal
    return template[
        distance.clamp(0, _WINDOW) + in_row,
        (-distance).clamp(0, _WINDOW) + in_column,
    ]


def _template(options: MaskOptions) -> torch.Tensor:
    mask = options.atten_mask
    if mask is None:
        raise AttentionMaskError(f"sparse_mode {options.sparse_mode} needs an atten_mask")
    _check_mask_dtype(mask)
    if tuple(mask.shape[-2:]) != (TEMPLATE_SIZE, TEMPLATE_SIZE) or mask.numel() != TEMPLATE_SIZE**2:
        raise AttentionMaskError(
            f"atten_mask has shape {list(mask.shape)}; in the compressed modes it must be "
            f"[{TEMPLATE_SIZE}, {TEMPLATE_SIZE}]"
        )
    return mask.reshape(TEMPLATE_SIZE, TEMPLATE_SIZE).bool()


def _full_mask(options: MaskOptions, batch: int, heads: int, *, check_band: bool) -> torch.Tensor:
    mask = options.atten_mask
    if mask is None:
        raise AttentionMaskError(f"sparse_mode {options.sparse_mode} needs an atten_mask")
    _check_mask_dtype(mask)
    tail = (options.num_queries, options.num_keys)
    if tuple(mask.shape) not in ((batch, heads, *tail), (batch, 1, *tail), (1, 1, *tail)):
        raise AttentionMaskError(
            f"unsupported atten_mask shape {list(mask.shape)}; supported: [B, N, Sq, Skv], [B, 1, Sq, Skv], "
            f"[1, 1, Sq, Skv] with B = {batch}, N = {heads}, Sq = {tail[0]}, Skv = {tail[1]}"
        )
    visible = ~mask.bool()
    if check_band:
        ahead = torch.arange(tail[1], device=mask.device)[None] - torch.arange(tail[0], device=mask.device)[:, None]
        outside = (ahead > options.next_tockens) | (-ahead > options.pre_tockens)
        if bool((visible & outside).any()):
            raise AttentionMaskError(
                f"atten_mask keeps positions outside the band of pre_tockens {options.pre_tockens} and next_tockens "
                f"{options.next_tockens}; in sparse_mode 0 the two must agree"
            )
    return visible


def _check_mask_dtype(mask: torch.Tensor) -> None:
    if mask.dtype not in (torch.bool, torch.uint8):
        raise AttentionMaskError(f"atten_mask has dtype {mask.dtype}; supported: torch.bool, torch.uint8")


def _check_query(query: torch.Tensor, head_num: int, layout: str) -> int:
    """Check the layout against the query and return the size of one head."""
    if layout not in _LAYOUTS:
        raise UnsupportedError(f"input_layout is {layout!r}; modelled here: {', '.join(_LAYOUTS)}")
    if query.dim() != len(layout):
        raise UnsupportedError(f"query has shape {list(query.shape)}, which is not layout {layout}")
    if "H" in layout and query.shape[2] % head_num:
        raise UnsupportedError(f"query has {query.shape[2]} features, not a multiple of head_num {head_num}")
    return query.shape[2] // head_num if "H" in layout else query.shape[3]


def _check_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int) -> None:
    """Check sizes and dtypes, all in layout BNSD."""
    if query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype:
        raise UnsupportedError(
            f"query, key, value have dtypes {query.dtype}, {key.dtype}, {value.dtype}; "
            f"they must be one of float16, bfloat16, float32, and the same"
        )
    if query.shape[1] != head_num or head_num > _MAX_HEADS or head_num % key.shape[1]:
        raise UnsupportedError(
            f"{query.shape[1]} query heads, {key.shape[1]} key heads, head_num {head_num}: head_num must be the query "
            f"heads, a multiple of the key heads, and at most {_MAX_HEADS}"
        )
    if key.shape[3] != query.shape[3] or value.shape[3] > key.shape[3] or query.shape[3] > _MAX_HEAD_DIM:
        raise UnsupportedError(
            f"head sizes {query.shape[3]}, {key.shape[3]}, {value.shape[3]}: query and key must agree, value may be "
            f"smaller, and the largest is {_MAX_HEAD_DIM}"
        )
    if key.shape[:3] != value.shape[:3] or key.shape[0] != query.shape[0]:
        raise UnsupportedError(
            f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)} disagree on batch or length"
        )
    if max(query.shape[2], key.shape[2]) > _MAX_LENGTH:
        raise UnsupportedError(f"sequences are at most {_MAX_LENGTH} long")


def _to_bnsd(tensor: torch.Tensor, layout: str, head_dim: int) -> torch.Tensor:
    if tensor.dim() != len(layout):
        raise UnsupportedError(f"a tensor of shape {list(tensor.shape)} is not of layout {layout}")
    if layout == "BNSD":
        return tensor
    if layout == "BSND":
        return tensor.transpose(1, 2)
    batch_first = tensor if layout == "BSH" else tensor.transpose(0, 1)
    return batch_first.reshape(*batch_first.shape[:2], -1, head_dim).transpose(1, 2)


def _from_bnsd(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "BNSD":
        return tensor
    tokens_first = tensor.transpose(1, 2)  # [B, S, N, D]
    if layout == "BSND":
        return tokens_first.contiguous()
    flat = tokens_first.flatten(2)
    return flat if layout == "BSH" else flat.transpose(0, 1).contiguous()
