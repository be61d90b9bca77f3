import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpicomm import environment
from mpicomm.devices.base import DeviceInfo
from mpicomm.errors import CollectiveTimeoutError, InvalidUsageError, KernelCompileError, MpicommError, PeerError
from mpicomm.kernels.experts import COMBINE, DISPATCH, ROOM, ROUTES
from mpicomm.kernels.team import COUNTS, EXCHANGE, MISMATCH, OF_RECEIVE, RECEIVE_OVERFLOW
from mpicomm.kernels.window import COMES_FIRST, LOCK

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="compiling kernels needs cuda-bindings and NVRTC")

from mpicomm.devices.cuda import compile as kernel_compile  # noqa: E402
from mpicomm.devices.cuda.faults import FaultPage, FaultRecord  # noqa: E402
from mpicomm.kernels.variant import KERNEL_DIR, Variant  # noqa: E402
from tests.helpers.fakes.fake_cuda import FakeCuda  # noqa: E402
from tests.helpers.inputs.kernel_sources import compile_kernel  # noqa: E402

SUPPORTED = nvrtc.nvrtcGetSupportedArchs()[1]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mpicomm"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that NVRTC really compiled."""
    names: list[str] = []
    run_nvrtc = kernel_compile._run_nvrtc

    def counted(text: bytes, name: str, options: list[str]) -> bytes:
        names.append(name)
        return run_nvrtc(text, name, options)

    monkeypatch.setattr(kernel_compile, "_run_nvrtc", counted)
    return names


def source_in(directory: Path, text: str) -> Path:
    source = directory / "sample.cu"
    source.write_text(text)
    return source


def test_a_device_newer_than_nvrtc_gets_ptx_and_an_older_one_is_named() -> None:
    image = compile_kernel(KERNEL_DIR / "signal.cu", (99, 0))
    assert f".target sm_{max(SUPPORTED)}".encode() in image
    assert b"mpicomm_signal" in image
    with pytest.raises(KernelCompileError, match=r"this device has 1\.0"):
        compile_kernel(KERNEL_DIR / "signal.cu", (1, 0))


def test_a_broken_source_names_the_line(tmp_path: Path) -> None:
    source = source_in(tmp_path, '\nextern "C" __global__ void f(int* p) {\n  *p = missing;\n}\n')
    with pytest.raises(KernelCompileError, match=r"sample\.cu\(3\): error: .*missing"):
        compile_kernel(source, (9, 0))


def test_the_host_reads_the_fault_record_as_the_kernels_write_it(tmp_path: Path) -> None:
    offsets = {field[0]: getattr(FaultRecord, field[0]).offset for field in FaultRecord._fields_}
    # NVRTC brings no header that defines offsetof; its compiler turns offsetof into this expression.
    check = "static_assert(__INTADDR__(&static_cast<mpicomm::FaultRecord*>(nullptr)->{}) == {});"
    checks = [check.format(name, offset) for name, offset in offsets.items()]
    source = source_in(
        tmp_path,
        '#include "faults.cuh"\nstatic_assert(sizeof(mpicomm::FaultRecord) == 40);\n'
        "static_assert(mpicomm::kWritten == 2 && mpicomm::kWaitSignal == 1);\n" + "\n".join(checks),
    )
    compile_kernel(source, (9, 0))
    assert set(offsets) == {"state", "operation", "sequence", "block", "peer", "elapsed_ns", "failed"}


