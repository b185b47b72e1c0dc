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
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
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
RECORDED = ("qwen-tts", "torch", "transformers", "tokenizers", "numpy")
MAX_BYTES = 1_000_000
# The official package imports this for its 25 Hz tokenizer; there is no torchaudio for a CPU-only torch.
TORCHAUDIO_STUB = 'def fbank(*args, **kwargs):\n    raise NotImplementedError("stub of torchaudio")\n'
LOG = logging.getLogger("make_golden")

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


class Recorder:
    """Listens to one official model: keeps what its generate calls were given and gave, and the narrowest choice."""

    def __init__(self, model: Any) -> None:
        self.prompt: dict[str, Any] = {}
        self.inputs: dict[str, Any] = {}
        self.codes: Any = None
        self.hidden: Any = None
        self.last_token = -1
        self.gap = float("inf")
        self._wrap(model, self._outer)
        self._wrap(model.talker, self._talker)
        self._wrap(model.talker.code_predictor, self._predictor)

    @staticmethod
    def _wrap(owner: Any, through: Any) -> None:
        inner = owner.generate
        owner.generate = lambda *args, **kwargs: through(inner, *args, **kwargs)

    def _outer(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        self.inputs, self.gap = kwargs, float("inf")
        codes, hidden = inner(*args, **kwargs)
        self.codes, self.hidden = codes[0], hidden[0]
        return codes, hidden

    def _talker(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        self.prompt = kwargs
        result = inner(*args, output_scores=True, **kwargs)
        self.last_token = int(result.sequences[0, -1])
        self._narrow(result.scores)
        return result

    def _predictor(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        result = inner(*args, output_scores=True, **kwargs)
        self._narrow(result.scores)
        return result

    def _narrow(self, scores: Any) -> None:
        for step in scores:
            best = step[0].topk(2).values
            self.gap = min(self.gap, float(best[0] - best[1]))


def load_official(directory: Path) -> Any:
    """Load a checkpoint with the official package, its text tokenizer with the pattern the vocabulary was made for."""
    import torch
    from qwen_tts import Qwen3TTSModel
    from transformers import Qwen2TokenizerFast

    loaded = Qwen3TTSModel.from_pretrained(str(directory), dtype=torch.float32, attn_implementation="eager")
    # fix_mistral_regex=True, which the package passes, swaps the pattern of a tokenizer in a local directory.
    loaded.processor.tokenizer = Qwen2TokenizerFast.from_pretrained(str(directory), fix_mistral_regex=False)
    return loaded


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
    arrays = {
        "codes": recorder.codes.numpy().astype(np.int64),
        "hidden": recorder.hidden.numpy(),
        "waveform": np.asarray(waveforms[0], dtype=np.float32),
        "prompt_rows": recorder.prompt["inputs_embeds"][0].numpy(),
        "trailing_rows": recorder.prompt["trailing_text_hidden"][0].numpy(),
        "pad_row": recorder.prompt["tts_pad_embed"][0].numpy(),
        "template_ids": recorder.inputs["input_ids"][0][0].numpy().astype(np.int64),
        "instruct_ids": np.zeros(0, np.int64) if instruct_ids is None else instruct_ids[0].numpy().astype(np.int64),
    }
    return {name: np.ascontiguousarray(value) for name, value in arrays.items()}


def examine(case: Case, arrays: dict[str, Any], recorder: Recorder, stop_id: int) -> dict[str, str]:
    """Check that the case shows what it is for; return the figures kept in its metadata."""
    import numpy as np

    codes = arrays["codes"]
    finish = "stop" if recorder.last_token == stop_id else "length"
    if finish != case.finish:
        raise SystemExit(f"{case.name}: ended by {finish} after {len(codes)} frames, {case.finish} was wanted")
    if finish == "length" and len(codes) != case.frames:
        raise SystemExit(f"{case.name}: {len(codes)} frames at a limit of {case.frames}")
    distinct = len(np.unique(codes[:, 0]))
    peak = float(np.abs(arrays["waveform"]).max())
    LOG.info(
        "  %-24s %3d frames, %s; codebook 0: %2d distinct, all: %3d; narrowest gap %.1e; peak %.2f",
        case.name, len(codes), finish, distinct, len(np.unique(codes)), recorder.gap, peak,
    )  # fmt: skip
    if recorder.gap < 1e-5:
        raise SystemExit(f"{case.name}: two codes differ by {recorder.gap:.1e} in their logits; choose another text")
    if distinct < min(len(codes), 10) // 2:
        raise SystemExit(f"{case.name}: only {distinct} distinct codes of codebook 0 in {len(codes)} frames")
    return {"finish_reason": finish, "narrowest_logit_gap": f"{recorder.gap:.3e}"}


def store(path: Path, arrays: dict[str, Any], metadata: dict[str, str]) -> None:
    """Write one golden file and check its size."""
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays, str(path), metadata=metadata)
    if path.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{path} has {path.stat().st_size} bytes, more than {MAX_BYTES}")


def compare(path: Path, arrays: dict[str, Any]) -> None:
    """Compare fresh arrays with the stored ones: integers exactly, floats to 1e-5."""
    import numpy as np
    from safetensors.numpy import load_file

    stored = load_file(str(path))
    for name, fresh in arrays.items():
        if stored[name].shape != fresh.shape or not np.allclose(stored[name], fresh, rtol=0, atol=1e-5):
            raise SystemExit(f"{path}: {name} differs from what the official package gives now")


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
            metadata = {
                "checkpoint": spec.to_json(),
                "checkpoint_sha256": checksums,
                "request": json.dumps({**request, "max_frames": case.frames}, ensure_ascii=False, sort_keys=True),
                "versions": json.dumps({name: version(name) for name in RECORDED}, sort_keys=True),
                "command": "python scripts/make_golden.py",
                "settings": "float32, eager attention, greedy, repetition penalty 1.05, CPU",
                **figures,
            }
            store(path, arrays, metadata)


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
        stub = Path(folder) / "stub" / "torchaudio" / "compliance"
        stub.mkdir(parents=True)
        (stub.parent / "__init__.py").write_text("")
        (stub / "__init__.py").write_text("")
        (stub / "kaldi.py").write_text(TORCHAUDIO_STUB)
        sys.path.append(str(stub.parents[1]))
        for variant, size in CASES:
            run_checkpoint(variant, size, only=arguments.only, check=arguments.check, work=Path(folder))
    LOG.info("done in %.0f s", time.monotonic() - started)


if __name__ == "__main__":
    main()
