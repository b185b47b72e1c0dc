"""Runs the cells that need no server, in this process: each on its device, against the reference on the CPU.

A cell compares several calls with different inputs, so that a captured graph that reads or returns stale buffers shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.bench_drift import plain_logits
from qwen3tts_hw import graph_wrappers
from qwen3tts_hw.engine.local import LocalEngine
from qwen3tts_hw.graph_wrappers import GraphWrapper, InputSpec
from qwen3tts_hw.model.sampling import SamplingRows, frame_key
from qwen3tts_hw.settings import Settings
from qwen3tts_hw.types import CODEBOOK_SIZE, NUM_CODEBOOKS, SAMPLES_PER_FRAME
from tests.parity.cell_models import CONTEXT_ROWS, ROWS, Predictor, TalkerStep, Watch, attention_op, backend
from tests.parity.cell_models import checkpoint as open_tiny
from tests.parity.cell_models import codec as load_codec
from tests.parity.cell_outcome import Difference, compare, compare_codes, require
from tests.parity.golden import cases, checkpoint_for
from tests.parity.matrix import BUCKETS, EMULATED, FLOAT32, Cell

CALLS = 3
CHUNK_FRAMES = 2
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
LENGTHS = ((2, 2), (1, 17), (17, 17))  # queries and keys: a frame's begin and end, a prompt
GOLDEN_CASES = ("whole-english", "streaming-auto-short", "stop-at-once")
Result = tuple[Difference, dict[str, Any]]


class Captured:
    """A function of rows, eager or through graphs as the cell says, and the proof of which it was."""

    def __init__(self, cell: Cell, function: Callable[..., Any], inputs: tuple[InputSpec, ...]) -> None:
        self._cell = cell
        self.wrapper: GraphWrapper = graph_wrappers.create(graph_setting(cell), backend(cell.device))(
            function, buckets=BUCKETS, inputs=inputs, name=cell.module
        )
        self.wrapper.capture()
        self._replays_before = device_counts(cell).get("graph_replays", 0)

    def __call__(self, *rows: Tensor) -> tuple[Tensor, ...]:
        at = backend(self._cell.device).device
        return tuple(result.float().cpu() for result in self.wrapper(*(tensor.to(at) for tensor in rows)))

    def evidence(self) -> dict[str, Any]:
        """Return the counters; raise NotReachedError if graphs were to be replayed and were not, or the reverse."""
        counters, bucket = dict(self.wrapper.counters), self._cell.bucket
        graph = self._cell.graphs == "graph"
        require(self.wrapper.mode == self._cell.graphs, f"{self.wrapper.mode} instead of {self._cell.graphs}")
        require(counters["calls"] > 0, "nothing was called")
        found = {"mode": self.wrapper.mode, "calls": counters["calls"]}
        if graph:
            replays = counters.get(f"replays_{bucket}", 0)
            require(replays == counters["calls"], f"{replays} replays of bucket {bucket} in {counters['calls']} calls")
            padded = (bucket - self._cell.batch) * counters["calls"]
            require(counters["padding_rows"] == padded, f"{counters['padding_rows']} padding rows instead of {padded}")
            found |= {f"replays of bucket {bucket}": replays}
        return found | device_evidence(self._cell, graph, counters["calls"], self._replays_before)


def graph_setting(cell: Cell) -> str:
    """The value of the setting ``graphs``; a CPU has no graphs, so their semantics are played by a recording."""
    if cell.graphs == "eager":
        return "off"
    return "recording" if cell.device == "cpu" else "on"


def device_counts(cell: Cell) -> dict[str, int]:
    """What happened on the emulated device so far; empty elsewhere."""
    if cell.device != EMULATED:
        return {}
    from ascend_emulator import layer

    return dict(layer.counters())


def device_evidence(cell: Cell, graph: bool, calls: int, before: int) -> dict[str, Any]:
    """The emulator's own count of replays, and that nothing was refused."""
    counts = device_counts(cell)
    if not counts:
        return {}
    replays = counts.get("graph_replays", 0) - before
    require(replays >= calls if graph else replays == 0, f"the emulated device counted {replays} replays")
    refused = [name for name in counts if name.startswith("refused")]
    require(not refused, f"the emulated device refused: {refused}")
    return {"replays counted by the emulator": replays}


