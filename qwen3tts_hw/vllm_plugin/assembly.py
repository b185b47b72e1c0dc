"""The composition root: settings and checkpoint in, backend, attention op, graph wrapper and modules out.

The only place that chooses implementations for a vLLM worker; everything below gets what it needs as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from qwen3tts_hw import attention_ops, backends, codec_kernels, graph_wrappers
from qwen3tts_hw.backends import Backend
from qwen3tts_hw.checkpoint.reader import resolve_directory
from qwen3tts_hw.codec.decoder import CodecDecoder
from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.engine.audio import AudioPump
from qwen3tts_hw.engine.codec_steps import CodecSteps
from qwen3tts_hw.engine.frame_step import FrameStep, frame_buckets, frame_step_inputs
from qwen3tts_hw.engine.speech_engine import SpeechEngine
from qwen3tts_hw.engine.state import SlotTable
from qwen3tts_hw.engine.voice_encoder import VoiceEncoder
from qwen3tts_hw.errors import UnsupportedError
from qwen3tts_hw.model.code_predictor import CodePredictor
from qwen3tts_hw.model.embeddings import CodeEmbedder, TextEmbedder
from qwen3tts_hw.model.sampling_check import check_hash
from qwen3tts_hw.settings import Settings
from qwen3tts_hw.vllm_plugin.choices import settings_of
from qwen3tts_hw.vllm_plugin.transport import AudioOutbox


@dataclass(frozen=True, slots=True)
class SpeechParts:
    """What one worker is made of."""

    settings: Settings
    config: ModelConfig
    dtype: torch.dtype
    backend: Backend
    attention_name: str
    text_embedder: TextEmbedder
    code_embedder: CodeEmbedder
    predictor: CodePredictor
    codec_backend: Backend  # the talker's, unless the codec has a device of its own
    codec: CodecDecoder
    voice_encoder: VoiceEncoder | None  # of Base checkpoints

    def check_reload(self) -> None:
        """Refuse weights where the first ones could not be replaced; raises UnsupportedError."""
        self.backend.check_reload()
        if self.predictor.fast is not None or self.codec.is_fast:
            raise UnsupportedError(
                "weights of a running server cannot be replaced while fused kernels run, which keep copies of them; "
                "restart the server, or start it with the settings predictor=plain and codec_kernels=plain"
            )


def build_parts(vllm_config: Any) -> SpeechParts:
    """Build all modules of ours, without weights, on vLLM's device and in its dtype."""
    settings = settings_of(vllm_config)
    directory = resolve_directory(vllm_config.model_config.model, vllm_config.model_config.revision)
    config = ModelConfig.from_directory(directory)
    device = torch.device(vllm_config.device_config.device)
    backend = backends.resolve(device.type)
    backend.prepare_process()
    backend.choose_weight_layout(settings.weight_layout)
    check_hash(device)
    codec_backend = backends.resolve_device(settings.codec_device) if settings.codec_device else backend
    dtype = vllm_config.model_config.dtype
    attention = attention_ops.create(settings.attention_op, backend)
    codes = CodeEmbedder(config, device=device, dtype=dtype)
    streams = vllm_config.scheduler_config.max_num_seqs
    rows = max(streams, *frame_buckets(streams))
    return SpeechParts(
        settings=settings,
        config=config,
        dtype=dtype,
        backend=backend,
        attention_name=attention.name,
        text_embedder=TextEmbedder(config, device=device, dtype=dtype),
        code_embedder=codes,
        predictor=CodePredictor(config, codes, attention, max_rows=rows, device=device, dtype=dtype),
        codec_backend=codec_backend,
        codec=CodecDecoder(config.codec, codec_backend.device, getattr(torch, settings.codec_dtype)),
        voice_encoder=VoiceEncoder(config, backend) if config.variant == "base" else None,
    )


def build_engine(parts: SpeechParts, table: SlotTable, outbox: AudioOutbox) -> SpeechEngine:
    """Join the loaded modules to a running engine."""
    settings = parts.settings
    form = codec_kernels.create(
        settings.codec_kernels, parts.codec_backend, precision=settings.codec_precision, dtype=settings.codec_dtype
    )
    if form is not None:
        parts.codec.use(form)
    wrap = graph_wrappers.create(settings.graphs, parts.codec_backend)
    primed = settings.voices_primed if parts.config.variant == "base" else 0
    pump = AudioPump(
        table,
        CodecSteps(parts.codec, table.num_slots + 1, wrap, most_rows=settings.codec_rows, snapshots=primed),
        parts.codec_backend,
        outbox.send,
        first_frames=settings.first_chunk_frames,
        steady_frames=settings.chunk_frames,
    )
    urgent = graph_wrappers.create(settings.graphs, parts.backend, priority="high")
    step = urgent(
        FrameStep(parts.config, table, parts.predictor),
        buckets=frame_buckets(table.num_slots),
        inputs=frame_step_inputs(parts.config, table, hidden_dtype=parts.dtype, logits_dtype=parts.dtype),
        name="frame step",
    )
    return SpeechEngine(table, step, pump, parts.backend, trace=settings.trace)
