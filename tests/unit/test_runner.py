"""`python -m mpicomm PROGRAM`: programs that know only mpi4py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.jobs.mpiexec import run_job

HEAD = """
import copy, pickle, warnings
import numpy as np
from mpi4py import MPI
from mpi4py.MPI import COMM_WORLD
C, rank, size = MPI.COMM_WORLD, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
following, previous = (rank + 1) % size, (rank - 1) % size
"""


HOST = {
    "the world is a Communicator, and so is all that is made from it": """
import sys
import mpicomm
assert sys.argv[1:] == ["one", "-x"], sys.argv
for comm in (C, MPI.COMM_SELF, COMM_WORLD, C.Dup(), C.Split(0), MPI.COMM_SELF.Dup()):
    assert isinstance(comm, mpicomm.Communicator) and isinstance(comm, MPI.Intracomm)
    a, b = np.full(100_000, 1.0), np.zeros(100_000)
    comm.Allreduce(a, b)
    assert (b == comm.size).all()
    if comm not in (MPI.COMM_WORLD, MPI.COMM_SELF):
        comm.Free()
assert C == MPI.COMM_WORLD and C != MPI.COMM_SELF and C.Get_name() == "MPI_COMM_WORLD"
assert MPI.Comm.Compare(C, MPI.COMM_WORLD) == MPI.IDENT
assert C.Get_attr(MPI.TAG_UB) > 0
assert "system" in C.Get_info().Get("mpi_memory_alloc_kinds")
assert C.handle == MPI.Intracomm(C).handle and C.describe().handle == "memfd"
C.free()
duplicate = C.Dup()
assert isinstance(duplicate.handle, int)
duplicate.free()
duplicate.free()
assert duplicate == MPI.COMM_NULL
for comm in (C, MPI.COMM_SELF):
    assert pickle.loads(pickle.dumps(comm)) is comm and copy.copy(comm) is comm
    assert pickle.loads(pickle.dumps(MPI.Intracomm(comm))) == comm
    try:
        comm.Free()
    except MPI.Exception:
        pass
    else:
        raise AssertionError("a permanent communicator was freed")
    comm.Barrier()
with mpicomm.Communicator() as duplicate:
    assert MPI.Comm.Compare(duplicate, C) == MPI.CONGRUENT
""",
    "communicators come back from the numbers that MPI knows them by": """
import mpicomm
grid = C.Create_cart([C.size], [True])
graph = C.Create_dist_graph_adjacent([C.rank], [C.rank])
for comm in (C, MPI.COMM_SELF, C.Dup(), C.Split(0), grid, grid.Sub([True]), grid.Dup(), grid.Split(0), graph):
    assert isinstance(comm, mpicomm.Communicator)
    assert comm.handle == MPI.Intracomm(comm).handle and comm.describe().handle == "memfd"
    assert MPI.Comm.fromhandle(comm.handle) is comm
    assert MPI.Comm.f2py(comm.py2f()) is comm
    if comm.toint() != -1:
        assert MPI.Comm.fromint(comm.toint()) is comm
freed = C.Dup()
handle = freed.handle
freed.Free()
others = [MPI.Intracomm(C).Dup() for _ in range(3)]
assert all(type(MPI.Comm.fromhandle(each.handle)) is MPI.Intracomm for each in others)
assert MPI.Comm.fromhandle(MPI.COMM_NULL.handle) == MPI.COMM_NULL
""",
    "requests in any mixture": """
half, sums = np.ones(10, np.float16), np.zeros(10, np.float16)
statuses = [MPI.Status() for _ in range(3)]
requests = [C.Iallreduce(half, sums), MPI.REQUEST_NULL, C.Irecv(np.zeros(4), previous, 7)]
send = C.Send_init(np.ones(4), following, 7)
MPI.Prequest.Startall([send])
MPI.Request.Waitall(requests, statuses)
send.Wait()
assert (sums == size).all() and (statuses[2].source, statuses[2].tag) == (previous, 7)
assert all(request == MPI.REQUEST_NULL for request in requests)
MPI.Request.Waitall([MPI.REQUEST_NULL], [MPI.Status()])
MPI.Request.Waitall([C.Isend(np.ones(1), MPI.PROC_NULL), MPI.REQUEST_NULL])
open_request = MPI.Grequest.Start(None, None, None)
import threading
threading.Timer(0.1, open_request.Complete).start()
MPI.Request.Waitall([open_request, MPI.REQUEST_NULL])  # MPICH itself ends the program here
assert type(send) is MPI.Prequest and type(C.Isend(half.view("i2"), MPI.PROC_NULL)) is MPI.Request
send.Free()
""",
    "device memory in calls that only MPI has": """
