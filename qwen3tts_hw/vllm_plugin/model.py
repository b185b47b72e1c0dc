"""The model class vLLM loads, one for every platform: vLLM's own layers for the talker, ours for everything else.

``forward`` is a look-up and a stack: each row finds its input in the slot table by (slot, position). Frames are made
after the talker, by the frame step, so that nothing of ours nests in vLLM's graphs. The row-to-slot map and the stack's
input live in persistent buffers: captured graphs read them at fixed addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.qwen2 import Qwen2Model
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer
from vllm.model_executor.models.utils import PPMissingLayer, maybe_prefix

from qwen3tts_hw.checkpoint.inventory import main_tensors
from qwen3tts_hw.checkpoint.reader import open_checkpoint, resolve_directory
from qwen3tts_hw.engine.input_rows import input_rows
from qwen3tts_hw.engine.state import SlotTable
from qwen3tts_hw.errors import CheckpointError
from qwen3tts_hw.model.weights import embedding_targets, is_talker_stack, load, predictor_targets
from qwen3tts_hw.vllm_plugin.assembly import SpeechParts, build_parts

_PACKED = (  # part of a checkpoint name, vLLM's packed parameter, shard
    (".q_proj.", ".qkv_proj.", "q"),
    (".k_proj.", ".qkv_proj.", "k"),
    (".v_proj.", ".qkv_proj.", "v"),
    (".gate_proj.", ".gate_up_proj.", 0),
    (".up_proj.", ".gate_up_proj.", 1),
)


@support_torch_compile(
    dynamic_arg_dims={"input_ids": 0, "positions": -1, "intermediate_tensors": 0, "inputs_embeds": 0}
)
class TalkerStack(Qwen2Model):
    """The compiled region: only the paged-attention stack, fed with embeddings."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, decoder_layer_type=Qwen3DecoderLayer)
        self.embed_tokens = PPMissingLayer()  # rows come from the slot table


class Qwen3TTSForConditionalGeneration(nn.Module):
    """Talker on vLLM's layers plus embeddings, code predictor and codec in plain torch."""

    packed_modules_mapping = {  # noqa: RUF012  # vLLM reads it from the class
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        scheduler, device = vllm_config.scheduler_config, torch.device(vllm_config.device_config.device)
        self.parts: SpeechParts = build_parts(vllm_config)
        # Modules of ours stay in ``parts``, out of vLLM's module tree: to load other weights into a running server, it
        # moves the tree's parameters away and expects each to come back through a loader of its own.
        config = self.parts.config
        self._model_config = vllm_config.model_config  # names the folder to load from, which may change
        self.talker = TalkerStack(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "talker"))
        self.codec_head = ParallelLMHead(
            config.talker_vocab_size, config.talker.hidden_size, prefix=maybe_prefix(prefix, "codec_head")
        )
        self.logits_processor = LogitsProcessor(config.talker_vocab_size)
        self.sampled_hidden: Tensor | None = None
        self.table = SlotTable(
            scheduler.max_num_seqs,
            vllm_config.model_config.max_model_len,
            self.parts.backend,
            speaker_width=config.speaker_embedding_size,
            speaker_dtype=self.parts.dtype,
        )
        sizes = vllm_config.compilation_config.cudagraph_capture_sizes or [0]
        rows = max(scheduler.max_num_batched_tokens, *sizes, scheduler.max_num_seqs)
        self.row_slots = torch.full((rows,), self.table.scratch, dtype=torch.int64, device=device)
        self._inputs = torch.zeros(rows, config.talker.hidden_size, dtype=self.parts.dtype, device=device)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Rows of codebook 0's vocabulary; vLLM's interface asks for it, ``forward`` does not use it."""
        return self.parts.code_embedder.rows(0, input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Hidden states ``[n, H]`` of the scheduled rows; token ids are ignored, the slot table knows the inputs."""
        parts, count = self.parts, positions.shape[-1]
        self._inputs[:count] = input_rows(
            self.table, parts.text_embedder, parts.code_embedder, self.row_slots[:count], positions.to(torch.int64)
        )
        return self.talker(None, positions, None, self._inputs[:count])

    def get_model_state_cls(self) -> type:
        """The model state for Model Runner V2."""
        from qwen3tts_hw.vllm_plugin.model_state import SpeechModelState

        return SpeechModelState

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits ``[B, V]`` of codebook 0; the rows' hidden states are kept for the frame step that follows."""
        self.sampled_hidden = hidden_states
        return self.logits_processor(self.codec_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load vLLM's main weights and the codec's from its folder; every tensor must find its place."""
        parts = self.parts
        parts.check_reload()
        expected = {name for name in main_tensors(parts.config) if is_talker_stack(name)}
        targets = embedding_targets(parts.text_embedder, parts.code_embedder)
        targets.update(predictor_targets(parts.predictor))
        load(self._load_stack(weights, expected), targets)
        if expected:
            raise CheckpointError(f"the checkpoint lacks talker tensors: {', '.join(sorted(expected)[:5])}")
        directory = resolve_directory(self._model_config.model, self._model_config.revision)
        checkpoint = open_checkpoint(directory)
        parts.codec.load_weights(checkpoint.iter_codec())
        if parts.voice_encoder is not None:
            parts.voice_encoder.load(checkpoint)
        parts.backend.prepare_weights(parts.predictor)
        parts.codec_backend.prepare_weights(parts.codec)
        parts.predictor.adopt(parts.settings.predictor, parts.backend)
        return {name for name, _ in self.named_parameters()}

    def _load_stack(self, weights: Iterable[tuple[str, Tensor]], expected: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Hand the talker stack's tensors to vLLM's layers and pass all others on."""
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if not is_talker_stack(name):
                yield name, tensor
                continue
            expected.discard(name)
            local = name.removeprefix("talker.").replace("model.", "talker.", 1)
            for part, packed, shard in _PACKED:
                if part in local:
                    parameter = parameters[local.replace(part, packed)]
                    parameter.weight_loader(parameter, tensor, shard)  # type: ignore[attr-defined]  # set by vLLM
                    break
            else:
                parameter = parameters[local]
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