def run(cell: Cell, root: Path) -> Result:
    """Run a cell that needs no server; raises NotReachedError or MismatchError."""
    if cell.device == EMULATED:
        from ascend_emulator import layer

        layer.reset_counters()
    torch.manual_seed(0)
    with torch.inference_mode():
        return MODULES[cell.module](cell, root)


def attention(cell: Cell, root: Path) -> Result:
    """The op itself, on heads of the published shape, for each pair of lengths."""
    expected, found, evidence = [], [], {}
    for queries, keys in LENGTHS:
        shapes = ((HEADS, queries, HEAD_DIM), (KV_HEADS, keys, HEAD_DIM), (KV_HEADS, keys, HEAD_DIM))
        inputs = tuple(InputSpec(name, shape, dtype_of(cell)) for name, shape in zip("qkv", shapes, strict=True))
        calls = [[random(call, ROWS, *shape).to(dtype_of(cell)) for shape in shapes] for call in range(CALLS)]
        with Watch() as watch:
            op = attention_op(cell.attention, cell.device)
            step = Captured(cell, functools.partial(op, scale=HEAD_DIM**-0.5), inputs)
            found += [step(*(tensor[: cell.batch] for tensor in rows))[0] for rows in calls]
        reference = functools.partial(attention_op("sdpa", "cpu"), scale=HEAD_DIM**-0.5)
        for rows in calls:
            expected.append(torch.cat([reference(*(t[i : i + 1].float() for t in rows)) for i in batch(cell)]))
        evidence = step.evidence() | {"operators": watch.require(cell.attention)}
    worst = [
        compare(a.numpy(), b.numpy(), ("row", "head", "query", "feature"), cell.tolerance, name="outputs")
        for a, b in zip(found, expected, strict=True)
    ]
    return largest(worst), evidence


def predictor_frame(cell: Cell, root: Path) -> Result:
    """Whole frames: codes, greedy and sampled rows in turn; in bfloat16 the logits behind given codes."""
    parts, reference = (
        Predictor(open_tiny(cell.variant, root), device, op, dtype)
        for device, op, dtype in ((cell.device, cell.attention, dtype_of(cell)), ("cpu", "sdpa", torch.float32))
    )
    frame, inputs = (codes_frame, CODES_INPUTS) if cell.dtype == FLOAT32 else (logits_frame, LOGITS_INPUTS)
    hidden = InputSpec("hidden", (parts.config.talker.hidden_size,), dtype_of(cell))
    calls = []
    for call in range(CALLS):
        rows = predictor_rows(call, parts.config.talker.hidden_size)
        calls.append([rows["hidden"], *(rows[spec.name] for spec in inputs)])
    with Watch() as watch:
        step = Captured(cell, functools.partial(frame, parts), (hidden, *inputs))
        found = [
            step(first[: cell.batch].to(dtype_of(cell)), *(t[: cell.batch] for t in rest))[0] for first, *rest in calls
        ]
    expected = [torch.cat([frame(reference, *(t[i : i + 1] for t in rows)) for i in batch(cell)]) for rows in calls]
    evidence = step.evidence() | {"operators": watch.require(cell.attention)}
    if cell.dtype == FLOAT32:
        pairs = [compare_rows(a.numpy(), b.numpy()) for a, b in zip(found, expected, strict=True)]
        return largest(pairs), evidence
    axes = ("frame", "row", "residual codebook", "candidate")
    return compare(
        torch.stack(found).numpy(), torch.stack(expected).numpy(), axes, cell.tolerance, name="logits"
    ), evidence