import mpicomm
from tests.helpers.fakes import fake_driver
memory = fake_driver.content(1024)
device = MPI.memory.fromaddress(memory.ctypes.data, 1024)
def refused(call, *arguments):
    try:
        call(*arguments)
    except mpicomm.InvalidUsageError as error:
        assert "lies in device memory" in str(error)
    else:
        raise AssertionError(call)
refused(MPI.Win.Create, device)
refused(MPI.Session.Attach_buffer, MPI.Session(), device)
window = MPI.Win.Create(np.zeros(8), comm=C)
window.Fence()
refused(window.Put, device, 0)
window.Put(np.ones(8), rank)
window.Fence()
assert type(window.tomemory()) is MPI.buffer  # as of windows that MPI makes
window.Free()
file = MPI.File.Open(C, __file__ + ".written", MPI.MODE_CREATE | MPI.MODE_WRONLY)
refused(file.Write_at, 0, [device, MPI.BYTE])
file.Write_at(8 * rank, np.ones(1))
file.Close()
MPI.Attach_buffer(device)
C.Ibsend(np.ones(1), MPI.PROC_NULL).Wait()
assert MPI.Detach_buffer() is device
""",
    "objects that a probe has matched": """
request = C.isend([1, 2], following, 7)
assert C.mprobe(previous, 7).recv() == [1, 2]
request.wait()
request = C.isend({"a": rank}, following, 8)
message = None
while message is None:
    message = C.improbe(previous, 8)
assert message.irecv().wait() == {"a": previous}
request.wait()
""",
    "modules of the program bind the communicator": 'import library\nassert library.size() == ("Communicator", 2)',
}
"""Parts of a program, which run one after the other in one job. A part has the names of HEAD."""

DEVICE_HEAD = """
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.rigs.message_rigs import take_for_gpu
gpu = take_for_gpu(MPI.COMM_WORLD)
def of(*values):
    return DeviceArray(gpu, np.array(values, np.int32))
"""
DEVICE = {
    "calls that name the class": """
for probe in (MPI.Message.Probe, MPI.Message.Iprobe):
    request, received, message = C.Isend(of(rank, 7), following, 3), of(0, 0), None
    while message is None:
        message = probe(C, previous, tag=3)
    message.Recv(received)
    request.Wait()
    assert received.get().tolist() == [previous, 7]
half = C.Split(rank % 2)
take_for_gpu(half)
between = MPI.Intracomm.Create_intercomm(half, 0, C, 1 - rank % 2)
received = of(0)
between.Allgather(of(rank), received)
assert received.get().tolist() == [1 - rank]
between.Free()
half.Free()
assert MPI.Comm.Get_parent() == MPI.COMM_NULL
""",
    "local calls of MPI": """
total = of(1, 2)
MPI.SUM.Reduce_local(of(10, 20), total)
assert total.get().tolist() == [11, 22]
total = np.array([1, 2], np.int32)
MPI.SUM.Reduce_local(of(10, 20), total)
assert total.tolist() == [11, 22]
packed, unpacked = of(-1, -1, -1), of(0, 0)
assert MPI.INT32_T.Pack(of(5, 6), packed, 4, C) == 12
assert packed.get().tolist() == [-1, 5, 6]
assert MPI.INT32_T.Unpack(packed, 4, unpacked, C) == 12
assert unpacked.get().tolist() == [5, 6]
external = np.zeros(8, np.uint8)
assert MPI.INT32_T.Pack_external("external32", of(5, 6), external, 0) == 8
assert external.view(">i4").tolist() == [5, 6]
""",
    "a wait for all with inactive requests": """
