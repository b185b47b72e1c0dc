"""The parity matrix: its cheap CPU cells pass, and its runner reports what must not pass.

Graph cells on a CPU replay recordings, which keep the rules of device graphs. ``make parity`` runs the whole table.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from qwen3tts_hw import attention_ops
from qwen3tts_hw.attention_ops.sdpa import SdpaAttention
from tests.parity import cell_report, cell_runs, run_matrix
from tests.parity.cell_models import Watch
from tests.parity.cell_outcome import FAILED, NOT_RUN, PASSED, REFERENCE, MismatchError, NotReachedError, Outcome
from tests.parity.matrix import ATTENTION, DEVICES, EMULATED, SERVED, Cell, cells

# Batch 3 runs padded, in a bucket of 4; the others follow from `make parity`.
CHEAP = [
    cell
    for cell in cells()
    if cell.device == "cpu" and cell.batch == 3 and cell.variant != "custom_voice-tiny-0.6B" and cell.module != SERVED
]
GRAPHED = next(c for c in CHEAP if c.module == "predictor frame" and c.graphs == "graph" and c.dtype == "float32")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.mark.parametrize("cell", CHEAP, ids=lambda cell: cell.id.replace(" ", ""))
def test_the_cell_agrees_by_its_own_path(cell: Cell, root: Path) -> None:
    _, evidence = cell_runs.run(cell, root)
    assert evidence["mode"] == cell.graphs


def test_a_golden_cell_by_recorded_graphs(root: Path) -> None:
    chosen = [c for c in cells() if (c.device, c.module, c.graphs) == ("cpu", "local codes", "graph")]
    _, evidence = cell_runs.run(chosen[0], root)
    assert evidence["replays"] >= evidence["frames"] > 0


class TestTheTable:
    def test_covers_what_it_promises(self) -> None:
        every = cells()
        assert len({cell.id for cell in every}) == len(every)
        for device in DEVICES:
            own = [cell for cell in every if cell.device == device]
            assert {cell.batch for cell in own} == {1, 3, 8}
            assert {cell.dtype for cell in own} == {"float32", "bfloat16"}
            assert {cell.attention for cell in own} == {"own", *ATTENTION[device]}
            assert SERVED in {cell.module for cell in own}
        modes = {cell.graphs for cell in every if cell.device == EMULATED and cell.module == SERVED}
        assert modes == {"eager", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"}

    def test_lists_nothing_that_an_operator_refuses(self) -> None:
        assert not [c for c in cells() if c.attention == "npu_fused_infer" and c.dtype == "float32"]


class TestPlantedFaults:
    def test_a_wrong_code_is_named_with_frame_codebook_and_both_values(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = cell_runs.codes_frame

        def wrong(parts, *rows):  # type: ignore[no-untyped-def]  # as the function it stands in for
            codes = right(parts, *rows)
            if rows[0].shape[0] > 1:  # the compared batch, not the reference's single rows
                codes[1, 5] = 1_000_000
            return codes

        monkeypatch.setattr(cell_runs, "codes_frame", wrong)
        with pytest.raises(MismatchError, match=r"frame of row 1, codebook 5: 1e\+06 instead of \d+"):
            cell_runs.run(GRAPHED, root)

    def test_a_result_that_is_no_number_is_a_mismatch(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Broken(SdpaAttention):
            def __call__(self, query, key, value, *, scale):  # type: ignore[no-untyped-def]  # as its base
                found = super().__call__(query, key, value, scale=scale)
                return found.masked_fill(found > 0, float("nan")) if query.shape[0] > 1 else found

        monkeypatch.setattr(attention_ops, "create", lambda name, backend: Broken())
        cell = next(c for c in CHEAP if c.module == "attention op" and c.attention == "sdpa")
        with pytest.raises(MismatchError, match="outputs differ first at row 0, head 0"):
            cell_runs.run(cell, root)

    def test_an_eager_run_does_not_pass_for_a_graph(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cell_runs, "graph_setting", lambda cell: "off")
        with pytest.raises(NotReachedError, match="eager instead of graph"):
            cell_runs.run(GRAPHED, root)

    def test_another_bucket_is_noticed(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cell_runs, "BUCKETS", (8,))
        with pytest.raises(NotReachedError, match="0 replays of bucket 4 in 3 calls"):
            cell_runs.run(GRAPHED, root)

    def test_another_attention_op_is_noticed(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        cell = replace(GRAPHED, attention="npu_reference")
        right = attention_ops.create
        monkeypatch.setattr(attention_ops, "create", lambda name, backend: right("sdpa", backend))
        with pytest.raises(NotReachedError, match="asked for the attention op npu_reference, got sdpa"):
            cell_runs.run(cell, root)

    def test_an_op_that_calls_another_operator_is_noticed(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        disguised = SdpaAttention()
        disguised.name = "npu_reference"
        right = attention_ops.create
        monkeypatch.setattr(
            attention_ops, "create", lambda name, to: disguised if name != "sdpa" else right("sdpa", to)
        )
        with pytest.raises(NotReachedError, match=r"scaled_dot_product.* ran instead of or beside npu_reference"):
            cell_runs.run(replace(GRAPHED, attention="npu_reference"), root)

    def test_an_operator_that_never_ran_is_noticed(self) -> None:
        with Watch() as watch:
            pass
        with pytest.raises(NotReachedError, match="npu_fusion_attention_v3, seen: no attention operator"):
            watch.require("npu_fusion_v3")

    def test_the_runner_reports_each_as_failed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        faults = {
            0: MismatchError("codes differ first at frame 2, codebook 7: 5 instead of 6"),
            1: NotReachedError("no"),
        }
        chosen = CHEAP[:3]

        def run(cell: Cell, root: Path) -> object:
            if chosen.index(cell) in faults:
                raise faults[chosen.index(cell)]
            return cell_runs.Difference(0.0, 0.0), {"mode": cell.graphs}

        monkeypatch.setattr(cell_runs, "run", run)
        listing, results = tmp_path / "cells", tmp_path / "results"
        listing.write_text(json.dumps([cell.id for cell in chosen]))
        run_matrix.work(listing, results, tmp_path)
        found = [Outcome(**json.loads(line)) for line in results.read_text().splitlines() if line]
        assert [outcome.status for outcome in found] == [FAILED, FAILED, PASSED]
        assert "frame 2, codebook 7: 5 instead of 6" in found[0].reason
        assert all(outcome.date and outcome.where for outcome in found)

    def test_a_process_that_dies_fails_its_cells(self) -> None:
        dies = ["bash", "-c", 'echo > "${@: -1}"; exit 3', "bash"]  # its last argument is the file of results
        found = run_matrix.run_elsewhere(CHEAP[:2], dies)
        assert [outcome.status for outcome in found.values()] == [FAILED, FAILED]
        assert "ended with 3" in found[CHEAP[0].id].reason

    def test_an_environment_that_cannot_be_made_is_no_failure(self) -> None:
        found = run_matrix.run_elsewhere(CHEAP[:2], ["false"])
        assert [outcome.status for outcome in found.values()] == [NOT_RUN, NOT_RUN]
        assert "ended with 1" in found[CHEAP[0].id].reason


class TestReport:
    def test_unrun_cells_say_so_and_emulated_ones_are_marked(self, tmp_path: Path) -> None:
        emulated = next(cell for cell in cells() if cell.device == EMULATED)
        ran = Outcome(emulated.id, PASSED, largest=1e-7, emulated=True, date="2026-01-02", where="emulated", commit="x")
        (tmp_path / "parity.md").write_text(f"# Before\n{cell_report.BEGIN}\nstale words\n{cell_report.END}\nafter\n")
        cell_report.write(tmp_path, run_matrix.combined({emulated.id: ran}))
        page = (tmp_path / "parity.md").read_text()
        assert page.startswith("# Before\n")
        assert page.endswith(f"{cell_report.END}\nafter\n")
        assert "stale words" not in page
        assert "passed (1e-07), emulated" in page
        assert f"NVIDIA, {sum(cell.device == 'cuda' for cell in cells())} cells: not asked for" in page
        again = run_matrix.read(tmp_path / "parity.json")
        assert again[emulated.id] == ran
        assert len(again) == len(cells())

    def test_results_of_another_machine_are_merged_with_date_and_device(self) -> None:
        cuda = next(cell for cell in cells() if cell.device == "cuda")
        here = run_matrix.combined({cuda.id: Outcome(cuda.id, NOT_RUN, "no device")})
        assert here[cuda.id].reason == "no device"
        there = {cuda.id: Outcome(cuda.id, PASSED, date="2026-01-02", where="a GPU", commit="x")}
        merged = run_matrix.combined(here, there, {cuda.id: Outcome(cuda.id, NOT_RUN, "no device")})
        assert (merged[cuda.id].status, merged[cuda.id].where) == (PASSED, "a GPU")
        assert "| passed |" in cell_report.markdown(merged).replace("passed (0e+00)", "passed")

    def test_a_run_that_did_not_ask_for_a_cell_leaves_its_reason(self) -> None:
        cuda = next(cell for cell in cells() if cell.device == "cuda")
        earlier = {cuda.id: Outcome(cuda.id, NOT_RUN, "no device")}
        assert run_matrix.combined(earlier, run_matrix.combined())[cuda.id].reason == "no device"

    def test_the_reference_is_never_called_passed(self) -> None:
        references = [cell for cell in cells() if cell.is_reference]
        assert references
        found = run_matrix.combined({cell.id: Outcome(cell.id, PASSED) for cell in references})
        assert {found[cell.id].status for cell in references} == {REFERENCE}

    def test_a_device_that_is_not_there_is_named(self) -> None:
        from qwen3tts_hw.backends import npu

        if npu.missing() is None:
            pytest.skip("there is an Ascend device")
        found = run_matrix.run_selected([cell for cell in cells() if cell.device == "npu"], None)
        assert {outcome.status for outcome in found.values()} == {NOT_RUN}
        assert all("torch_npu" in outcome.reason for outcome in found.values())
