"""What a frame costs on the emulated device, by who asked for it; printed by the tests and quoted in docs/parity.md."""

from __future__ import annotations

from collections import Counter

from ascend_emulator import origins

FIGURES = (
    "graph replays",
    "operators outside graphs",
    "waits for a stream",
    "waits for an event",
    "copies host to device",
    "copies device to host",
)
_NO_OPERATORS = ("eager copy host to device", "eager copy device to host", "eager aten::_local_scalar_dense")


def figures(counts: Counter[str], owners: tuple[str, ...]) -> dict[str, float]:
    """The figures of what ``owners`` asked for."""
    own = origins.of(counts, *owners)
    waits = own["host_syncs"] + own["device_syncs"], own["event_syncs"]
    operators = sum(n for name, n in own.items() if name.startswith("eager ") and name not in _NO_OPERATORS)
    copies = own["copies_host_to_device"], own["copies_device_to_host"]
    return dict(zip(FIGURES, (own["graph_replays"], operators, *waits, *copies), strict=True))


def by_owner(counts: Counter[str]) -> dict[str, dict[str, float]]:
    """Figures of the package and of the engine around it, in the engine's thread and beside it."""
    others = tuple(owner for owner in origins.OWNERS if owner != origins.PACKAGE)
    return {
        "package": figures(counts, (origins.PACKAGE,)),
        "package, sender thread": figures(counts, (origins.PACKAGE + origins.BESIDE,)),
        "vLLM and vllm-ascend": figures(counts, others),
        "vLLM and vllm-ascend, other threads": figures(counts, tuple(owner + origins.BESIDE for owner in others)),
    }


def divided(counts: Counter[str], times: int) -> dict[str, dict[str, float]]:
    """The same per frame or step."""
    return {
        owner: {name: number / times for name, number in found.items()} for owner, found in by_owner(counts).items()
    }


def table(title: str, rows: dict[str, dict[str, float]]) -> str:
    """A Markdown table."""
    lines = [f"| {title} | " + " | ".join(FIGURES) + " |", "|---|" + "---:|" * len(FIGURES)]
    lines += [
        f"| {owner} | " + " | ".join(f"{round(row[name], 2):g}" for name in FIGURES) + " |"
        for owner, row in rows.items()
    ]
    return "\n".join(lines)