send, received = C.Send_init(of(rank), following), of(0)
receive = C.Irecv(received, previous)
MPI.Request.Waitall([send, C.Irecv(of(0), MPI.PROC_NULL)])
send.Start()
MPI.Request.Waitall([send, receive])
assert received.get().tolist() == [previous] and send != MPI.REQUEST_NULL
send.Free()
""",
}


@pytest.mark.parametrize(("head", "parts"), [(HEAD, HOST), (HEAD + DEVICE_HEAD, DEVICE)], ids=["host", "device"])
def test_a_program_gets_communicators_that_take_all_arrays(head: str, parts: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text(
        "from mpi4py import MPI\ndef size(comm=MPI.COMM_WORLD):\n    return type(comm).__name__, comm.size\n"
    )
    run_each = "for part, code in PARTS.items():\n    exec(compile(code, part, 'exec'), dict(globals()))\n"
    file = tmp_path / "program.py"
    file.write_text(f"{head}\nPARTS = {parts!r}\n{run_each}print('end')\n")
    job = run_job(2, "-W", "error", "-m", "mpicomm", str(file), "one", "-x", MPICOMM_DEVICE="cpu")
    assert (job.returncode, job.stdout.count("end")) == (0, 2), job.stdout + job.stderr
    assert "Traceback" not in job.stderr


def test_code_and_modules_run_and_an_exception_on_one_rank_ends_the_job() -> None:
    code = "from mpi4py import MPI; print(type(MPI.COMM_WORLD).__name__, flush=True); C = MPI.COMM_WORLD; "
    code += "C.Barrier(); C.rank and 1 / 0; C.Barrier()"
    result = run_job(2, "-m", "mpicomm", "-c", code, MPICOMM_DEVICE="cpu")
    assert result.stdout.count("Communicator") == 2
    assert result.returncode != 0 and "ZeroDivisionError" in result.stderr
    result = run_job(2, "-m", "mpicomm", "-m", "mpi4py.bench", "helloworld", MPICOMM_DEVICE="cpu")
    assert result.returncode == 0 and result.stdout.count("Hello, World!") == 2


OWN_START = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
import numpy as np
assert not MPI.Is_initialized() and not MPI.Is_finalized()
START
assert MPI.Is_initialized() and MPI.Query_thread() >= MPI.THREAD_FUNNELED
try:
    MPI.Init()
except MPI.Exception:
    pass
else:
    raise AssertionError("MPI started twice")
y = np.zeros(300_000)
MPI.COMM_WORLD.Allreduce(np.ones(300_000), y)
assert (y == 2).all() and type(MPI.COMM_WORLD).__name__ == "Communicator"
MPI.Finalize()
assert MPI.Is_finalized()
"""
STARTS = [
    ("MPI.Is_initialized() or MPI.Init()", "0"),
    ("assert MPI.Init_thread(MPI.THREAD_FUNNELED) == MPI.Query_thread()", "1"),
]


@pytest.mark.parametrize(("start", "by_environment"), STARTS)
def test_a_program_starts_and_ends_mpi_itself(start: str, by_environment: str) -> None:
    code = OWN_START.replace("START", start)
    result = run_job(2, "-m", "mpicomm", "-c", code, MPICOMM_DEVICE="cpu", MPI4PY_RC_INITIALIZE=by_environment)
    assert result.returncode == 0, result.stderr


def test_a_program_that_lets_mpi4py_start_mpi_cannot_start_it() -> None:
    code = "from mpi4py import MPI; assert MPI.Is_initialized(); MPI.Init()"
    result = run_job(1, "-m", "mpicomm", "-c", code, MPICOMM_DEVICE="cpu")
    assert result.returncode != 0 and "MPI.Exception" in result.stderr, result.stderr


def test_what_was_installed_is_given_back(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("""
import pickle
import numpy as np
from mpi4py import MPI
import mpicomm
names = [(MPI, "COMM_WORLD"), (MPI, "COMM_SELF"), (MPI, "Attach_buffer"), (MPI.Request, "Waitall"), (MPI.Win, "Put")]
names += [(MPI.Comm, "fromhandle")]
before = [getattr(*each) for each in names]
first = mpicomm.install(device="cpu", timeout_s=10)
assert first is MPI.COMM_WORLD is mpicomm.install()
first.Allreduce(np.ones(100_000), np.zeros(100_000))
assert first.zeros(3).local.sum() == 0
mpicomm.uninstall()
mpicomm.uninstall()
assert [getattr(*each) for each in names] == before and type(MPI.COMM_WORLD) is MPI.Intracomm
assert pickle.loads(pickle.dumps(MPI.COMM_WORLD)) is MPI.COMM_WORLD
assert mpicomm.install(device="cpu") is MPI.COMM_WORLD is not before[0]
""")
    result = run_job(2, "-W", "error", "-m", "mpi4py", str(file))
    assert result.returncode == 0, result.stdout + result.stderr
