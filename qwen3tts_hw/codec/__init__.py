"""The 12 Hz codec: codes of 16 codebooks to 24 kHz audio, whole or frame by frame with state, and clips to codes.

Knows nothing about requests, chunk schedules or transport; which slot belongs to whom is the caller's affair.
"""

from __future__ import annotations

from qwen3tts_hw.codec.decoder import CodecDecoder
from qwen3tts_hw.codec.encoder import CodecEncoder
from qwen3tts_hw.codec.pcm import to_pcm16
from qwen3tts_hw.codec.state import CodecState

__all__ = ["CodecDecoder", "CodecEncoder", "CodecState", "to_pcm16"]
