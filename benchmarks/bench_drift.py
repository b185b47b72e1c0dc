"""How far do the code predictor's logits drift from float32's in bfloat16, in each of its forms?

The same random weights, rounded to bfloat16, in bfloat16 and in float32; the same talker states; and codes that are
given, because one code that tips over would change all that follow. What is compared are the logits of the 15 residual
codebooks of ``--frames`` frames: of each form ``--rows`` at a time, of the plain one as many as the largest of these.

of_plain    largest and mean |difference| / (1 + |reference|) from the plain form in bfloat16
of_float32  the same from the plain form in float32: what bfloat16 itself costs
same        share of logit rows whose likeliest code is the same as float32's

    python -m benchmarks.bench_drift --size 1.7B --frames 1000 --rows 1 8 64 128

Exits with 1 if a form differs from the plain one by more than ``--bound``, or by a tenth of it in the mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.bench_predictor import model_config, random_predictor
from benchmarks.harness import report
from qwen3tts_hw.backends import Backend, resolve
from qwen3tts_hw.config import ModelConfig
from qwen3tts_hw.model import code_predictor
from qwen3tts_hw.model.code_predictor import CodePredictor
from qwen3tts_hw.predictor_kernels import create
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS

LogitsOf = Callable[[Tensor, Tensor, Tensor], Tensor]
BOUND = 0.2  # the parity matrix's for bfloat16


def plain_logits(predictor: CodePredictor, hidden: Tensor, code0: Tensor, given: Tensor) -> Tensor:
    """Logits ``[B, 15, 2048] float32`` of the plain form behind given codes ``[B, 15]``."""
    seen: list[Tensor] = []

    def choose(logits: Tensor, rows: object, key: object, codebook: int, candidates: object) -> Tensor:
        seen.append(logits)
        return given[:, codebook - 1]

    nothing: Any = None
    with mock.patch.object(code_predictor, "choose", choose), mock.patch.object(predictor, "fast", None):
        predictor(hidden, code0, nothing, nothing)
    return torch.stack(seen, dim=1)


def compiled_logits(predictor: CodePredictor, backend: Backend) -> LogitsOf:
    """The same of the compiled form."""
    predictor.adopt("compiled", backend)
    calls = predictor._calls
    predictor.adopt("plain", backend)

    def logits(hidden: Tensor, code0: Tensor, given: Tensor) -> Tensor:
        with mock.patch.object(predictor, "_calls", calls):
            return plain_logits(predictor, hidden, code0, given)

    return logits


class Drift:
    """Differences of one form's logits, added up."""

    def __init__(self) -> None:
        self.largest, self._sum, self._count, self._same, self._rows = 0.0, 0.0, 0, 0, 0

    def add(self, found: Tensor, reference: Tensor) -> None:
        """Count logits ``[B, 15, 2048]``."""
        difference = (found - reference).abs() / (1 + reference.abs())
        self.largest = max(self.largest, difference.max().item())
        self._sum += difference.double().sum().item()
        self._count += difference.numel()
        self._same += int((found.argmax(-1) == reference.argmax(-1)).sum())
        self._rows += found.shape[0] * found.shape[1]

    @property
    def mean(self) -> float:
        """The mean difference."""
        return self._sum / self._count

    @property
    def same(self) -> float:
        """The share of rows with the same largest logit."""
        return self._same / self._rows


def twins(config: ModelConfig, rows: int, backend: Backend) -> tuple[CodePredictor, CodePredictor]:
    """The same weights in bfloat16 and in float32."""
    narrow, wide = (random_predictor(config, rows, backend, dtype) for dtype in (torch.bfloat16, torch.float32))
    for mine, other in zip(narrow.parameters(), wide.parameters(), strict=True):
        other.copy_(mine)
    for codebook in range(NUM_CODEBOOKS):
        wide._embedder[0].codebook(codebook).copy_(narrow._embedder[0].codebook(codebook))
    return narrow, wide


def drift(
    narrow: CodePredictor, wide: CodePredictor, forms: dict[str, LogitsOf], *, width: int, rows: list[int], frames: int
) -> list[Any]:
    """One table row per form and number of rows, all for the same ``frames`` talker states ``[width]``."""
    device, together = narrow.cos.device, max(rows)
    rng = torch.Generator().manual_seed(0)
    cases = [("plain", together), *((name, count) for name in forms for count in rows)]
    of_plain, of_float32 = ({case: Drift() for case in cases} for _ in range(2))
    for _ in range(-(-frames // together)):
        hidden = torch.randn(together, width, generator=rng).to(device, torch.bfloat16)
        code0 = torch.randint(0, CODEBOOK_SIZE, (together,), generator=rng).to(device)
        given = torch.randint(0, CODEBOOK_SIZE, (together, NUM_CODEBOOKS - 1), generator=rng).to(device)
        reference = plain_logits(wide, hidden.float(), code0, given)
        plain = plain_logits(narrow, hidden, code0, given)
        for name, count in cases:
            parts = (hidden.split(count), code0.split(count), given.split(count))
            logits = torch.cat([forms[name](*part) for part in zip(*parts, strict=True)]) if name in forms else plain
            of_plain[name, count].add(logits, plain)
            of_float32[name, count].add(logits, reference)
    return [
        {
            "form": name,
            "rows": count,
            "frames": -(-frames // together) * together,
            "of_plain_max": of_plain[name, count].largest,
            "of_plain_mean": of_plain[name, count].mean,
            "of_float32_max": of_float32[name, count].largest,
            "of_float32_mean": of_float32[name, count].mean,
            "same": of_float32[name, count].same,
        }
        for name, count in cases
    ]


def main() -> int:
    """Parse the command line, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto", choices=["auto", "cpu", "cuda", "npu"])
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--frames", type=int, default=1_000)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 128])
    parser.add_argument("--bound", type=float, default=BOUND)
    options = parser.parse_args()
    backend = resolve(options.backend)
    backend.prepare_process()
    config = model_config(options.size)
    with torch.inference_mode():
        narrow, wide = twins(config, max(options.rows), backend)
        form = create("auto", backend)
        forms: dict[str, LogitsOf] = {}
        if form is not None:
            forms["fused"] = form.build(narrow._weights(), max(options.rows)).given_logits  # type: ignore[attr-defined]
        if backend.capabilities.compile:
            forms["compiled"] = compiled_logits(narrow, backend)
        width = config.talker.hidden_size
        rows = drift(narrow, wide, forms, width=width, rows=options.rows, frames=options.frames)
    extra = {"device": backend.describe(), "settings": vars(options)}
    report(f"logits of the code predictor, {options.size}, bfloat16", rows, extra)
    beyond = [r for r in rows if r["of_plain_max"] > options.bound or r["of_plain_mean"] > options.bound / 10]
    return int(bool(beyond))


if __name__ == "__main__":
    sys.exit(main())
