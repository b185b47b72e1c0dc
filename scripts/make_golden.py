"""Write the golden data of the parity tests with the official qwen-tts package.

Runs the official package greedily (float32, eager attention, CPU) on tiny seeded checkpoints and stores what it gave
under ``tests/golden/<checkpoint>/<case>.safetensors``: codes, hidden states, waveform, prompt rows. Numbers only.

The official package pins transformers 4.57.3, so it lives in an environment of its own:

    python scripts/make_golden.py --setup build/golden-env     # makes it (Python 3.11 wanted), then runs in it
    build/golden-env/bin/python scripts/make_golden.py         # later runs
    ... --only voice_design-tiny/stop --check                  # compare with the stored files, write nothing
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from golden_recording import (
    GOLDEN,
    LOG,
    ROOT,
    Recorder,
    compare,
    examine,
    load_official,
    provenance,
    speech_arrays,
    store,
    stub_torchaudio,
)
from golden_voice import VOICE_SIZES, run_voices

PINS = (
    "torch==2.13.0",
    "transformers==4.57.3",  # pinned by qwen-tts 0.1.1; the Mimi encoder differs from 5.3 on
    "accelerate",
    "librosa",
    "einops",
    "onnxruntime",
    "soundfile",
    "sox",
)
OFFICIAL = "qwen-tts==0.1.1"
REQUEST_FIELDS = ("text", "voice", "language", "instruct", "text_mode")

SHORT = "Hello world."
SENTENCE = "I'm on YouTube with 3 iPhones at the café, it's good!!"
LONG = (
    "When the rain had stopped, the two of them walked along the river, past the old mill and the bridge, "
    "and talked about 3 summers, 12 winters, and everything that lay between."
)
CHINESE = "你好。今天天气不错。我们去公园吧。"
HAPPY = "Very happy."
OLD_MAN = "An old man with a low, warm voice, speaking slowly."


@dataclass(frozen=True, slots=True)
class Case:
    """One request; ``finish`` is what must end it, ``frames`` the limit.

    Cases that run to the limit use weights that never end by themselves. ``stop_scale`` is that of ``TinyCheckpoint``.
    """

    name: str
    text: str
    voice: str | None = None
    language: str = "auto"
    instruct: str | None = None
    text_mode: str = "whole"
    frames: int = 24
    finish: str = "length"
    stop_scale: float = 1.0

    @property
    def ending(self) -> tuple[bool, float]:
        """Cases with equal endings share a checkpoint: whether it is endless, and its ``stop_scale``."""
        return self.finish == "length", self.stop_scale


CUSTOM_VOICE = (
    Case("whole-english", SHORT, "ryan", "english"),
    Case("whole-auto", LONG, "uncle_fu"),
    Case("streaming-auto-short", SHORT, "serena", text_mode="streaming"),
    Case("streaming-english-long", LONG, "aiden", "english", text_mode="streaming"),
    Case("dialect-dylan-auto", CHINESE, "dylan"),
    Case("dialect-eric-chinese", CHINESE, "eric", "chinese", text_mode="streaming"),
    Case("dialect-dylan-english", SENTENCE, "dylan", "english"),
    Case("instruct-whole", SENTENCE, "vivian", "english", HAPPY),
    Case("instruct-streaming", SENTENCE, "sohee", "korean", HAPPY, "streaming"),
    Case("limit-20", SENTENCE, "ono_anna", "japanese", frames=20),
    Case("stop", CHINESE, "ryan", "english", text_mode="streaming", frames=60, finish="stop"),
    Case("stop-at-once", SHORT, "ryan", "english", finish="stop", stop_scale=8.0),
)
CUSTOM_VOICE_NO_PROJECTION = (
    Case("whole-english", SHORT, "aiden", "english"),
    Case("whole-auto", LONG, "sohee"),
    Case("streaming-auto-short", SHORT, "ryan", text_mode="streaming"),
    Case("streaming-german-long", LONG, "vivian", "german", text_mode="streaming"),
    Case("dialect-dylan-auto", CHINESE, "dylan", text_mode="streaming"),
    Case("dialect-eric-chinese", CHINESE, "eric", "chinese"),
    Case("limit-20", SENTENCE, "serena", "french", frames=20),
    Case("stop", CHINESE, "ryan", "english", text_mode="streaming", frames=60, finish="stop"),
    Case("stop-at-once", LONG, "ryan", "english", text_mode="streaming", finish="stop", stop_scale=8.0),
)
VOICE_DESIGN = (
    Case("whole-english", SHORT, None, "english", HAPPY),
    Case("whole-auto", LONG, None, "auto", OLD_MAN),
    Case("streaming-auto-short", SHORT, None, "auto", OLD_MAN, "streaming"),
    Case("streaming-chinese", CHINESE, None, "chinese", HAPPY, "streaming"),
    Case("streaming-english-long", LONG, None, "english", OLD_MAN, "streaming"),
    Case("whole-spanish", SENTENCE, None, "spanish", OLD_MAN),
    Case("stop", CHINESE, None, "english", HAPPY, "streaming", frames=60, finish="stop"),
    Case("stop-at-once", LONG, None, "english", HAPPY, "streaming", finish="stop", stop_scale=8.0),
)
CASES: dict[tuple[str, str], tuple[Case, ...]] = {
    ("custom_voice", "tiny"): CUSTOM_VOICE,
    ("custom_voice", "tiny-0.6B"): CUSTOM_VOICE_NO_PROJECTION,
    ("voice_design", "tiny"): VOICE_DESIGN,
}


def run_case(official: Any, recorder: Recorder, variant: str, case: Case) -> dict[str, Any]:
    """Run one request greedily and return the arrays of its golden file."""
    import numpy as np

    kwargs: dict[str, Any] = {"speaker": case.voice} if variant == "custom_voice" else {}
    waveforms, _ = getattr(official, f"generate_{variant}")(
        case.text,
        language=case.language,
        instruct=case.instruct,
        non_streaming_mode=case.text_mode == "whole",
        do_sample=False,
        subtalker_dosample=False,
        max_new_tokens=case.frames + 1,  # the last token of the official loop is never completed to a frame
        **kwargs,
    )
    instruct_ids = recorder.inputs["instruct_ids"][0]
    ids = np.zeros(0, np.int64) if instruct_ids is None else instruct_ids[0].numpy().astype(np.int64)
    return {**speech_arrays(recorder, waveforms[0]), "instruct_ids": np.ascontiguousarray(ids)}


def run_checkpoint(variant: str, size: str, *, only: str, check: bool, work: Path) -> None:
    """Make every golden file of one checkpoint, writing the checkpoint once per way to end."""
    from tests.parity.checkpoints import TinyCheckpoint, weight_checksums, write_checkpoint

    cases = [case for case in CASES[variant, size] if only in f"{variant}-{size}/{case.name}"]
    for endless, scale in sorted({case.ending for case in cases}):
        spec = TinyCheckpoint(variant, size, end_of_speech=not endless, stop_scale=scale)
        directory = write_checkpoint(spec, work / spec.key)
        checksums = json.dumps(weight_checksums(directory), sort_keys=True)
        official = load_official(directory)
        recorder = Recorder(official.model)
        LOG.info("%s", spec.key)
        for case in (case for case in cases if case.ending == (endless, scale)):
            arrays = run_case(official, recorder, variant, case)
            stop_id = official.model.config.talker_config.codec_eos_token_id
            figures = examine(case, arrays, recorder, stop_id)
            path = GOLDEN / spec.name / f"{case.name}.safetensors"
            if check:
                compare(path, arrays)
                continue
            request = {key: value for key, value in asdict(case).items() if key in REQUEST_FIELDS}
            described = json.dumps({**request, "max_frames": case.frames}, ensure_ascii=False, sort_keys=True)
            store(path, arrays, {**provenance(spec.to_json(), checksums), "request": described, **figures})


def set_up(directory: Path) -> Path:
    """Make the environment of the official package unless it is there; return its interpreter."""
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        pip = [str(python), "-m", "pip", "install"]
        subprocess.run([*pip, *PINS], check=True)
        subprocess.run([*pip, "--no-deps", OFFICIAL], check=True)
    return python


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--setup", type=Path, metavar="DIR", help="make the environment in DIR, then run in it")
    parser.add_argument("--only", default="", metavar="PART", help="only cases whose <checkpoint>/<case> contains PART")
    parser.add_argument("--check", action="store_true", help="compare with the stored files instead of writing")
    return parser.parse_args()


def main() -> None:
    """Run the command line."""
    arguments = parse_arguments()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    LOG.setLevel(logging.INFO)
    if arguments.setup:
        python = str(set_up(arguments.setup.resolve()))
        rest = [part for part in sys.argv[1:] if part not in ("--setup", str(arguments.setup))]
        os.execv(python, [python, str(Path(__file__).resolve()), *rest])
    sys.path.insert(0, str(ROOT))
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        stub_torchaudio(Path(folder))
        for variant, size in CASES:
            run_checkpoint(variant, size, only=arguments.only, check=arguments.check, work=Path(folder))
        for size in VOICE_SIZES:
            run_voices(size, only=arguments.only, check=arguments.check, work=Path(folder))
    LOG.info("done in %.0f s", time.monotonic() - started)


if __name__ == "__main__":
    main()
