"""Speak a text with the local engine: one process, no server, no vLLM.

``python examples/synthesize.py CHECKPOINT "Hello there." --voice vivian --out hello.wav``
"""

from __future__ import annotations

import argparse
from pathlib import Path

from qwen3tts_hw import LocalEngine, build_request, write_wav


def main() -> None:
    """Parse the arguments, speak, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint folder")
    parser.add_argument("text")
    parser.add_argument("--voice", help="a speaker of the checkpoint (CustomVoice)")
    parser.add_argument("--instruct", help="how to speak, or what the voice is like (VoiceDesign)")
    parser.add_argument("--language", help="default: whatever the text is")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-frames", type=int, help="longest answer, in frames of 80 ms")
    parser.add_argument("--out", type=Path, default=Path("speech.wav"))
    options = parser.parse_args()

    engine = LocalEngine.load(options.model)
    request = build_request(
        engine.config,
        engine.settings,
        text=options.text,
        voice=options.voice,
        instruct=options.instruct,
        language=options.language,
        seed=options.seed,
        max_new_tokens=options.max_frames,
    )
    speech = engine.synthesize(request)
    write_wav(options.out, speech.pcm)
    print(f"{options.out}: {len(speech.codes)} frames of 80 ms, finish reason {speech.finish_reason.value}")


if __name__ == "__main__":
    main()