def test_a_second_call_reads_the_cache_and_another_device_is_another_entry(
    runs: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile_kernel(KERNEL_DIR / "signal.cu", (9, 0))
    assert [path.read_bytes() for path in cache.iterdir()] == [first]
    compile_kernel(KERNEL_DIR / "signal.cu", (8, 0))
    assert runs == ["signal.cu", "signal.cu"]
    monkeypatch.delattr(nvrtc, "nvrtcCreateProgram")  # a known kernel needs no compiler
    assert compile_kernel(KERNEL_DIR / "signal.cu", (9, 0)) == first


def test_only_a_changed_header_of_the_kernel_is_another_entry(
    runs: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(KERNEL_DIR, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__")))
    compile_kernel(KERNEL_DIR / "signal.cu", (9, 0))
    monkeypatch.setattr(kernel_compile, "KERNEL_DIR", copy)
    for name, number in (("experts.cuh", 1), ("memory_order.cuh", 2)):
        header = copy / name
        header.write_text(header.read_text() + "// changed\n")
        kernel_compile._header.cache_clear()  # as in another process
        for _ in range(2):
            compile_kernel(copy / "signal.cu", (9, 0))
        assert len(runs) == number


@pytest.mark.parametrize("upgrade", ["version", "patch"])
def test_another_nvrtc_is_another_entry(runs: list[str], monkeypatch: pytest.MonkeyPatch, upgrade: str) -> None:
    compile_kernel(KERNEL_DIR / "signal.cu", (9, 0))
    status, major, minor = nvrtc.nvrtcVersion()
    if upgrade == "version":
        monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (status, major, minor + 1))
    else:  # the library is another file
        library = SimpleNamespace(abs_path=str(KERNEL_DIR / "signal.cu"))
        monkeypatch.setattr(kernel_compile, "load_nvidia_dynamic_lib", lambda name: library)
    for _ in range(2):
        compile_kernel(KERNEL_DIR / "signal.cu", (9, 0))
    assert len(runs) == 2


def test_one_of_those_who_need_a_kernel_compiles_it(runs: list[str], cache: Path) -> None:
    together = threading.Barrier(3)

    def compiled(_: int) -> bytes:
        together.wait()
        return compile_kernel(KERNEL_DIR / "signal.cu", (9, 0))

    with ThreadPoolExecutor(3) as pool:
        images = list(pool.map(compiled, range(3)))
    assert images == [images[0]] * 3
    assert runs == ["signal.cu"]
    assert len(list(cache.iterdir())) == 1


def test_those_who_wait_get_the_errors_of_the_compiler(tmp_path: Path) -> None:
    source = source_in(tmp_path, "missing")

    def error(_: int) -> str:
        with pytest.raises(KernelCompileError) as raised:
            compile_kernel(source, (9, 0))
        return str(raised.value)

    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(error, range(3))
    assert others == [first] * 2
    assert "sample.cu(1): error" in first


LOCKER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("end", ["dies", "stops"])
def test_a_process_that_ends_while_it_compiles_holds_nobody_up(
    runs: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    image = compile_kernel(KERNEL_DIR / "signal.cu", (9, 0))
    (kept,) = cache.iterdir()
    kept.unlink()
    monkeypatch.setattr(kernel_compile, "_LONGEST_WAIT_S", 60.0 if end == "dies" else 0.5)
    command = [sys.executable, "-c", LOCKER, f"{kept}.lock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        if end == "dies":
            threading.Timer(0.2, other.kill).start()
        assert compile_kernel(KERNEL_DIR / "signal.cu", (9, 0)) == image
        other.kill()
    assert len(runs) == 2
    assert kept.read_bytes() == image


def kernel_cache(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, cores: int) -> Any:
    """The kernels on a device that runs none, in a process that may use so many cores."""
    compiler, load = (importlib.import_module(f"mpicomm.devices.cuda.{name}") for name in ("compile", "load"))

    def run_nvrtc(text: bytes, name: str, options: list[str]) -> bytes:
        if name == "norm.cu":
            raise KernelCompileError("it is refused")
        return bytes(name, "ascii")

    monkeypatch.setattr(compiler, "_run_nvrtc", run_nvrtc)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(cores)})
    return load.kernels_of(DeviceInfo(0, "a GPU", b"0" * 16, "", -1, (9, 0)))


def join_helpers() -> None:
    for thread in threading.enumerate():
        if thread.name == "mpicomm-compile":
            thread.join()


def variant(name: str) -> Variant:
    return Variant(KERNEL_DIR / f"{name}.cu", name, ())


@pytest.mark.parametrize("cores", [1, 3])
def test_a_kernel_that_is_compiled_has_the_expected_kernels_compiled_too(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, cache: Path, cores: int
) -> None:
    kernels = kernel_cache(cuda, monkeypatch, cores)

    def kept_after(name: str) -> list[str]:
        kernels.load(variant(name))
        join_helpers()
        return sorted(path.name.split("-")[0] for path in cache.iterdir())

    assert kept_after("signal") == ["signal"]
    kernels.expect(map(variant, ("combine", "norm", "epilogue")))
    assert kept_after("signal") == ["signal"]
    assert kept_after("message") == ["combine", "epilogue", "message", "signal"]
    with pytest.raises(KernelCompileError, match="it is refused"):
        kernels.load(variant("norm"))


@pytest.mark.parametrize("kept", [True, False])
def test_the_compiler_starts_early_only_if_it_will_be_needed(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, cache: Path, kept: bool
) -> None:
    compiler, load = (importlib.import_module(f"mpicomm.devices.cuda.{name}") for name in ("compile", "load"))
    compiled: list[str] = []

    def run_nvrtc(text: bytes, name: str, options: list[str]) -> bytes:
        compiled.append(name)
        return b"code"

    monkeypatch.setattr(compiler, "_run_nvrtc", run_nvrtc)
    if kept:
        compile_kernel(KERNEL_DIR / "signal.cu", (9, 0))
    load.kernels_of(DeviceInfo(0, "a GPU", b"0" * 16, "", -1, (9, 0)))
    join_helpers()
    assert compiled == ["signal.cu" if kept else "nothing.cu"]


SHORT_PROGRAM = """
import os, sys, threading, time
from types import SimpleNamespace
sys.modules["cupy"] = sys.modules["cupy.cuda"] = SimpleNamespace(driver=None)
from mpicomm.devices.base import DeviceInfo
from mpicomm.devices.cuda import compile, load
from mpicomm.kernels.variant import KERNEL_DIR, Variant

begun = threading.Semaphore(0)

def run_nvrtc(text, name, options):
    if name != "nothing.cu":
        begun.release()
    while name not in ("nothing.cu", "signal.cu") and threading.main_thread().is_alive():
        time.sleep(0.001)
    return name.encode()

compile._run_nvrtc, load.call = run_nvrtc, lambda *arguments: 0
os.sched_getaffinity = lambda pid: {0, 1, 2}
kernels = load.KernelCache(DeviceInfo(0, "a GPU", bytes(16), "", -1, (9, 0)))
kernels.expect(Variant(KERNEL_DIR / f"{name}.cu", name, ()) for name in ("combine", "epilogue", "norm", "pack"))
kernels.load(Variant(KERNEL_DIR / "signal.cu", "signal", ()))
for _ in range(3):
    begun.acquire()
"""


def test_a_program_ends_after_the_kernels_that_threads_compile_then(cache: Path) -> None:
    subprocess.run([sys.executable, "-c", SHORT_PROGRAM], check=True, timeout=60)
    assert sorted(path.name.split("-")[0] for path in cache.iterdir()) == ["combine", "epilogue", "signal"]


def test_a_cache_that_cannot_be_written_is_done_without(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.NamedTemporaryFile() as file:
        monkeypatch.setenv("XDG_CACHE_HOME", file.name)
        assert compile_kernel(KERNEL_DIR / "signal.cu", (9, 0)) == compile_kernel(KERNEL_DIR / "signal.cu", (9, 0))
    assert len(runs) == 2


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_nobody_else_can_write_into_the_cache(cache: Path, mode: int) -> None:
    cache.mkdir(parents=True)
    cache.chmod(mode)
    assert environment.cache_directory() == cache
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.needs_root
def test_a_cache_of_another_user_is_done_without(cache: Path) -> None:
    cache.mkdir(parents=True)
    os.chown(cache, 65534, 65534)
    assert environment.cache_directory() is None


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert environment.cache_directory() == tmp_path / ".cache" / "mpicomm"


# Faults of kernels.


def page_of(**record: int) -> FaultPage:
    """A page without a device."""
    page = object.__new__(FaultPage)
    page.error = page._calls = None
    page.record = FaultRecord(**{"state": 2, "peer": 1, "elapsed_ns": 10**9, **record})
    return page


@pytest.mark.parametrize("kind", [CollectiveTimeoutError, PeerError])
def test_an_error_is_raised_by_every_check_and_keeps_no_frames(
    kind: type[CollectiveTimeoutError] | type[PeerError],
) -> None:
    page = page_of()
    try:
        raise kind("what was said", ranks=[2])
    except kind as error:
        page.fail(error)
    caught = []
    for _ in range(2):
        with pytest.raises(kind, match="what was said") as info:
            page.check()
        assert info.value.ranks == (2,)
        caught.append(info.value)
    assert caught[0] is not caught[1]
    assert page.error is not None and page.error.__traceback__ is None


@pytest.mark.parametrize(("operation", "waits"), [(EXCHANGE, False), (MISMATCH, True)])
def test_only_data_of_another_call_lets_a_check_wait_for_the_calls_of_ranks(operation: int, waits: bool) -> None:
    page = page_of(operation=operation)
    asked: list[bool] = []

    def calls(*, wait: bool) -> list[str]:
        asked.append(wait)
        return []

    with pytest.raises(PeerError if waits else CollectiveTimeoutError) as info:
        page.check(calls)
    assert info.value.ranks == (1,) and asked == [waits]


def test_an_error_is_unraised_until_a_check_raises_it() -> None:
    page = page_of(state=1, operation=EXCHANGE)
    assert page.unraised_error() is None  # its kernel still runs
    page.check()
    page.record.state = 2
    for _ in range(2):
        assert "from rank 1 did not come within 1 s" in str(page.unraised_error())
    with pytest.raises(CollectiveTimeoutError):
        page.check()
    assert page.unraised_error() is None


LATE, WRONG = CollectiveTimeoutError, InvalidUsageError


@pytest.mark.parametrize(
    ("operation", "sequence", "kind", "text"),
    [
        (DISPATCH, 7, LATE, "Experts.dispatch: number 7 from rank 1 did not come within 1 s"),
        (COMBINE, 7, LATE, "Experts.combine: number 7 from rank 1 did not come within 1 s"),
        (ROUTES, 7, WRONG, "topk_ids of rank 1 has an id that is no expert at token 7: pass the number of"),
        (ROOM, 7, WRONG, "rank 1 gets 7 rows, more than the capacity: create the Experts with a larger"),
        (COUNTS, 7, WRONG, "rank 1 passed a count or displacement of sendbuf for rank 7, .* or goes beyond"),
        (RECEIVE_OVERFLOW, 7, WRONG, "recvbuf of rank 1 needs room for 7 elements, by the counts on the GPU"),
        (LOCK, 7, LATE, "Win.Lock: rank 1 holds the lock, and did not give it up within 1 s"),
        (99, 7, LATE, "operation 99: number 7 from rank 1 did not come within 1 s"),
        # The sequence number tells similar faults apart.
        (COUNTS, 7 | OF_RECEIVE, WRONG, "rank 1 passed a displacement of recvbuf for rank 7, on the GPU, that is neg"),
        (RECEIVE_OVERFLOW, 7 | OF_RECEIVE, WRONG, f"recvbuf of rank 1 needs room for {7 | OF_RECEIVE} elements"),
        (LOCK, COMES_FIRST, LATE, "Win.Lock: rank 1 has its turn to take the lock first, and did not take it within 1"),
    ],
)
def test_faults_name_the_rank(operation: int, sequence: int, kind: type[MpicommError], text: str) -> None:
    page = page_of(operation=operation, sequence=sequence)
    for _ in range(2):
        with pytest.raises(kind, match=text) as info:
            page.check()
        assert info.value.ranks == (1,)
