"""The scripts that measure write files that scripts/results/tables.py makes tables of."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs.mpiexec import ROOT, environment, run_job


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a README.md and the scripts, in which tables can be written."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def run(project: Path, *command: str) -> None:
    subprocess.run([sys.executable, *command], cwd=project, env=environment(), check=True)


def tables(project: Path) -> str:
    run(project, "scripts/results/tables.py")
    return (project / "scripts/results/README.md").read_text()


def job(nprocs: int, *arguments: str, **variables: str) -> None:
    result = run_job(nprocs, *arguments, **variables)
    assert result.returncode == 0, result.stdout + result.stderr


def test_rows_of_long_runs_share_a_table(project: Path) -> None:
    file = project / "scripts/results/soak-here.json"
    soak = ("-m", "mpi4py", str(ROOT / "scripts/testing/soak.py"), "--device=cpu", f"--json={file}")
    job(2, *soak, "--communicators=20")
    job(2, *soak, "--registrations=20")
    run(project, "scripts/testing/fuzz.py", "--packets=300", f"--json={file}")
    run(project, "scripts/testing/soak_deaths.py", "--device=cpu", "--trials=3", f"--json={file}")
    shown = tables(project).split("[soak-here.json]")[1].split("###")[0]
    rows = [line.split(" | ") for line in shown.splitlines() if line.startswith("| ")][2:]
    assert [row[2] for row in rows] == ["20 communicators", "20 registrations", "300", "3"]
    assert all("no wrong bit" in row[3] for row in rows[:2])
    assert re.search(r"survivors raised after at most \d+\.", rows[3][3])


def test_a_table_has_one_hardware(project: Path) -> None:
    file = project / "other.json"
    fuzz = ("scripts/testing/fuzz.py", "--packets=3", f"--json={file}")
    run(project, *fuzz)
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, "hardware": "another machine"}))
    with pytest.raises(subprocess.CalledProcessError):
        run(project, *fuzz)
    assert len(json.loads(file.read_text())["rows"]) == 1


def test_one_file_of_measured_memory_has_several_tables(project: Path) -> None:
    file = project / "scripts/results/memory-here.json"
    job(2, str(ROOT / "scripts/measuring/measure.py"), "--json", str(file), MPICOMM_DEVICE="cpu")
    shown = tables(project)
    assert shown.count("[memory-here.json](memory-here.json)") == 2
    assert "| step | 2 ranks, cpu, `memfd`, ms |" in shown
    assert "`mpirun -np 2 python " in shown.split("[memory-here.json]")[1] and "--json" not in shown


def test_strided_exchanges_have_tables_a_picture_and_a_line_in_the_readme(project: Path) -> None:
    file = project / "scripts/results/strided-2-here.json"
    job(2, "-m", "mpi4py", str(ROOT / "scripts/measuring/measure_strided.py"), "--divide=64", f"--json={file}")
    documents = json.loads(file.read_text())
    assert [len(document["rows"]) for document in documents] == [6, 4, 18]
    documents[0]["hardware"] = "2 x NVIDIA H200, NVLink"
    documents[0]["rows"][2][0] = "512 x 512 x 512 complex64"
    file.write_text(json.dumps(documents))
    assert tables(project).count("[strided-2-here.json](strided-2-here.json)") == 3
    assert "`redistribute` of 512 x 512 x 512" in " ".join((project / "README.md").read_text().split())
    run(project, "scripts/documents/chart.py", "strided.svg", f"--strided={file}")
    assert "512 x 512 x 512 complex64" in (project / "strided.svg").read_text()


def test_collectives_of_the_host_have_a_row_for_each_way(project: Path) -> None:
    file = project / "scripts/results/collectives-here.json"
    script = str(ROOT / "scripts/measuring/measure_host_collectives.py")
    job(2, script, "--kib=16", "--only=Allreduce,Scan", "--rounds=1", f"--json={file}")
    rows = [row[:3] for row in json.loads(file.read_text())["rows"]]
    assert ["Scan", "16 KiB", "one_shot"] in rows and ["Allreduce", "16 KiB", "two_shot"] in rows
    assert "through mapped memory, 2 ranks" in tables(project)


def test_a_result_of_the_bench_becomes_a_section_without_names_of_machines(project: Path, tmp_path: Path) -> None:
    result = tmp_path / "bench.json"
    job(2, "-m", "mpicomm.bench", "scatter", "-D", "cpu", "-e", "1K", "-n", "2", "-J", str(result), "-c", "1")
    run(project, "scripts/measuring/add_result.py", str(result), "scatter-here")
    added = (project / "scripts/results/scatter-here.json").read_text()
    assert json.loads(result.read_text())["ranks"][0]["host"] not in added and str(tmp_path) not in added
    shown = tables(project)
    assert "`mpirun -np 2 python -m mpicomm.bench scatter -D cpu -e 1K -n 2 -c 1`" in shown
    products = ("-m", "mpicomm.bench", "matmul", "-D", "cpu", "--rows", "8", "--shape", "4,6", "-n", "1", "-G", "1")
    job(2, *products, "-J", str(result))
    run(project, "scripts/measuring/add_result.py", str(result), "products-here")
    assert "| matmul_reduce_scatter | 8 | 6 | 4 |" in tables(project)
