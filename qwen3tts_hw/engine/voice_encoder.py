"""Reference audio to what a cloned voice consists of, through the two encoders of a Base checkpoint.

Keeps what it has encoded, by content, so that a recording costs encoder work once. Knows no files, requests or names.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

import numpy as np
import torch
from numpy.typing import NDArray

from qwen3tts_hw.backends import Backend
from qwen3tts_hw.checkpoint.reader import Checkpoint
from qwen3tts_hw.codec.encoder import CodecEncoder
from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.errors import UnsupportedError
from qwen3tts_hw.types import EncodedVoice
from qwen3tts_hw.voice.speaker_encoder import SpeakerEncoder

VOICES_KEPT = 1_024  # a reference of ten seconds takes 12 kB


class VoiceEncoder:
    """The encoders on one device; their weights are undefined until :meth:`load`.

    Any thread may call; calls wait for each other.
    ``encoded`` counts the recordings that were run through them, ``reused`` those that were known already.
    """

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        if config.codec_encoder is None or config.speaker_encoder is None:
            raise UnsupportedError(
                f"this checkpoint ({config.variant}) has no encoders for reference audio; use a Base checkpoint"
            )
        self._backend = backend
        self._codec = CodecEncoder(config.codec_encoder, backend.device)
        self._speaker = SpeakerEncoder(config.speaker_encoder, backend.device, stft=backend.capabilities.stft)
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, EncodedVoice] = OrderedDict()
        self.encoded = 0
        self.reused = 0

    def load(self, checkpoint: Checkpoint) -> None:
        """Load the encoders' weights; what was encoded with others is forgotten."""
        with self._lock:
            self._codec.load_weights(checkpoint.iter_codec())
            self._speaker.load_weights(checkpoint.iter_main())
            for module in (self._codec, self._speaker):
                self._backend.prepare_weights(module)
            self._kept.clear()

    def encode(self, samples: NDArray[np.float32], *, with_codes: bool) -> EncodedVoice:
        """Encode mono audio at 24 kHz ``[n] float32``; raise RequestError for a clip that is too short.

        Without ``with_codes`` the codes may be left empty.
        """
        with self._lock, torch.inference_mode():
            return self._encode(samples, with_codes=with_codes)

    def _encode(self, samples: NDArray[np.float32], *, with_codes: bool) -> EncodedVoice:
        key = hashlib.sha256(samples.tobytes()).digest()
        known = self._kept.get(key)
        if known is not None and (known.codes or not with_codes):
            self._kept.move_to_end(key)
            self.reused += 1
            return known
        audio = torch.from_numpy(np.array(samples, dtype=np.float32)).to(self._backend.device)
        embedding = self._speaker.embed(audio).cpu().numpy().astype("<f4").tobytes()
        codes = self._codec.encode(audio).cpu().numpy().astype("<i2").tobytes() if with_codes else b""
        self.encoded += 1
        self._kept[key] = voice = EncodedVoice(embedding, codes)
        while len(self._kept) > VOICES_KEPT:
            self._kept.popitem(last=False)
        return voice
