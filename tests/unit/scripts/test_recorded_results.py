"""The scripts that measure write files that scripts/results/tables.py makes tables of, and long runs find no fault."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.jobs.in_turn import run_named
from tests.helpers.jobs.mpiexec import ROOT, environment, run_command

pytestmark = pytest.mark.sweep

SHORTER = {
    "testing/soak_rounds.py": {"CALLS = 200": "CALLS = 40"},
    "measuring/measure.py": {"ROUNDS = 21": "ROUNDS = 2", "host_ring(64 << 20)": "host_ring(1 << 20)"},
    "measuring/measure_strided.py": {"IN_FLIGHT = 7, 30, 20": "IN_FLIGHT = 2, 2, 4"},
}
"""Lines of the project's scripts that decide how long they take."""
BENCHES = {
    "scatter": ("scatter", "-D", "cpu", "-e", "1K", "-n", "2", "-c", "1"),
    "products": ("matmul", "-D", "cpu", "--rows", "8", "--shape", "4,6", "-n", "1", "-G", "1"),
}


def run(project: Path, *command: str) -> None:
    subprocess.run([sys.executable, *command], cwd=project, env=environment(), check=True)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a README.md and the scripts, which have measured on two ranks and written the tables."""
    project = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "scripts", project / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", project)
    measuring, results = project / "scripts/measuring", project / "scripts/results"
    for name, lines in SHORTER.items():
        source = (project / "scripts" / name).read_text()
        for line, shorter in lines.items():
            assert source.count(line) == 1, line
            source = source.replace(line, shorter)
        (project / "scripts" / name).write_text(source)

    soak = (project / "scripts/testing/soak.py", "--device=cpu")
    recorded = (*soak, f"--json={results}/soak-here.json")
    collectives = (measuring / "measure_host_collectives.py", "--kib=16", "--only=Allreduce,Scan", "--rounds=1")
    programs: dict[str, tuple[str | Path, ...]] = {
        "soak": (*soak, "--seconds=0.1"),
        "soak of communicators": (*recorded, "--communicators=20"),
        "soak of registrations": (*recorded, "--registrations=20"),
        "memory": (measuring / "measure.py", "--json", results / "memory-here.json"),
        "strided": (measuring / "measure_strided.py", "--divide=64", f"--json={results}/strided-2-here.json"),
        "collectives": (*collectives, f"--json={results}/collectives-here.json"),
    }
    for name, bench in BENCHES.items():
        programs[name] = ("-m", "mpicomm.bench", *bench, "-J", project / f"{name}.json")
    ended, said = run_named(2, programs, MPICOMM_DEVICE="cpu")
    assert {code for _, code in ended.values()} == {0}, said
    assert all("all results are right" in ended[name][0] for name in programs if "soak" in name)
    long_runs = f"--json={results}/soak-here.json"
    run(project, "scripts/testing/fuzz.py", "--packets=3000", long_runs)
    run(project, "scripts/testing/soak_deaths.py", "--device=cpu", "--trials=3", long_runs)
    for name in BENCHES:
        run(project, "scripts/measuring/add_result.py", f"{name}.json", f"{name}-here")

    strided = read(project, "strided-2-here")
    strided[0]["hardware"] = "2 x NVIDIA H200, NVLink"
    strided[0]["rows"][2][0] = "512 x 512 x 512 complex64"
    (results / "strided-2-here.json").write_text(json.dumps(strided))
    run(project, "scripts/results/tables.py")
    return project


def read(project: Path, name: str) -> Any:
    return json.loads((project / f"scripts/results/{name}.json").read_text())


def shown(project: Path, name: str) -> tuple[int, str]:
    """Return how many tables there are of a file, and the text after its first mention."""
    _, *rest = (project / "scripts/results/README.md").read_text().split(f"[{name}.json]({name}.json)")
    return len(rest), "".join(rest)


def test_rows_of_long_runs_share_a_table(project: Path) -> None:
    tables, text = shown(project, "soak-here")
    rows = [line.split(" | ") for line in text.split("###")[0].splitlines() if line.startswith("| ")][2:]
    assert [row[2] for row in rows] == ["20 communicators", "20 registrations", "3,000", "3"]
    assert tables == 1 and all("no wrong bit" in row[3] for row in rows[:2])
    assert re.search(r"survivors raised after at most \d+\.", rows[3][3])


def test_a_table_has_one_hardware(project: Path) -> None:
    file = project / "other.json"
    long_runs = read(project, "soak-here")
    file.write_text(json.dumps({**long_runs, "hardware": "another machine"}))
    job = run_command(sys.executable, "scripts/testing/fuzz.py", "--packets=3", f"--json={file}", cwd=project)
    assert job.returncode != 0 and json.loads(file.read_text())["rows"] == long_runs["rows"]


def test_one_file_of_measured_memory_has_several_tables(project: Path) -> None:
    tables, text = shown(project, "memory-here")
    assert tables == 2 and "| step | 2 ranks, cpu, `memfd`, ms |" in text
    assert "`mpirun -np 2 python " in text and "--json" not in text


def test_strided_exchanges_have_tables_a_picture_and_a_line_in_the_readme(project: Path) -> None:
    assert [len(document["rows"]) for document in read(project, "strided-2-here")] == [6, 4, 18]
    assert shown(project, "strided-2-here")[0] == 3
    assert "`redistribute` of 512 x 512 x 512" in " ".join((project / "README.md").read_text().split())
    file = "scripts/results/strided-2-here.json"
    run(project, "scripts/documents/chart.py", "strided.svg", f"--strided={file}")
    assert "512 x 512 x 512 complex64" in (project / "strided.svg").read_text()


def test_collectives_of_the_host_have_a_row_for_each_way(project: Path) -> None:
    rows = [row[:3] for row in read(project, "collectives-here")["rows"]]
    assert ["Scan", "16 KiB", "one_shot"] in rows and ["Allreduce", "16 KiB", "two_shot"] in rows
    assert "through mapped memory, 2 ranks" in (project / "scripts/results/README.md").read_text()


def test_a_result_of_the_bench_becomes_a_section_without_names_of_machines(project: Path) -> None:
    added, result = (project / "scripts/results/scatter-here.json").read_text(), project / "scatter.json"
    assert json.loads(result.read_text())["ranks"][0]["host"] not in added and str(project) not in added
    assert f"`mpirun -np 2 python -m mpicomm.bench {' '.join(BENCHES['scatter'])}`" in shown(project, "scatter-here")[1]
    assert "| matmul_reduce_scatter | 8 | 6 | 4 |" in shown(project, "products-here")[1]
