"""The performance page: what the files say, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.page import GOALS, NOT_MEASURED, PAGE, RESULTS, draw, page, peer_table, read, read_peers, series, table

STEP = "frame step, fused, graph"


def write(folder: Path, name: str, benchmark: str, *rows: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps({"benchmark": benchmark, "rows": rows}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    step = {"what": STEP, "floor_ms": 0.5}
    predictor = [step | {"rows": 1, "frame_median_ms": 1.1}, step | {"rows": 64, "frame_median_ms": 4.2}]
    write(tmp_path, "a-predictor.json", "code predictor, 1.7B, bfloat16", *predictor)
    write(tmp_path, "a-serving.json", "serving", {"load": "closed 64", "audio_s_per_s": 500.0})
    write(tmp_path, "b-serving.json", "serving", {"load": "closed 64", "audio_s_per_s": 900.0})
    (tmp_path / "a-other.json").write_text("[]")
    write(tmp_path, "peer-slow-1.0-a-c64.json", "serving", {"load": "closed 64", "audio_s_per_s": 100.0})
    write(tmp_path, "peer-slow-1.0-a-c1.json", "serving", {"load": "closed 1", "rtf_p50": 0.1})
    return tmp_path


def test_each_goal_is_judged_by_its_file(folder: Path) -> None:
    lines = {line[0]: line[1:] for line in table(read(folder, "a-"))}
    assert len(lines) == len(GOALS)
    assert lines["frame step at B=1, ms"] == ("2.4", "1.2", "1.1", "reaches after", "`a-predictor.json`")
    assert lines["frame step at B=64, ms"][3] == "misses must by a factor of 1.20"
    assert lines["audio-s/s, 64 in flight"][2:4] == ("500", "reaches must")
    assert lines["RTF, 1 in flight, p50"][2:] == (NOT_MEASURED, "", "")


def test_a_higher_figure_is_better_where_it_should_be() -> None:
    goal = next(goal for goal in GOALS if goal.metric == "audio-s/s, 64 in flight")
    assert [goal.verdict(value) for value in (700, 400)] == ["reaches after", "reaches must"]
    assert goal.verdict(200) == "misses must by a factor of 2.00"
    none = next(goal for goal in GOALS if goal.metric.startswith("requests with an underrun"))
    assert [none.verdict(value) for value in (0, 3)] == ["reaches after", "misses must"]


def test_a_peer_is_compared_where_both_were_measured(folder: Path) -> None:
    peers = read_peers(folder, "a-")
    assert list(peers) == ["slow-1.0"]
    assert list(peer_table(read(folder, "a-"), peers["slow-1.0"])) == [("audio-s/s, 64 in flight", "500", "100", "5")]
    assert "| audio-s/s, 64 in flight | 500 | 100 | 5 |" in page(read(folder, "a-"), peers)
    assert read_peers(folder, "b-") == {}


def test_the_plot_has_a_line_for_each_form(folder: Path) -> None:
    rows = read(folder, "a-")
    assert series(rows) == {STEP: [(1, 1.1), (64, 4.2)], "a read of the predictor's weights": [(1, 0.5), (64, 0.5)]}
    draw(rows, folder / "plot.png")
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_in_the_tree_is_what_the_files_say() -> None:
    text = PAGE.read_text(encoding="utf-8")
    prefixes = {path.name[:16] for path in RESULTS.glob("h200-*")}
    assert any(text == page(read(RESULTS, prefix), read_peers(RESULTS, prefix)) for prefix in prefixes)