def compare_rows(found: Any, expected: Any) -> Difference:
    """Compare codes of one frame in several rows, ``[rows, 16]``."""
    return compare(found.astype(np.int64), expected, ("frame of row", "codebook"), 0.0, name="codes")


CODES_INPUTS = (
    InputSpec("code0", (), torch.int64),
    InputSpec("temperature", (), torch.float32),
    InputSpec("top_k", (), torch.int64),
    InputSpec("top_p", (), torch.float32, 1.0),
    InputSpec("key", (), torch.int32),
)
LOGITS_INPUTS = (InputSpec("code0", (), torch.int64), InputSpec("forced", (NUM_CODEBOOKS - 1,), torch.int64))


def predictor_rows(call: int, width: int) -> dict[str, Tensor]:
    """Inputs of ROWS rows by name."""
    rng = torch.Generator().manual_seed(call)
    return {
        "hidden": torch.randn(ROWS, width, generator=rng),
        "code0": torch.randint(0, CODEBOOK_SIZE, (ROWS,), generator=rng),
        "temperature": torch.tensor([0.0, 0.8] * (ROWS // 2)),
        "top_k": torch.full((ROWS,), 50),
        "top_p": torch.tensor([1.0, 1.0, 1.0, 0.9] * (ROWS // 4)),
        "key": frame_key(*torch.randint(0, 2**31 - 1, (3, ROWS), generator=rng).to(torch.int32)),
        "forced": torch.randint(0, CODEBOOK_SIZE, (ROWS, NUM_CODEBOOKS - 1), generator=rng),
    }


def codes_frame(parts: Predictor, hidden: Tensor, code0: Tensor, *sampling: Tensor) -> Tensor:
    """All codes of a frame ``[B, 16]``."""
    temperature, top_k, top_p, key = sampling
    residual = parts.predictor(hidden, code0, SamplingRows(temperature, top_k, top_p), key)
    return torch.cat([code0[:, None], residual], dim=1)


def logits_frame(parts: Predictor, hidden: Tensor, code0: Tensor, forced: Tensor) -> Tensor:
    """Logits ``[B, 15, 2048]`` of a frame whose codes are given: a rounded logit must not change all that follows."""
    return plain_logits(parts.predictor, hidden, code0, forced)


def talker_step(cell: Cell, root: Path) -> Result:
    """One decode step of the talker's layers behind a context; the reference is the talker's own call."""
    with Watch() as watch:
        step = TalkerStep(open_tiny(cell.variant, root), cell.device, cell.attention, dtype_of(cell))
        width = step.config.talker.hidden_size
        context = random(100, ROWS, CONTEXT_ROWS, width)
        step.prefill(context.to(step.backend.device, step.dtype))
        run_step = Captured(cell, step, (InputSpec("rows", (width,), step.dtype),))
        rows = [random(call, ROWS, width)[: cell.batch] for call in range(CALLS)]
        found = [run_step(one.to(step.dtype)) for one in rows]
    evidence = run_step.evidence() | {"operators": watch.require(cell.attention)}
    reference = TalkerStep(open_tiny(cell.variant, root), "cpu", "sdpa", torch.float32)
    expected = [reference.one_by_one(context[: cell.batch], one) for one in rows]
    pairs = []
    for place, name in enumerate(("hidden states", "logits")):
        ours, theirs = (torch.stack([result[place] for result in results]).numpy() for results in (found, expected))
        pairs.append(compare(ours, theirs, ("step", "row", "feature"), cell.tolerance, name=name))
    return largest(pairs), evidence


def codec_chunk(cell: Cell, root: Path) -> Result:
    """Chunks of a stream, against one pass over the whole of it."""
    source = open_tiny(cell.variant, root)
    codes = torch.randint(0, CODEBOOK_SIZE, (ROWS, NUM_CODEBOOKS, CALLS * CHUNK_FRAMES))
    decoder = load_codec(source, cell.device, dtype_of(cell))
    state = decoder.new_state(ROWS + 1)
    inputs = (InputSpec("codes", (NUM_CODEBOOKS, CHUNK_FRAMES), torch.int64), InputSpec("slots", (), torch.int64, ROWS))
    step = Captured(cell, lambda part, slots: decoder.decode_step(part, state, slots), inputs)
    state.reset(torch.arange(ROWS + 1).to(decoder.device))
    slots = torch.arange(cell.batch)
    found = torch.cat([step(part, slots)[0] for part in codes[: cell.batch].split(CHUNK_FRAMES, dim=2)], dim=1)
    reference = load_codec(source, "cpu", torch.float32)
    expected = torch.cat([reference.decode(codes[i : i + 1]) for i in batch(cell)])
    shape = (cell.batch, -1, SAMPLES_PER_FRAME)
    axes = ("row", "frame", "sample")
    difference = compare(
        found.reshape(shape).numpy(), expected.reshape(shape).numpy(), axes, cell.tolerance, name="samples"
    )
    return difference, step.evidence()


def local_codes(cell: Cell, root: Path) -> Result:
    """Whole requests by the local engine, against the codes that the official package made."""
    chosen = [case for case in cases() if case.checkpoint.name == cell.variant and case.path.stem in GOLDEN_CASES]
    require(len(chosen) == len(GOLDEN_CASES), f"golden cases of {cell.variant}: {[case.id for case in chosen]}")
    (root / "golden").mkdir(exist_ok=True)
    engines: dict[Path, LocalEngine] = {}
    settings = Settings(graphs=graph_setting(cell), attention_op=cell.attention, predictor="plain")
    before, frames, replays = device_counts(cell).get("graph_replays", 0), 0, 0
    backend(cell.device)
    with Watch() as watch:
        for case in chosen:
            directory = checkpoint_for(case, root / "golden")
            if directory not in engines:
                device = backend(cell.device).name
                engines[directory] = LocalEngine.load(directory, device=device, dtype=cell.dtype, settings=settings)
            engine = engines[directory]
            require(engine.attention_name == cell.attention, f"{engine.attention_name} instead of {cell.attention}")
            require(engine.graph_mode == cell.graphs, f"{engine.graph_mode} instead of {cell.graphs}")
            short = replace(case.request(engine.config), max_frames=min(case.max_frames, 20))
            codes = engine.synthesize(short).codes
            compare_codes(codes, case.arrays["codes"][:20], name=case.id)
            frames += len(codes)
    evidence: dict[str, Any] = {"golden cases": len(chosen), "frames": frames, "mode": cell.graphs}
    if cell.graphs == "graph":
        replays = sum(engine._frame.counters["replays"] for engine in engines.values())
        require(replays >= frames, f"{replays} replays for {frames} frames")
        evidence["replays"] = replays
    evidence |= device_evidence(cell, cell.graphs == "graph", replays, before)
    return Difference(0.0, 0.0), evidence | {"operators": watch.require(cell.attention)}


MODULES: dict[str, Callable[[Cell, Path], Result]] = {
    "attention op": attention,
    "predictor frame": predictor_frame,
    "talker step": talker_step,
    "codec chunk": codec_chunk,
    "local codes": local_codes,
}


def random(seed: int, *shape: int) -> Tensor:
    """Normal values that follow from the seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(cell: Cell) -> range:
    """The rows of a cell, one by one."""
    return range(cell.batch)


def dtype_of(cell: Cell) -> torch.dtype:
    """The cell's dtype."""
    found: torch.dtype = getattr(torch, cell.dtype)
    return found


def largest(differences: list[Difference]) -> Difference:
    """The largest difference of several comparisons, and the mean of their means."""
    return Difference(max(d.largest for d in differences), sum(d.mean for d in differences) / len(differences))
