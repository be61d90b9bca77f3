"""The bench's output: table, footer, JSON rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mpicomm.bench.__main__ import FACTS, row_of
from mpicomm.bench.measure import Outcome
from mpicomm.bench.operations import OPERATIONS, Case
from mpicomm.bench.report import ResultRow, Results, Table

PLACES = ("out-of-place", "in-place")
CASE = Case(OPERATIONS["allreduce"], np.dtype(np.float32), "sum", 1 << 28, False, 0, 4)


def outcome(time_us: float, wrong: int | None = 0, eager: str = "", issue_us: float | None = None) -> Outcome:
    return Outcome(time_us, issue_us, wrong, eager, "", 0.25)


def results() -> Results:
    small, large = {"mpi": "not in place"}, {"mpi": "too large"}
    out_of_place = {"mpicomm": outcome(3.0), "nccl": outcome(9.0), "mpi": outcome(30.0, eager="held")}
    in_place = {"mpicomm": outcome(4200.0, wrong=5), "nccl": outcome(4620.0, wrong=2)}
    rows = [
        row_of(
            dataclasses.replace(CASE, block=256),
            {
                "out-of-place": (out_of_place, {}),
                "in-place": ({"mpicomm": outcome(4.0), "nccl": outcome(2.0)}, small),
            },
        ),
        row_of(
            CASE,
            {
                "out-of-place": ({"mpicomm": outcome(4200.0), "nccl": outcome(4100.0)}, large),
                "in-place": (in_place, large),
            },
        ),
    ]
    return Results(["nccl", "mpi"], rows=rows)


def table(places: Sequence[str] = PLACES[:1], others: Sequence[str] = (), *, issue: bool = False) -> Table:
    return Table(FACTS, places, others, ("algbw", "busbw"), issue=issue)


def one_row(case: Case, found: Outcome) -> ResultRow:
    return row_of(case, {"out-of-place": ({"mpicomm": found}, {})})


def test_table_has_nccl_tests_columns_and_a_pair_for_each_peer() -> None:
    both_peers = table(PLACES, ["nccl", "mpi"])
    head = both_peers.head()
    first, last = map(both_peers.line, results().rows)
    own, peers = ["time", "+-", "algbw", "busbw", "#wrong"], ["time", "ratio"] * 2
    assert head[1].split() == ["#", "size", "count", "type", "redop", "root", *(own + peers) * 2]
    assert head[0].split() == ["#", "out-of-place", "nccl", "mpi", "in-place", "nccl", "mpi"]
    out_of_place = "3.00 25 0.34 0.51 0 9.00 3.00 30.00* 10.00"
    assert " ".join(first.split()) == f"1024 256 float32 sum - {out_of_place} 4.00 25 0.26 0.38 0 2.00 0.50 - -"
    both = ("4200.00 25 255.65 383.48 0 4100.00 0.98 - -", "4200.00 25 255.65 383.48 5 4620.00 1.10 - -")
    assert " ".join(last.split()) == f"1073741824 268435456 float32 sum - {' '.join(both)}"
    assert len({len(line) for line in (head[0].ljust(len(first)), head[1].ljust(len(first)), first, last)}) == 1


def test_cells_of_calls_one_by_one_of_a_barrier_and_of_a_broadcast() -> None:
    with_issue = table(issue=True)
    assert "issue" in with_issue.head()[1]  # what the caller waits
    assert with_issue.line(one_row(CASE, outcome(5.5, issue_us=4.0))).split()[5:7] == ["4.00", "5.50"]
    barrier = dataclasses.replace(CASE, operation=OPERATIONS["barrier"], block=1)
    cells = table().line(one_row(barrier, outcome(2.0, None))).split()
    assert cells == ["0", "0", "float32", "-", "-", "2.00", "25", "0.00", "0.00", "N/A"]
    bcast = dataclasses.replace(CASE, operation=OPERATIONS["bcast"])
    assert table().line(one_row(bcast, outcome(2.0))).split()[3:5] == ["-", "0"]


def test_geometric_means_and_lines_below_the_table() -> None:
    found = results()
    assert {
        name: {place: round(mean, 3) for place, mean in of.items()} for name, of in found.geometric_means().items()
    } == {
        "nccl": {"out-of-place": 1.711, "in-place": 0.742},
        "mpi": {"out-of-place": 10.0},
    }
    assert found.wrong() == {"mpicomm": 5, "nccl": 2}
    lines = found.footer()
    assert "nccl / mpicomm, geometric mean: out-of-place 1.711 (2 rows), in-place 0.742 (2 rows)" in lines
    assert "* mpi is timed call by call: held" in lines
    assert lines.count("- mpi: too large") == 1
    assert "nccl: 2 wrong" in lines
    assert found.document()[0]["missing"] == {"in-place": {"mpi": "not in place"}}
