"""Writes the matrix's results: JSON for machines, tables between the markers of parity.md, a heat map."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.parity.cell_outcome import FAILED, NOT_RUN, PASSED, REFERENCE, Outcome
from tests.parity.matrix import ALL_BATCHES, DEVICES, EMULATED, Cell, cells

BEGIN, END = "<!-- parity matrix: written by make parity -->", "<!-- end of the parity matrix -->"
TITLES = {"cpu": "CPU", "cuda": "NVIDIA", EMULATED: "Ascend, emulated", "npu": "Ascend"}
COLOURS = {PASSED: "#4c9f70", FAILED: "#c0392b", NOT_RUN: "#d9d9d9", REFERENCE: "#3b6ea5"}
EMULATED_HATCH = "////"
Outcomes = Mapping[str, Outcome]


def write(folder: Path, outcomes: Outcomes) -> None:
    """Write parity.json, the tables of parity.md, and parity.png if matplotlib is installed."""
    ordered = [outcomes[cell.id].as_json() for cell in cells()]
    lines = ",\n".join("  " + json.dumps(one) for one in ordered)
    (folder / "parity.json").write_text(f'{{"cells": [\n{lines}\n]}}\n')
    page = folder / "parity.md"
    text = page.read_text() if page.exists() else f"{BEGIN}\n{END}\n"
    before, rest = text.split(BEGIN)
    page.write_text(before + BEGIN + "\n\n" + markdown(outcomes) + "\n" + END + rest.split(END)[1])
    if importlib.util.find_spec("matplotlib") is not None:
        draw(folder / "parity.png", outcomes)


def totals(outcomes: Outcomes) -> str:
    """One line that counts results."""
    counts = Counter(outcome.status for outcome in outcomes.values())
    return ", ".join(f"{counts[status]} {status}" for status in (PASSED, FAILED, NOT_RUN, REFERENCE))


def markdown(outcomes: Outcomes) -> str:
    """The tables: a summary, then every device that ran something."""
    parts = [summary(outcomes)]
    for device in DEVICES:
        own = [cell for cell in cells() if cell.device == device]
        if any(outcomes[cell.id].status in (PASSED, FAILED) for cell in own):
            parts.append(device_section(device, own, outcomes))
    return "\n".join(parts)


def summary(outcomes: Outcomes) -> str:
    """Counts per module and device."""
    modules = list(dict.fromkeys(cell.module for cell in cells()))
    lines = [f"In all: {totals(outcomes)}.", "", "| | " + " | ".join(TITLES[device] for device in DEVICES) + " |"]
    lines.append("|---|" + "---|" * len(DEVICES))
    for module in modules:
        row = [counted(module, device, outcomes) for device in DEVICES]
        lines.append(f"| {module} | " + " | ".join(row) + " |")
    lines += ["", "Why cells were not run:", ""]
    for device in DEVICES:
        reasons = Counter(
            outcomes[cell.id].reason
            for cell in cells()
            if cell.device == device and outcomes[cell.id].status == NOT_RUN
        )
        lines += [f"- {TITLES[device]}, {count} cells: {reason}" for reason, count in reasons.items()]
    return "\n".join(lines) + "\n"


def counted(module: str, device: str, outcomes: Outcomes) -> str:
    """One entry of the summary."""
    found = [outcomes[c.id] for c in cells() if (c.module, c.device) == (module, device)]
    counts = Counter(outcome.status for outcome in found)
    words = [f"{counts[status]} {status}" for status in (PASSED, FAILED, NOT_RUN) if counts[status]]
    if counts[PASSED] + counts[FAILED] and any(outcome.emulated for outcome in found):
        words.append("emulated")
    return ", ".join(words) or "-"


def device_section(device: str, own: Sequence[Cell], outcomes: Outcomes) -> str:
    """The table of one device: a row per combination, a column per batch size."""
    ran = [outcomes[cell.id] for cell in own if outcomes[cell.id].date]
    lines = [f"### {TITLES[device]}", ""]
    for date, where in sorted({(outcome.date, outcome.where) for outcome in ran}):
        sources = sorted({o.commit for o in ran if (o.date, o.where) == (date, where)})
        lines.append(f"- {date}, {where}; source {', '.join(sources)}")
    columns = " | ".join(f"batch {size}" for size in ALL_BATCHES)
    lines += ["", f"| what | checkpoint | attention op | graphs | dtype | {columns} | compared |", "|---|" + "---|" * 8]
    rows: dict[tuple[str, ...], dict[int, Cell]] = {}
    for cell in own:
        key = (cell.module, cell.variant, cell.attention, cell.graphs, cell.dtype)
        rows.setdefault(key, {})[cell.batch] = cell
    for key, by_batch in rows.items():
        entries = [entry(by_batch[size], outcomes) if size in by_batch else "" for size in ALL_BATCHES]
        first = next(iter(by_batch.values()))
        bound = f" up to {first.tolerance:g}" if first.tolerance else ""
        lines.append("| " + " | ".join((*key, *entries, first.comparator + bound)) + " |")
    failures = [f"- {o.id}: {o.reason}" for o in (outcomes[cell.id] for cell in own) if o.status == FAILED]
    return "\n".join([*lines, *(["", "Failed:", "", *failures] if failures else [])]) + "\n"


def entry(cell: Cell, outcomes: Outcomes) -> str:
    """What the table says of one cell."""
    outcome = outcomes[cell.id]
    text = outcome.status
    if outcome.status == PASSED and cell.tolerance and outcome.largest is not None:
        text += f" ({outcome.largest:.0e})"
    return f"{text}, emulated" if outcome.emulated and outcome.date else text


def draw(path: Path, outcomes: Outcomes) -> None:
    """A heat map: a row per module, checkpoint and dtype; a column per device, attention op, graph mode and batch."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    plots, patches = (importlib.import_module(f"matplotlib.{name}") for name in ("pyplot", "patches"))
    rows = _unique((cell.module, cell.variant, cell.dtype) for cell in cells())
    columns = _unique((cell.device, cell.attention, cell.graphs) for cell in cells())
    columns.sort(key=lambda column: (DEVICES.index(column[0]), column[1] == "own"))
    figure, axes = plots.subplots(figsize=(3.2 + 0.36 * len(columns), 3.2 + 0.34 * len(rows)), dpi=90)
    every = cells()
    for cell in every:
        place = columns.index((cell.device, cell.attention, cell.graphs))
        batches = [c.batch for c in every if c.module == cell.module and c.device == cell.device]
        third = ALL_BATCHES.index(cell.batch) if len(set(batches)) > 1 else 0
        width = 1 / 3 if len(set(batches)) > 1 else 1.0
        corner = (place + third * width, rows.index((cell.module, cell.variant, cell.dtype)))
        colour = COLOURS[outcomes[cell.id].status]
        hatch = EMULATED_HATCH if outcomes[cell.id].emulated else None
        axes.add_patch(patches.Rectangle(corner, width, 1, facecolor=colour, edgecolor="white", lw=0.6, hatch=hatch))
    _label(axes, rows, columns)
    key = [patches.Patch(color=colour, label=status) for status, colour in COLOURS.items()]
    key.append(patches.Patch(facecolor="#888888", edgecolor="white", hatch=EMULATED_HATCH, label="emulated"))
    figure.legend(handles=key, loc="lower left", ncols=len(key), frameon=False)
    axes.set_title(f"Parity matrix: {totals(outcomes)}; thirds of a field: batch 1, 3 in a bucket of 4, 8", fontsize=9)
    figure.savefig(path, bbox_inches="tight", metadata={"Software": None})
    plots.close(figure)


def _label(axes: Any, rows: list[tuple[str, ...]], columns: list[tuple[str, ...]]) -> None:
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(rows), 0)
    axes.set_xticks([i + 0.5 for i in range(len(columns))])
    axes.set_xticklabels([f"{TITLES[d]}: {op}, {graphs}" for d, op, graphs in columns], rotation=90, fontsize=7)
    axes.set_yticks([i + 0.5 for i in range(len(rows))])
    axes.set_yticklabels([", ".join(row) for row in rows], fontsize=7)
    for place in range(1, len(columns)):
        if columns[place][0] != columns[place - 1][0]:
            axes.axvline(place, color="black", linewidth=1.2)
    axes.tick_params(length=0)


def _unique(values: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(values))
