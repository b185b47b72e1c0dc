"""The codec as the audio pump uses it: the streaming decoder with its state, 16-bit samples out."""

from __future__ import annotations

from torch import Tensor

from qwen3tts_hw.codec.decoder import CodecDecoder
from qwen3tts_hw.codec.pcm import to_pcm16


class CodecSteps:
    """Streaming decode over the state of ``slots`` streams (the last one is scratch)."""

    def __init__(self, decoder: CodecDecoder, slots: int) -> None:
        self._decoder = decoder
        self.state = decoder.new_state(slots)

    def reset(self, slots: Tensor) -> None:
        """Return streams to their start."""
        self.state.reset(slots)

    def decode(self, codes: Tensor, slots: Tensor) -> Tensor:
        """PCM ``[R, F*1920] int16`` of the next frames of each stream."""
        return to_pcm16(self._decoder.decode_step(codes, self.state, slots))
