"""Stream speech from a running server with the official ``openai`` client and write it to a WAV file.

``VLLM_PLUGINS=qwen3tts_hw vllm serve CHECKPOINT``, then
``python examples/stream_client.py "Hello there." --voice vivian --out hello.wav``
"""

from __future__ import annotations

import argparse
import time
import wave
from pathlib import Path

from openai import OpenAI

SAMPLE_RATE_HZ = 24_000  # of the model; the answer is 16-bit mono


def main() -> None:
    """Ask for raw PCM, so that every byte can be played as it arrives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--voice", default="default", help="see GET /v1/audio/voices")
    parser.add_argument("--instructions", help="how to speak, or what the voice is like (VoiceDesign)")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--out", type=Path, default=Path("speech.wav"))
    options = parser.parse_args()

    client = OpenAI(base_url=options.url, api_key="unused")
    wanted = {"instructions": options.instructions, "seed": options.seed}
    started = time.monotonic()
    with (
        client.audio.speech.with_streaming_response.create(
            model=client.models.list().data[0].id,
            voice=options.voice,
            input=options.text,
            response_format="pcm",
            extra_body={name: value for name, value in wanted.items() if value is not None},
        ) as response,
        wave.open(str(options.out), "wb") as out,
    ):
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(SAMPLE_RATE_HZ)
        received = 0
        for chunk in response.iter_bytes():
            if not received:
                print(f"first audio after {(time.monotonic() - started) * 1e3:.0f} ms")
            out.writeframesraw(chunk)
            received += len(chunk)
    print(f"{options.out}: {received / 2 / SAMPLE_RATE_HZ:.2f} s in {time.monotonic() - started:.2f} s")


if __name__ == "__main__":
    main()
