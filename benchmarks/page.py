"""Make docs/performance.md and its plot from result files: goals beside what was measured, and where it was measured.

    python -m benchmarks.page --prefix h200-2026-11-20-

Reads every ``<prefix>*.json`` in benchmarks/results, one JSON record each as the benchmarks print it, and beside them
``peer-<name>-<prefix>*.json``, the same programs' records of other packages on such a machine. Nothing is computed
that a file does not say; a figure without a file reads "not measured".
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "performance.png"
NOT_MEASURED = "not measured"
COLUMNS = ("metric", "must", "after", "measured", "verdict", "file")

INTRODUCTION = """# Performance

Figures for the published 1.7B CustomVoice size with random weights, bfloat16 talker, utterances of 10 s, one device.
`benchmarks/run_h200.sh` measures all of them in one call; `python -m benchmarks.page` writes this page from files in
`benchmarks/results`, whose README says how each was made. "must" is what a release has to reach, "after" what we want.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a result file."""

    file: str
    benchmark: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """One line of the table; ``find`` picks the figure out of a row, None if it is not there."""

    metric: str
    must: float
    after: float
    find: Callable[[Row], float | None]
    higher_is_better: bool = False

    def verdict(self, value: float) -> str:
        """Which of the two goals the value reaches, or by what factor it misses the first."""
        for name, goal in (("after", self.after), ("must", self.must)):
            if (value >= goal) if self.higher_is_better else (value <= goal):
                return f"reaches {name}"
        if not self.must:
            return "misses must"
        miss = self.must / value if self.higher_is_better else value / self.must
        return f"misses must by a factor of {miss:.2f}"


def _where(benchmark: str, column: str, **wanted: Any) -> Callable[[Row], float | None]:
    """Find ``column`` in rows of a benchmark (its name's beginning) that hold these values."""

    def find(row: Row) -> float | None:
        fits = row.benchmark.startswith(benchmark) and all(row.values.get(k) == v for k, v in wanted.items())
        value = row.values.get(column) if fits else None
        return None if value is None else float(value)

    return find


STEP = "frame step, fused, graph"
CODEC = "codec decoder, 1.7B, float32, fused medium"
GOALS = (
    Goal("frame step at B=1, ms", 2.4, 1.2, _where("code predictor", "frame_median_ms", what=STEP, rows=1)),
    Goal("frame step at B=64, ms", 3.5, 2.0, _where("code predictor", "frame_median_ms", what=STEP, rows=64)),
    Goal("codec at B=64, 8 frames, ms per frame-row", 0.06, 0.03, _where(CODEC, "frame_row_ms", rows=64, frames=8)),
    Goal("audio-s/s, 64 in flight", 400, 700, _where("serving", "audio_s_per_s", load="closed 64"), True),
    Goal("audio-s/s, 128 in flight", 550, 1_000, _where("serving", "audio_s_per_s", load="closed 128"), True),
    Goal("RTF, 1 in flight, p50", 0.06, 0.035, _where("serving", "rtf_p50", load="closed 1")),
    Goal("first audio, 1 in flight, p50, ms", 25, 15, _where("serving", "ttfa_p50_ms", load="closed 1")),
    Goal("first audio, 20 requests/s, p95, ms", 47, 25, _where("serving", "ttfa_p95_ms", load="poisson 20/s")),
    Goal("requests with an underrun, 20 requests/s", 0, 0, _where("serving", "underrun", load="poisson 20/s")),
    Goal("start to ready, second start, s", 60, 45, _where("server", "seconds", start="second")),
    Goal("memory beyond the key/value cache, GiB", 8, 6, _where("server", "beyond_cache_gib", start="second")),
)


def read(folder: Path, prefix: str) -> list[Row]:
    """All rows of the folder's result files with that prefix; files of another form hold none."""
    rows = []
    for path in sorted(folder.glob(f"{prefix}*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(record, dict) and "benchmark" in record:
            rows += [Row(path.name, record["benchmark"], values) for values in record["rows"]]
    return rows


def table(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """The goals' lines; the last file in alphabetical order wins."""
    for goal in GOALS:
        found = [(value, row.file) for row in rows if (value := goal.find(row)) is not None]
        goals = f"{goal.must:g}", f"{goal.after:g}"
        if found:
            value, file = found[-1]
            yield goal.metric, *goals, f"{value:.3g}", goal.verdict(value), f"`{file}`"
        else:
            yield goal.metric, *goals, NOT_MEASURED, "", ""


def read_peers(folder: Path, prefix: str) -> dict[str, list[Row]]:
    """Rows of other packages' files, by the package's name."""
    names = {path.name[: path.name.index(f"-{prefix}")] for path in folder.glob(f"peer-*-{prefix}*.json")}
    return {name.removeprefix("peer-"): read(folder, f"{name}-{prefix}") for name in sorted(names)}


def peer_table(rows: Sequence[Row], peer: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """The goals that a peer has figures for: ours, its own, and how many times better ours is."""
    for goal in GOALS:
        ours, others = ([value for row in some if (value := goal.find(row)) is not None] for some in (rows, peer))
        if ours and others and ours[-1] and others[-1]:
            times = ours[-1] / others[-1] if goal.higher_is_better else others[-1] / ours[-1]
            yield goal.metric, f"{ours[-1]:.3g}", f"{others[-1]:.3g}", f"{times:.2g}"


def page(rows: Sequence[Row], peers: Mapping[str, Sequence[Row]]) -> str:
    """The page's text."""
    parts = [INTRODUCTION, _markdown(COLUMNS, table(rows))]
    for name, peer in peers.items():
        columns = ("metric", "ours", name, "times better")
        parts += [f"Beside {name}, on the same kind of machine:", _markdown(columns, peer_table(rows, peer))]
    if series(rows):
        parts.append(f"![time of a step over the number of rows]({PLOT.name})")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _markdown(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    kinds = ["---" if column in ("metric", "verdict", "file") else "---:" for column in columns]
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, kinds, *lines))


def series(rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """Lines of the plot: milliseconds of a step over its rows."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        values, name = row.values, row.values.get("what", "")
        if row.benchmark.startswith("code predictor") and name.startswith("frame step"):
            lines.setdefault(name, []).append((values["rows"], values["frame_median_ms"]))
            lines.setdefault("a read of the predictor's weights", []).append((values["rows"], values["floor_ms"]))
        elif row.benchmark == CODEC and name == "step (graph)" and values["frames"] in (1, 8):
            label = f"codec step of {values['frames']} frame{'s' if values['frames'] > 1 else ''}"
            lines.setdefault(label, []).append((values["rows"], values["call_median_ms"]))
    return {name: sorted(set(points)) for name, points in lines.items()}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the series."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for name, points in series(rows).items():
        floor = name.startswith("a read")
        axes.plot(*zip(*points, strict=True), label=name, marker="" if floor else "o", linestyle=":" if floor else "-")
    axes.set(xscale="log", yscale="log", xlabel="rows", ylabel="ms per step", title="One step, captured as one graph")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Write page and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", required=True, help="of the result files that belong together")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = read(options.results, options.prefix)
    if not rows:
        parser.error(f"no result file in {options.results} begins with {options.prefix}")
    PAGE.write_text(page(rows, read_peers(options.results, options.prefix)), encoding="utf-8")
    if series(rows):
        draw(rows, PLOT)


if __name__ == "__main__":
    main()
