"""The local engine: one process, one request at a time, no vLLM. For library calls, the command line and parity tests.

It runs the same slot table, frame step, code predictor and codec as the server, over a plain-torch talker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3tts_hw import attention_ops, backends, graph_wrappers, predictor_kernels
from qwen3tts_hw.backends import Backend
from qwen3tts_hw.checkpoint.reader import Checkpoint, open_checkpoint
from qwen3tts_hw.codec.decoder import CodecDecoder
from qwen3tts_hw.engine.frame_step import FrameStep, frame_step_inputs
from qwen3tts_hw.engine.input_rows import input_rows
from qwen3tts_hw.engine.state import Admission, SlotTable
from qwen3tts_hw.engine.voice_encoder import VoiceEncoder
from qwen3tts_hw.errors import GenerationError, UnsupportedError
from qwen3tts_hw.model.code_predictor import CodePredictor
from qwen3tts_hw.model.embeddings import CodeEmbedder, TextEmbedder
from qwen3tts_hw.model.sampling_check import check_hash
from qwen3tts_hw.model.talker import Talker
from qwen3tts_hw.model.weights import embedding_targets, load, predictor_targets, talker_targets
from qwen3tts_hw.prompt.layout import build_layout, frames_left
from qwen3tts_hw.prompt.request import SpeechRequest
from qwen3tts_hw.prompt.tokenizer import TextTokenizer
from qwen3tts_hw.settings import Settings, kernels_folder
from qwen3tts_hw.types import NUM_CODEBOOKS, SAMPLES_PER_FRAME, ClonedVoice, EncodedVoice, FinishReason

DECODED_FRAMES = 100  # per codec step of a whole request: 8 s of audio
FRAMES_PER_CHECK = 8  # the host asks the device whether a request has ended once per this many frames
PRIMED_FRAMES = 8  # of reference audio, per codec step
DTYPES = ("float32", "bfloat16")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class SpeechResult:
    """A finished request: ``codes [T, 16] int64``, ``pcm [T*1920] float32`` at 24 kHz, why it ended.

    ``hidden [T, H] float32`` holds the talker state behind each frame if it was asked for.
    """

    codes: NDArray[np.int64]
    pcm: NDArray[np.float32]
    finish_reason: FinishReason
    prompt_rows: int
    hidden: NDArray[np.float32] | None = None


class LocalEngine:
    """A loaded checkpoint that turns requests into audio, one after the other."""

    def __init__(self, checkpoint: Checkpoint, backend: Backend, dtype: torch.dtype, settings: Settings) -> None:
        self.config, self.backend, self.dtype, self.settings = checkpoint.config, backend, dtype, settings
        backend.choose_weight_layout(settings.weight_layout)
        predictor_kernels.resolve(settings.predictor, backend)  # what cannot be is said before weights are read
        wrap = graph_wrappers.create(settings.graphs, backend)
        check_hash(backend.device)
        device = backend.device
        attention = attention_ops.create(settings.attention_op, backend)
        self.attention_name = attention.name
        self.tokenizer = TextTokenizer.from_directory(checkpoint.directory)
        self._text = TextEmbedder(self.config, device=device, dtype=dtype)
        self._codes = CodeEmbedder(self.config, device=device, dtype=dtype)
        self._talker = Talker(self.config, attention, device=device, dtype=dtype)
        self._predictor = CodePredictor(self.config, self._codes, attention, max_rows=1, device=device, dtype=dtype)
        self._codec = CodecDecoder(self.config.codec, device, getattr(torch, settings.codec_dtype))
        self._load(checkpoint)
        self._codec_state = self._codec.new_state(1)
        self._turn = 0  # number of the request that the slot, the caches and the codec state belong to
        self._checkpoint = checkpoint
        self._voice_encoder: VoiceEncoder | None = None
        width = self.config.speaker_embedding_size
        self._table = SlotTable(1, self.config.max_positions, backend, speaker_width=width, speaker_dtype=dtype)
        self._step = FrameStep(self.config, self._table, self._predictor)
        inputs = frame_step_inputs(self.config, self._table, hidden_dtype=dtype, logits_dtype=torch.float32)
        self._frame = wrap(self._step, buckets=(1,), inputs=inputs, name="frame step")
        with backend.keeping_kernels(kernels_folder(settings)):
            self._frame.capture()

    @classmethod
    def load(
        cls, directory: str | Path, *, device: str = "auto", dtype: str | None = None, settings: Settings | None = None
    ) -> LocalEngine:
        """Check and load a checkpoint directory.

        ``device`` is auto, cpu, cuda or npu; ``dtype`` float32, bfloat16 or None for the device's default. Raises
        ConfigError, CheckpointError or UnsupportedError.
        """
        backend = backends.resolve(device)
        if dtype is not None and dtype not in DTYPES:
            raise UnsupportedError(f"dtype {dtype!r} is not supported; choose one of {', '.join(DTYPES)}")
        backend.prepare_process()
        checkpoint = open_checkpoint(directory)
        checkpoint.check()
        chosen = backend.default_dtype if dtype is None else getattr(torch, dtype)
        return cls(checkpoint, backend, chosen, settings or Settings.resolve())

    @property
    def graph_mode(self) -> str:
        """Whether the frame step is replayed from a device graph or run eagerly."""
        return self._frame.mode

    def synthesize(
        self, request: SpeechRequest, *, keep_hidden: bool = False, progress: Progress | None = None
    ) -> SpeechResult:
        """Generate a whole request. ``progress`` is called with (frames made, frame limit)."""
        hidden: list[Tensor] = []
        blocks = list(self._generate(request, hidden if keep_hidden else None, progress))
        codes = torch.cat([block for block, _ in blocks]) if blocks else torch.zeros(0, 16, dtype=torch.int64)
        pcm = torch.zeros(0)
        if len(codes):
            reference = self._reference(request)
            pcm = self._decode(torch.cat((reference, codes)))[SAMPLES_PER_FRAME * len(reference) :]
        return SpeechResult(
            codes=codes.numpy(),
            pcm=pcm.numpy(),
            finish_reason=blocks[-1][1] if blocks else FinishReason.STOP,
            prompt_rows=int(self._table.prompt_rows[0]),
            hidden=torch.stack(hidden[: len(codes)]).numpy() if keep_hidden and hidden else None,
        )

    def stream(self, request: SpeechRequest) -> Iterator[NDArray[np.float32]]:
        """Yield audio ``[n*1920] float32`` as it is made, in blocks of up to 8 frames."""
        slot = torch.zeros(1, dtype=torch.int64, device=self.backend.device)
        self._codec_state.reset(slot)
        reference = self._reference(request).to(self.backend.device)
        with torch.inference_mode():
            for part in reference.split(PRIMED_FRAMES) if len(reference) else ():
                self._codec.decode_step(part.t()[None], self._codec_state, slot)
        for block, _ in self._generate(request, None, None):
            if len(block):
                with torch.inference_mode():
                    codes = block.t()[None].to(self.backend.device)
                    yield self._codec.decode_step(codes, self._codec_state, slot)[0].float().cpu().numpy()

    @torch.inference_mode()
    def _decode(self, codes: Tensor) -> Tensor:
        """Samples ``[T*1920] float32`` of ``codes [T, 16]``, in steps: memory does not grow with T."""
        slot = torch.zeros(1, dtype=torch.int64, device=self.backend.device)
        self._codec_state.reset(slot)
        parts = (part.t()[None].to(self.backend.device) for part in codes.split(DECODED_FRAMES))
        return torch.cat([self._codec.decode_step(part, self._codec_state, slot)[0].float().cpu() for part in parts])

    @property
    def voice_fingerprint(self) -> str:
        """What tells whether a speaker embedding was made for this checkpoint; "" where voices are not cloned."""
        return self._checkpoint.voice_fingerprint()

    def encode_voice(self, samples: NDArray[np.float32], *, with_codes: bool) -> EncodedVoice:
        """Encode reference audio, mono at 24 kHz; the encoders are loaded at the first call.

        Raises UnsupportedError where voices are not cloned, RequestError for a clip that is too short.
        """
        if self._voice_encoder is None:
            encoder = VoiceEncoder(self.config, self.backend)
            encoder.load(self._checkpoint)
            self._voice_encoder = encoder
        return self._voice_encoder.encode(samples, with_codes=with_codes)

    @torch.inference_mode()
    def _generate(
        self, request: SpeechRequest, hidden_out: list[Tensor] | None, progress: Progress | None
    ) -> Iterator[tuple[Tensor, FinishReason]]:
        """Yield blocks of finished frames ``[n, 16] int64`` on the host; the reason is final with the last block."""
        table, device = self._table, self.backend.device
        layout = build_layout(self.config, self.tokenizer, request)
        limit = min(request.max_frames, frames_left(layout, table.max_positions))
        voice = request.voice if isinstance(request.voice, ClonedVoice) else None
        table.admit(0, Admission(layout, request.sampling, limit, voice))
        slot = torch.zeros(1, dtype=torch.int64, device=device)
        hidden = self._talker(self._rows(0, layout.length), 0)[-1:]
        self._turn = turn = self._turn + 1
        made = 0
        while True:
            if turn != self._turn:
                raise GenerationError("another request was started before this one was finished")
            for frame in range(made, min(made + FRAMES_PER_CHECK, limit)):
                position = layout.length + frame
                if frame:
                    hidden = self._talker(self._rows(position - 1, position), position - 1)
                if hidden_out is not None:
                    hidden_out.append(hidden[0].float().cpu())
                place = torch.full((1,), position - 1, dtype=torch.int64, device=device)
                self._frame(hidden, self._talker.logits(hidden), slot, place)
            total = int(table.frontier[0]) - layout.length
            ended = bool(table.ended[0])
            block = table.codes[0, layout.length + made : layout.length + total].to("cpu", torch.int64)
            made = total
            if progress is not None:
                progress(made, limit)
            yield block, FinishReason.LENGTH if made >= limit else FinishReason.STOP
            if ended or made >= limit:
                return

    def _rows(self, start: int, end: int) -> Tensor:
        """Talker input rows ``[end - start, H]`` of slot 0, as every engine computes them."""
        positions = torch.arange(start, end, device=self.backend.device)
        return input_rows(self._table, self._text, self._codes, torch.zeros_like(positions), positions)

    def _reference(self, request: SpeechRequest) -> Tensor:
        """Codes of the reference ``[R, 16] int64`` that the codec hears before the request's first frame."""
        codes = request.voice.reference_codes if isinstance(request.voice, ClonedVoice) else b""
        return torch.from_numpy(np.frombuffer(codes, dtype="<i2").astype(np.int64).reshape(-1, NUM_CODEBOOKS))

    def _load(self, checkpoint: Checkpoint) -> None:
        talker = self._talker
        targets = {
            **embedding_targets(self._text, self._codes),
            **predictor_targets(self._predictor),
            **talker_targets(talker.layers, talker.norm, talker.head),
        }
        load(checkpoint.iter_main(), targets)
        self._codec.load_weights(checkpoint.iter_codec())
        for module in (self._talker, self._predictor, self._codec):
            self.backend.prepare_weights(module)
        self._predictor.adopt(self.settings.predictor, self.backend)
