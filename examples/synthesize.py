"""Speak a text with the local engine: one process, no server, no vLLM.

``python examples/synthesize.py CHECKPOINT "Hello there." --voice Vivian --out hello.wav``
"""

from __future__ import annotations

import argparse
import wave
from pathlib import Path

from qwen3tts_hw.engine.local import LocalEngine


def main() -> None:
    """Parse the arguments, speak, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint folder or hub id")
    parser.add_argument("text")
    parser.add_argument("--voice", help="a speaker of the checkpoint (CustomVoice)")
    parser.add_argument("--instruct", help="how to speak, or what the voice is like (VoiceDesign)")
    parser.add_argument("--language", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-frames", type=int, help="longest answer, in frames of 80 ms")
    parser.add_argument("--out", type=Path, default=Path("speech.wav"))
    options = parser.parse_args()

    engine = LocalEngine.from_pretrained(options.model)
    speech = engine.synthesize(
        options.text,
        voice=options.voice,
        instruct=options.instruct,
        language=options.language,
        seed=options.seed,
        max_new_tokens=options.max_frames,
    )
    with wave.open(str(options.out), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(speech.sample_rate_hz)
        out.writeframes(speech.pcm)
    print(f"{options.out}: {speech.audio_seconds:.2f} s, {speech.frames} frames, finish reason {speech.finish_reason}")


if __name__ == "__main__":
    main()
