"""How every benchmark here measures and reports.

``measure`` times a function on a backend: warm-up first, the device synchronised around every call, median and 95th
percentile over n calls. ``report`` prints a table for people and then one JSON line, last, for programs: the rows, the
commit, package and driver versions, device and settings. Figures of two machines never belong into one table.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Protocol

PACKAGES = ("qwen3tts-hw", "torch", "torch-npu", "triton", "vllm", "vllm-ascend", "numpy")


class Synchronizable(Protocol):
    """What ``measure`` needs of a backend."""

    def synchronize(self) -> None:
        """Wait until the device has finished all work submitted so far."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The distribution of one measurement, in milliseconds."""

    median_ms: float
    p95_ms: float
    n: int

    @classmethod
    def of(cls, samples_ms: Iterable[float]) -> Timing:
        """Summarise samples; raise ValueError if there are none."""
        samples = sorted(samples_ms)
        return cls(percentile(samples, 50), percentile(samples, 95), len(samples))


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Interpolate a percentile of values in ascending order; raise ValueError if there are none."""
    if not ordered:
        raise ValueError("no values to take a percentile of")
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def measure(fn: Callable[[], object], backend: Synchronizable, repeats: int = 50, *, warmup: int = 5) -> Timing:
    """Time ``fn`` on the backend's device: each call from a synchronised start to a synchronised end."""
    for _ in range(warmup):
        fn()
    samples = []
    for _ in range(repeats):
        backend.synchronize()
        started = time.perf_counter()
        fn()
        backend.synchronize()
        samples.append((time.perf_counter() - started) * 1e3)
    return Timing.of(samples)


def report(name: str, rows: Sequence[Mapping[str, Any]], extra: Mapping[str, Any] | None = None) -> None:
    """Print the rows as a table, then everything as one JSON line.

    A :class:`Timing` in a row becomes the columns ``<key>_median_ms``, ``<key>_p95_ms`` and ``<key>_n``. ``extra`` says
    under which conditions: by convention ``device`` (``backend.describe()``), ``settings`` (``as_dict()``) and ``url``.
    """
    flat = [_flatten(row) for row in rows]
    print(f"\n{name}")
    print(table(flat))
    record = {"benchmark": name, "rows": flat, **environment(), **(extra or {})}
    print(json.dumps(record, default=str), flush=True)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay rows out in columns, in the order in which the keys first appear."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, *([_cell(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def environment() -> dict[str, Any]:
    """Describe what was measured and on what: commit, versions, machine."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "python": platform.python_version(),
        "versions": versions,
        "machine": f"{platform.machine()} {_processor()}".strip(),
        "driver": _driver(),
    }


def commit() -> str:
    """Name the commit that is checked out, with "-dirty" if files differ; "unknown" outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return _output(command) or "unknown"


def _flatten(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if is_dataclass(value) and not isinstance(value, type):
            flat |= {f"{key}_{field}": part for field, part in asdict(value).items()}
        else:
            flat[key] = value
    return flat


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _driver() -> str:
    return _output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])


def _output(command: list[str]) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""
