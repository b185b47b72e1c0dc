"""How long do the 15 residual codes of a frame take, and how far is that from reading the weights once per step?

Metric: milliseconds of one whole frame step (code 0, the code predictor, the slot table) and of the code predictor
alone, for B rows, as the server calls them: through a graph wrapper, eager and captured, once for every form of the
predictor. A frame lasts 80 ms.

``floor_ms`` is the least time that the memory allows: all weights that a frame must read (per step the layers and one
head, and the projection) at the rate of a kernel that only reads, measured in the same run. ``times_floor`` is the
median over the floor. Small batches are bound by that floor, large ones by arithmetic as well.

Weights are random: time does not depend on them, but the sampler's may on the shape of the logits. Example:

    python -m benchmarks.bench_predictor --size 1.7B --dtype bfloat16 --rows 1 8 64 --forms plain fused
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Timing, measure, report
from qwen3tts_hw import attention_ops, graph_wrappers
from qwen3tts_hw.backends import Backend, resolve
from qwen3tts_hw.checkpoint import initialisation, published
from qwen3tts_hw.config import CODEC_SUBFOLDER, ModelConfig
from qwen3tts_hw.engine.frame_step import FrameStep, frame_step_inputs
from qwen3tts_hw.engine.state import Admission, SlotTable
from qwen3tts_hw.graph_wrappers import InputSpec
from qwen3tts_hw.model.code_predictor import CodePredictor
from qwen3tts_hw.model.embeddings import CodeEmbedder
from qwen3tts_hw.model.sampling import SamplingRows
from qwen3tts_hw.model.weights import load, predictor_targets
from qwen3tts_hw.prompt.layout import PromptLayout
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS, SamplingSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FORMS = ("plain", "compiled", "fused")
READ_BYTES = {"cpu": 1 << 26}  # a device that is not listed is given several times its caches
READ_BYTES_DEFAULT = 1 << 32
SAMPLING = SamplingSpec(
    temperature=0.9,
    top_k=50,
    top_p=1.0,
    repetition_penalty=1.05,
    residual_temperature=0.9,
    residual_top_k=50,
    residual_top_p=1.0,
    seed=1,
)


def model_config(size: str) -> ModelConfig:
    """Return the sizes of a checkpoint form."""
    files = published.compose(
        "custom_voice", size, published.PUBLISHED_TEXT_TOKENS, published.PUBLISHED_TEXT_VOCAB_SIZE
    )
    return ModelConfig.from_dicts(files["config.json"], files[f"{CODEC_SUBFOLDER}/config.json"])


def random_predictor(config: ModelConfig, rows: int, backend: Backend, dtype: torch.dtype) -> CodePredictor:
    """Build a predictor with the random weights that the checkpoint writer would give it."""
    codes = CodeEmbedder(config, device=backend.device, dtype=dtype)
    attention = attention_ops.create("auto", backend)
    predictor = CodePredictor(config, codes, attention, max_rows=rows, device=backend.device, dtype=dtype)
    targets = predictor_targets(predictor)
    for index in range(NUM_CODEBOOKS):
        targets[f"codec_embedding.{index}.weight"] = codes.codebook(index)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, target in targets.items():
            pieces = list(initialisation.draw(name, tuple(target.shape), seed=0, bfloat16=False))
            yield name, torch.from_numpy(np.concatenate(pieces)).view(target.shape).to(backend.device)

    load(tensors(), targets)
    backend.prepare_weights(predictor)
    return predictor


def open_table(config: ModelConfig, rows: int, backend: Backend) -> SlotTable:
    """Make a slot table with ``rows`` requests that never reach their limit."""
    table = SlotTable(rows, 256, backend)
    layout = PromptLayout(text_ids=(1,), codec_ids=(-1,), trailing_text_ids=(), pad_text_id=1)
    for _ in range(rows):
        table.admit(table.take(), Admission(layout, SAMPLING, 1 << 30))
    return table


def read_rate(backend: Backend) -> float:
    """Bytes per millisecond of a reduction over a large tensor, which does nothing but read."""
    size = READ_BYTES.get(backend.device.type, READ_BYTES_DEFAULT)
    block = torch.ones(size // 4, device=backend.device)
    return size / measure(lambda: block.amax(), backend, 10).median_ms


class Bench:
    """One predictor on one device, timed for several batch sizes."""

    def __init__(self, config: ModelConfig, backend: Backend, *, rows: int, dtype: torch.dtype, repeats: int) -> None:
        self.config, self.backend, self.dtype, self.repeats = config, backend, dtype, repeats
        self.predictor = random_predictor(config, rows, backend, dtype)
        self.bytes_per_ms = read_rate(backend)
        self.floor_ms = self.frame_bytes() / self.bytes_per_ms

    def frame_bytes(self) -> int:
        """Weights that a frame must read at least, in bytes: 15 times the layers, each head once."""
        predictor, steps = self.predictor, NUM_CODEBOOKS - 1
        projection = 0 if predictor.projection is None else sum(p.nbytes for p in predictor.projection.parameters())
        layers = sum(p.nbytes for p in predictor.layers.parameters())
        return steps * (layers + projection) + sum(p.nbytes for p in predictor.heads.parameters())

    def rows_of(self, form: str, graphs: str, rows: int) -> Iterator[dict[str, object]]:
        """Time the frame step and the predictor alone for one batch size."""
        self.predictor.adopt(form, self.backend)
        for what, prepare in (("frame step", self._frame_step), ("predictor", self._predictor_alone)):
            call, mode = prepare(graphs, rows)
            timing = measure(call, self.backend, self.repeats, warmup=3)
            yield self._row(f"{what}, {self.predictor.form}, {mode}", rows, timing)

    def _frame_step(self, graphs: str, rows: int) -> tuple[Callable[[], object], str]:
        table = open_table(self.config, rows, self.backend)
        step = graph_wrappers.create(graphs, self.backend)(
            FrameStep(self.config, table, self.predictor),
            buckets=[rows],
            inputs=frame_step_inputs(self.config, table, hidden_dtype=self.dtype, logits_dtype=self.dtype),
            name="frame step",
        )
        step.capture()
        device = self.backend.device
        hidden = torch.randn(rows, self.config.talker.hidden_size, device=device).to(self.dtype)
        logits = torch.randn(rows, self.config.talker_vocab_size, device=device).to(self.dtype)
        slots = torch.arange(rows, device=device)
        positions = torch.zeros(rows, dtype=torch.int64, device=device)
        return lambda: step(hidden, logits, slots, positions), step.mode

    def _predictor_alone(self, graphs: str, rows: int) -> tuple[Callable[[], object], str]:
        device = self.backend.device
        sampling = SamplingRows(
            torch.full((rows,), SAMPLING.residual_temperature, device=device),
            torch.full((rows,), SAMPLING.residual_top_k, device=device),
            torch.full((rows,), SAMPLING.residual_top_p, device=device),
        )
        step = graph_wrappers.create(graphs, self.backend)(
            lambda hidden, code0, key: self.predictor(hidden, code0, sampling, key),
            buckets=[rows],
            inputs=[
                InputSpec("hidden", (self.config.talker.hidden_size,), self.dtype),
                InputSpec("code0", (), torch.int64),
                InputSpec("key", (), torch.int32),
            ],
            name="predictor",
        )
        step.capture()
        hidden = torch.randn(rows, self.config.talker.hidden_size, device=device).to(self.dtype)
        code0 = torch.randint(0, CODEBOOK_SIZE, (rows,), device=device)
        key = torch.arange(rows, dtype=torch.int32, device=device)
        return lambda: step(hidden, code0, key), step.mode

    def _row(self, what: str, rows: int, timing: Timing) -> dict[str, object]:
        return {
            "what": what,
            "rows": rows,
            "frame": timing,
            "floor_ms": self.floor_ms,
            "times_floor": timing.median_ms / self.floor_ms,
        }


def main() -> None:
    """Parse the command line, measure, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="auto", choices=["auto", "cpu", "cuda", "npu"])
    parser.add_argument("--size", default="tiny", choices=published.SIZES)
    parser.add_argument("--dtype", default=None, choices=sorted(DTYPES), help="default: the device's")
    parser.add_argument("--forms", nargs="+", default=["auto"], choices=["auto", *FORMS])
    parser.add_argument("--graphs", nargs="+", default=["auto"], choices=["auto", "on", "off"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=None, help="threads of torch on the CPU")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    backend = resolve(options.backend)
    backend.prepare_process()
    dtype = DTYPES[options.dtype] if options.dtype else backend.default_dtype
    config = model_config(options.size)
    rows: list[dict[str, object]] = []
    with torch.inference_mode():
        bench = Bench(config, backend, rows=max(options.rows), dtype=dtype, repeats=options.repeats)
        for form in options.forms:
            for graphs in options.graphs:
                for count in options.rows:
                    rows += bench.rows_of(form, graphs, count)
    extra = {
        "device": backend.describe(),
        "settings": vars(options),
        "threads": torch.get_num_threads(),
        "read_gb_per_s": bench.bytes_per_ms / 1e6,
        "frame_bytes": bench.frame_bytes(),
    }
    report(f"code predictor, {options.size}, {str(dtype).removeprefix('torch.')}", rows, extra)


if __name__ == "__main__":
    main()
