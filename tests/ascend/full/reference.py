"""What the CPU makes of requests by the dtype rules of the operators that vllm-ascend calls.

In float32 these rules change nothing and the reference is the local engine as it is. In bfloat16 a fused operator
rounds once, where plain torch rounds after each step: norms, gated activation, rotation and attention of the talker are
replaced here by forms that compute wide and round at the end, and all matrix products round once. Written apart from
the emulator's kernels. The code predictor runs the package's own operators on every device, so it stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qwen3tts_hw.engine.local import LocalEngine, SpeechResult
from qwen3tts_hw.model import layers
from qwen3tts_hw.prompt.request import build_request
from qwen3tts_hw.settings import Settings

_plain_linear = nn.functional.linear


def attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """Attention ``[B, Hq, Sq, D]`` to ``[B, Hkv, Sk, D]`` in float64, one rounding; causal for more than one query."""
    group = query.shape[1] // key.shape[1]
    wide = [part.double().repeat_interleave(times, 1) for part, times in ((query, 1), (key, group), (value, group))]
    scores = wide[0] @ wide[1].mT * scale
    if query.shape[2] > 1:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ wide[2]).to(query.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x · Wᵀ + b``, half precision in float64 and rounded once."""
    if x.dtype == torch.float32:
        return _plain_linear(x, weight, bias)
    return _plain_linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)


class Norm(nn.Module):
    """npu_rms_norm: statistics and weight in float32, one rounding."""

    def __init__(self, norm: layers.RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., size]``."""
        wide = x.float()
        factors = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * factors * self.weight.float()).to(x.dtype)


class Layer(nn.Module):
    """A talker layer as vllm-ascend runs it: npu_rms_norm, _npu_rotary_embedding, npu_swiglu."""

    def __init__(self, layer: layers.DecoderLayer) -> None:
        super().__init__()
        self.plain = layer
        self.norms = nn.ModuleList(
            map(Norm, (layer.input_norm, layer.query_norm, layer.key_norm, layer.mlp_norm))  # type: ignore[arg-type]
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: layers.LayerCache, start: int) -> Tensor:
        """Run rows ``start ..`` of a sequence: ``x [1, S, width]``."""
        plain, config = self.plain, self.plain.config
        input_norm, query_norm, key_norm, mlp_norm = self.norms
        sizes = [plain.query_size, plain.kv_size, plain.kv_size]
        query, key, value = (
            part.unflatten(-1, (-1, config.head_dim)) for part in plain.qkv(input_norm(x)).split(sizes, dim=-1)
        )
        query, key = (rotate(part.transpose(1, 2), cos, sin) for part in (query_norm(query), key_norm(key)))
        keys, values = cache.append(key, value.transpose(1, 2), start)
        attended = plain.attention(query, keys, values, scale=config.head_dim**-0.5)
        x = x + plain.out(attended.transpose(1, 2).flatten(2))
        gate, up = plain.gate_up(mlp_norm(x)).float().chunk(2, dim=-1)
        mixed: Tensor = plain.down((nn.functional.silu(gate) * up).to(x.dtype))
        return x + mixed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``[B, heads, S, D]`` with tables ``[S, D]`` of its dtype, one rounding."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * cos.float() + turned * sin.float()).to(x.dtype)


@contextmanager
def once_rounded_products() -> Iterator[None]:
    """Let every linear map of the package round once."""
    nn.functional.linear = linear
    try:
        yield
    finally:
        nn.functional.linear = _plain_linear


def synthesize(checkpoint: Path, dtype: str, bodies: Sequence[dict[str, Any]]) -> list[SpeechResult]:
    """Results of requests, one after the other, on the CPU in ``dtype``."""
    settings = Settings(graphs="off", attention_op="sdpa", predictor="plain")
    engine = LocalEngine.load(checkpoint, device="cpu", dtype=dtype, settings=settings)
    if dtype != "float32":
        _round_once(engine)
    fields = ("voice", "temperature", "seed", "max_new_tokens")
    with once_rounded_products():
        return [
            engine.synthesize(
                build_request(engine.config, engine.settings, text=body["input"], **{key: body[key] for key in fields}),
                keep_hidden=True,
            )
            for body in bodies
        ]


def _round_once(engine: LocalEngine) -> None:
    """Put the forms of this file into a loaded engine."""
    talker = engine._talker
    for layer in (*talker.layers, *engine._predictor.layers):
        layer.attention = attention  # type: ignore[assignment]  # a function that is called like an attention op
    talker.layers = nn.ModuleList(Layer(layer) for layer in talker.layers)  # type: ignore[arg-type]
    talker.norm = Norm(talker.norm)  # type: ignore[assignment]
