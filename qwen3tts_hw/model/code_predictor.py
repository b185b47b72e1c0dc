"""The code predictor: from a talker hidden state and codebook 0's code to the 15 residual codes of one frame.

A 5-layer decoder that starts from an empty cache in every frame: two rows at once (hidden, code 0), then 14 single
rows. The whole frame is one call without host reads, made to be captured. Attention is dense over at most 17 cached
rows. What is written here is the reference; a fast form of kernels may stand in for it once the weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from qwen3tts_hw import predictor_kernels
from qwen3tts_hw.attention_ops.base import AttentionOp
from qwen3tts_hw.backends import Backend
from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.model.embeddings import CodeEmbedder
from qwen3tts_hw.model.layers import DecoderLayer, LayerCache, Linear, RMSNorm, rotary_table
from qwen3tts_hw.model.sampling import SamplingRows, choose
from qwen3tts_hw.predictor_kernels import BegunFrame, FastPredictor, LayerWeights, PredictorWeights
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS

CACHE_SLOTS = NUM_CODEBOOKS + 1  # 16 rows are used; one spare keeps the size the field knows


class CodePredictor(nn.Module):
    """Residual codes of a frame.

    Build with ``max_rows``, the largest batch of one call: the key/value cache is allocated once, then reused by every
    frame. The embedding tables belong to the talker's :class:`CodeEmbedder`; they are used, not owned.
    """

    cos: Tensor
    sin: Tensor
    candidates: Tensor

    def __init__(
        self,
        config: ModelConfig,
        embedder: CodeEmbedder,
        attention: AttentionOp,
        *,
        max_rows: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        stack = config.predictor
        self._stack = stack
        self._embedder = [embedder]  # in a list: not a submodule, its parameters are the talker's
        self.max_rows = max_rows
        self.projection = (
            Linear(config.talker.hidden_size, stack.hidden_size, bias=True, device=device, dtype=dtype)
            if config.has_projection
            else None
        )
        self.layers = nn.ModuleList(
            DecoderLayer(stack, attention, device=device, dtype=dtype) for _ in range(stack.num_layers)
        )
        self.norm = RMSNorm(stack.hidden_size, stack.rms_norm_eps, device=device, dtype=dtype)
        self.heads = nn.ModuleList(
            Linear(stack.hidden_size, CODEBOOK_SIZE, device=device, dtype=dtype) for _ in range(NUM_CODEBOOKS - 1)
        )
        cos, sin = rotary_table(CACHE_SLOTS, stack.head_dim, stack.rope_theta, device=device, dtype=dtype)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer(
            "candidates", torch.arange(CODEBOOK_SIZE, device=device, dtype=torch.int32), persistent=False
        )
        shape = (stack.num_layers, 2, max_rows, stack.num_kv_heads, CACHE_SLOTS, stack.head_dim)
        self._cache = torch.zeros(shape, device=device, dtype=dtype)
        self.fast: FastPredictor | None = None
        self._calls: list[Callable[..., Tensor]] = list(self.layers)  # a list: not registered as submodules again
        self.form = "plain"

    def adopt(self, form: str, backend: Backend) -> None:
        """Run in the form of that name from now on ("auto": the backend's choice).

        Call it once the weights are loaded, and again after they change. Raises UnsupportedError.
        """
        self.form = predictor_kernels.resolve(form, backend)
        fast = predictor_kernels.create(self.form, backend)
        self.fast = None if fast is None else fast.build(self._weights(), self.max_rows)
        compiled = self.form == "compiled"
        self._calls = [torch.compile(layer) if compiled else layer for layer in self.layers]

    def forward(self, hidden: Tensor, code0: Tensor, rows: SamplingRows, key: Tensor) -> Tensor:
        """Codes 1..15 ``[B, 15] int64`` from ``hidden [B, H]``, ``code0 [B] int64``, sampling and key ``[B] int32``."""
        assert hidden.shape[0] <= self.max_rows
        if self.fast is not None:
            begun = BegunFrame(code0, key, rows.temperature, rows.top_k, rows.top_p)
            return self.fast.residual_codes(hidden, code0, begun)
        embedder = self._embedder[0]
        caches = [LayerCache(*pair[:, : hidden.shape[0]]) for pair in self._cache]
        x = self._run(torch.stack([hidden, embedder.rows(0, code0)], dim=1), 0, caches)
        codes: list[Tensor] = []
        for group in range(1, NUM_CODEBOOKS):
            logits = self.logits(x, group)
            codes.append(choose(logits, rows, key, group, self.candidates))
            if group < NUM_CODEBOOKS - 1:
                x = self._run(embedder.rows(group, codes[-1])[:, None], group + 1, caches)
        return torch.stack(codes, dim=1)

    def logits(self, x: Tensor, group: int) -> Tensor:
        """Logits ``[B, 2048] float32`` of codebook ``group`` (1..15) from the last row of the output ``[B, S, C]``."""
        logits: Tensor = self.heads[group - 1](self.norm(x[:, -1]))
        return logits.float()

    def _run(self, rows: Tensor, start: int, caches: list[LayerCache]) -> Tensor:
        """Push talker-wide rows ``[B, S, H]`` at positions ``start ..`` through projection and layers."""
        x = rows if self.projection is None else self.projection(rows)
        end = start + rows.shape[1]
        cos, sin = self.cos[start:end], self.sin[start:end]
        for layer, cache in zip(self._calls, caches, strict=True):
            x = layer(x, cos, sin, cache, start)
        return x

    @torch.no_grad()
    def _weights(self) -> PredictorWeights:
        """What a fast form is built over; the tables are projected here, with the plain form's arithmetic."""
        projection, config = self.projection, self._stack
        heads = torch.stack([*self.heads.parameters()])
        tables = heads.new_empty(NUM_CODEBOOKS, CODEBOOK_SIZE, config.hidden_size)
        for codebook, table in enumerate(tables):
            rows = self._embedder[0].codebook(codebook)[:CODEBOOK_SIZE]
            table.copy_(rows if projection is None else projection(rows))
        return PredictorWeights(
            layers=[_layer_weights(layer) for layer in self.layers],
            norm=self.norm.weight,
            heads=heads,
            tables=tables,
            projection=None if projection is None else projection.weight,
            projection_bias=None if projection is None else projection.bias,
            cos=self.cos,
            sin=self.sin,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            eps=config.rms_norm_eps,
        )


def _layer_weights(layer: nn.Module) -> LayerWeights:
    assert isinstance(layer, DecoderLayer)
    return LayerWeights(
        input_norm=layer.input_norm.weight,
        qkv=layer.qkv.weight,
        query_norm=layer.query_norm.weight,
        key_norm=layer.key_norm.weight,
        out=layer.out.weight,
        mlp_norm=layer.mlp_norm.weight,
        gate_up=layer.gate_up.weight,
        down=layer.down.weight,
    )
