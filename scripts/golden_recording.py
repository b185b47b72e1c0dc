"""Runs the official qwen-tts package and writes down what it gave; shared by the parts of ``make_golden.py``.

Knows how to load a checkpoint with that package, how to listen to its generate calls, when data is worthless, and how a
golden file is stored. Knows no cases.
"""

from __future__ import annotations

import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
RECORDED = ("qwen-tts", "torch", "transformers", "tokenizers", "numpy")
MAX_BYTES = 1_000_000
# The official package imports this for its 25 Hz tokenizer; there is no torchaudio for a CPU-only torch.
TORCHAUDIO_STUB = 'def fbank(*args, **kwargs):\n    raise NotImplementedError("stub of torchaudio")\n'
LOG = logging.getLogger("make_golden")


class LimitedCase(Protocol):
    """What every case of generated speech has: ``finish`` is what must end it, ``frames`` the limit."""

    name: str
    frames: int
    finish: str


def stub_torchaudio(folder: Path) -> None:
    """Let the official package import what it needs of torchaudio for a model that is not used."""
    stub = folder / "stub" / "torchaudio" / "compliance"
    stub.mkdir(parents=True)
    (stub.parent / "__init__.py").write_text("")
    (stub / "__init__.py").write_text("")
    (stub / "kaldi.py").write_text(TORCHAUDIO_STUB)
    sys.path.append(str(stub.parents[1]))


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


def speech_arrays(recorder: Recorder, waveform: Any) -> dict[str, Any]:
    """Return the arrays that every case of generated speech stores, from the last call."""
    import numpy as np

    arrays = {
        "codes": recorder.codes.numpy().astype(np.int64),
        "hidden": recorder.hidden.numpy(),
        "waveform": np.asarray(waveform, dtype=np.float32),
        "prompt_rows": recorder.prompt["inputs_embeds"][0].numpy(),
        "trailing_rows": recorder.prompt["trailing_text_hidden"][0].numpy(),
        "pad_row": recorder.prompt["tts_pad_embed"][0].numpy(),
        "template_ids": recorder.inputs["input_ids"][0][0].numpy().astype(np.int64),
    }
    return {name: np.ascontiguousarray(value) for name, value in arrays.items()}


def examine(case: LimitedCase, arrays: dict[str, Any], recorder: Recorder, stop_id: int) -> dict[str, str]:
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


def provenance(checkpoint: str, checksums: str) -> dict[str, str]:
    """Return the metadata that every golden file carries."""
    return {
        "checkpoint": checkpoint,
        "checkpoint_sha256": checksums,
        "versions": json.dumps({name: version(name) for name in RECORDED}, sort_keys=True),
        "command": "python scripts/make_golden.py",
        "settings": "float32, eager attention, greedy, repetition penalty 1.05, CPU",
    }
