"""Arguments in device memory, counts there, and datatypes that cannot be used with them."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError
from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.operations import ALLTOALLV
from mpicomm.mpi.arguments import Operand, parse
from mpicomm.mpi.device_counts import DeviceCounts, is_wide, read_device_counts
from tests.helpers.fakes import fake_driver
from tests.helpers.fakes.fake_driver import DeviceArray, read_device_arrays

ml_dtypes = pytest.importorskip("ml_dtypes")


def read(spec: Any, **how: Any) -> Operand:
    return parse(spec, **{"writable": True, "name": "x", **how})


class CudaArray:
    """An array of a CUDA library; no call touches its memory, so any address will do."""

    def __init__(self, shape: tuple[int, ...], typestr: str = "<f4", **changes: Any) -> None:
        fake_driver.own_range(0x7000_0000, 1 << 20)
        fields = {"version": 3, "data": (0x7000_0000, False), "shape": shape, "typestr": typestr, "strides": None}
        self.__cuda_array_interface__ = {**fields, **changes}


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_types_that_mpi_does_not_know(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    a = np.zeros(6, dtype)
    assert read(a).dtype == dtype
    assert read([a, 2], blocks=2).total == 4
    assert read([a.view("u1"), name]).total == 6
    assert read([a, 2, MPI.BYTE]).dtype == np.dtype("V1")
    assert read(np.zeros(3, np.float16)).dtype == np.dtype(np.float16)


def test_fields_and_forms_of_cuda_arrays() -> None:
    a = CudaArray((4, 6))
    operand = read(a, blocks=4)
    assert (operand.pointer, operand.dtype, operand.count, operand.total) == (0x7000_0000, np.dtype("f4"), 6, 24)
    assert (operand.on_device, operand.device, operand.memory.owner is a) == (True, 0, True)
    for strides in ((24, 4), (4, 16), None):  # in either order
        assert read(CudaArray((4, 6), strides=strides)).total == 24
    for strides in (None, (4, 4), (999, 4)):  # an empty array may lie nowhere
        operand = read(CudaArray((0, 3), data=(None, False), strides=strides), blocks=4)
        assert (operand.pointer, operand.total) == (0, 0)
    a = CudaArray((10,), "<f8")
    assert read([a, (2, 3), MPI.DOUBLE]).pointer == 0x7000_0000 + 24
    assert read([a, "i4"]).total == 20
    assert read([a, [1, 2]], shape="vector", blocks=2).displs == (0, 1)
    assert read([a, 1, MPI.FLOAT_INT]).dtype is None
    with pytest.raises(InvalidUsageError, match="elements 0 to 11 are asked for"):
        read([a, 11])


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (CudaArray((4, 6), strides=(48, 4)), r"x is a .*CudaArray .*not contiguous .* pass a contiguous array"),
        (CudaArray((4,), strides=(-4,)), "not contiguous"),
        (CudaArray((4,), data=(1, True)), "not writable"),
        (CudaArray((4,), mask=CudaArray((4,))), "masked"),
        (CudaArray((-4,)), "negative size"),
        (CudaArray((4,), ">f4"), "elements of type >f4"),
        (CudaArray((4,), "<V2"), "elements of type .*V2"),
        (CudaArray((4,), "<f1"), "elements of unknown type"),
    ],
)
def test_cuda_arrays_that_are_refused(array: CudaArray, text: str) -> None:
    with pytest.raises(InvalidUsageError, match=text):
        read(array)


def test_what_is_no_cuda_array_interface() -> None:
    array = CudaArray((4,))
    whole = array.__cuda_array_interface__
    for changes in ({"data": None}, {"shape": 3}, {"typestr": 4}, {"strides": 42}, {"descr": 42}):
        array.__cuda_array_interface__ = {**whole, **changes}
        with pytest.raises(TypeError, match=r"x is a .*CudaArray that cannot be read"):
            read(array)
    for field in ("data", "shape", "typestr"):
        array.__cuda_array_interface__ = {name: each for name, each in whole.items() if name != field}
        with pytest.raises(InvalidUsageError, match=rf"x is a .*CudaArray that cannot be read .*{field}") as caught:
            read(array)
        assert isinstance(caught.value, KeyError)  # mpi4py's class


def test_cuda_array_of_a_type_that_its_interface_cannot_name() -> None:
    a = CudaArray((4,), "<V2")
    a.dtype = np.dtype(ml_dtypes.bfloat16)  # type: ignore[attr-defined]
    assert read(a).dtype == np.dtype(ml_dtypes.bfloat16)
    assert read([CudaArray((4,), "<V2"), MPI.BYTE]).total == 8
    assert read([CudaArray((4,), "<V2"), "bfloat16"]).total == 4


class DlpackArray:
    """An array that speaks only DLPack and names some device."""

    def __init__(self, array: np.ndarray[Any, Any], device: tuple[int, int], dtype: Any = None) -> None:
        self.array = array
        self.device = device
        if device[0] in (2, 13):
            fake_driver.own(array, device[1])
        self.dtype = array.dtype if dtype is None else dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, stream: int | None = None) -> Any:
        assert stream == (None if self.device[0] == 1 else -1)  # synchronisation is not asked for
        return self.array.__dlpack__()


class Old(DlpackArray):
    """An array of a library that knows newer capsules, and exports an old one."""

    def __dlpack__(self, stream: int | None = None, **newer: Any) -> Any:
        return super().__dlpack__(stream)


@pytest.mark.parametrize("kind", [DlpackArray, Old])
@pytest.mark.parametrize(("device", "ordinal"), [((2, 3), 3), ((13, 1), 1), ((1, 0), None), ((3, 0), None)])
def test_dlpack_array(kind: type[DlpackArray], device: tuple[int, int], ordinal: int | None) -> None:
    a = np.zeros(6, "i2")
    operand = read(kind(a, device), blocks=2)
    assert (operand.pointer, operand.dtype, operand.count, operand.total) == (a.ctypes.data, np.dtype("i2"), 3, 6)
    assert (operand.on_device, operand.device) == (ordinal is not None, ordinal)


@pytest.mark.parametrize(("code", "dtype"), [("f", "f4"), ("d", "f8"), ("l", "i4"), ("Q", "u8"), ("e", "f2")])
def test_buffers_whose_format_has_standard_sizes_as_jax_arrays(code: str, dtype: str) -> None:
    exporters = pytest.importorskip("_testbuffer")  # CPython's own tests come with it
    array = exporters.ndarray([1, 2, 3], shape=[3], format=f"={code}")
    assert read(array, writable=False).dtype == np.dtype(dtype)
    received = np.zeros(3, dtype)
    comm = mpicomm.Communicator(MPI.COMM_SELF, device="cpu")
    comm.Sendrecv(array, 0, 0, received, 0, 0)
    assert received.tolist() == [1, 2, 3]
    received[:] = 0
    comm.Allreduce(array, received)
    assert received.tolist() == [1, 2, 3]
    comm.Free()


@pytest.mark.parametrize("typecode", ["i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16", "?"])
def test_dlpack_array_of_the_host_without_a_type_exports_it(typecode: str) -> None:
    array = DlpackArray(np.zeros(6, typecode), (1, 0))
    del array.dtype
    operand = read(array)
    assert (operand.dtype, operand.total) == (np.dtype(typecode), 6)


def test_dlpack_array_of_a_gpu_without_a_type_exports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(from_dlpack=lambda given: given.array))
    array = DlpackArray(np.zeros(6, "i2"), (2, 0))
    del array.dtype
    assert (read(array).dtype, read(array).total) == (np.dtype("i2"), 6)


def test_elements_that_numpy_does_not_take_from_dlpack_have_the_type_that_is_named() -> None:
    class LongDoubles(DlpackArray):
        def __dlpack__(self, stream: int | None = None, **newer: Any) -> Any:
            if "copy" in newer:  # NumPy asks, not mpi4py
                raise SystemError("error return without exception set")
            return super().__dlpack__(stream)

    array = LongDoubles(np.zeros(6), (1, 0))
    del array.dtype
    assert read([array, MPI.DOUBLE]).total == 6


@pytest.mark.parametrize(
    ("element", "typecode"), [(ctypes.c_float, "f4"), (ctypes.c_int, "i4"), (ctypes.c_ushort, "f2")]
)
def test_vectors_as_elements_are_elements_of_their_exported_type(element: Any, typecode: str) -> None:
    """Warp names vectors by arrays of ctypes, which has no float16."""
    array = DlpackArray(np.arange(12, dtype=typecode).reshape(4, 3), (1, 0), element * 3)
    operand = read(array, blocks=4)
    assert (operand.dtype, operand.count, operand.total) == (np.dtype(typecode), 3, 12)
    comm, received = mpicomm.Communicator(MPI.COMM_SELF, device="cpu"), np.zeros(12, typecode)
    comm.Allreduce(array, received)
    assert received.tolist() == list(range(12))
    comm.Free()


def test_the_type_and_the_device_that_a_dlpack_array_names() -> None:
    assert read(DlpackArray(np.zeros(6, "i2"), (2, 0), "lib.bfloat16")).total == 6
    for array, text in (
        (DlpackArray(np.zeros(6, "i2"), (2, 0), "lib.posit16"), "unknown type"),
        (DlpackArray(np.zeros(6), (10, 0)), r"x is a .*DlpackArray on a device of DLPack's type 10"),
        (DlpackArray(np.zeros(6)[::2], (2, 0)), r"cannot be read through DLPack .*not contiguous"),
    ):
        with pytest.raises(InvalidUsageError, match=text):
            read(array)
    of_the_host = DlpackArray(np.zeros(6, "i2"), (1, 0))
    of_the_host.device = (2, 0)
    assert not read(of_the_host).on_device


def test_cupy_array() -> None:
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.UnownedMemory(0x7000_0000, 96, None, device_id=2)  # no device is asked
    a = cupy.ndarray((4, 6), "f4", memptr=cupy.cuda.MemoryPointer(memory, 0))
    operand = read(a, blocks=4)
    assert (operand.pointer, operand.dtype, operand.count, operand.total) == (0x7000_0000, np.dtype("f4"), 6, 24)
    assert (operand.on_device, operand.device, operand.memory.owner is a) == (True, 2, True)
    assert read(a.T).total == 24
    assert read(a[1:]).pointer == 0x7000_0000 + 24
    with pytest.raises(InvalidUsageError, match="neither C- nor Fortran-contiguous"):
        read(a[:, 1:])


def test_torch_tensor() -> None:
    torch = pytest.importorskip("torch")
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        for dtype in ("bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "bool", "int64", "complex64"):
            t = torch.zeros((4, 6), dtype=getattr(torch, dtype), device=device)
            operand = read(t, blocks=4)
            assert (operand.pointer, operand.count, operand.total) == (t.data_ptr(), 6, 24)
            assert operand.dtype is not None and operand.dtype.name == dtype
            assert (operand.on_device, operand.device) == ((True, 0) if device == "cuda" else (False, None))
            assert read(t.T).pointer == t.data_ptr()
            with pytest.raises(InvalidUsageError, match="neither C- nor Fortran-contiguous"):
                read(t[:, 1:])
    assert read(torch.zeros(0)).total == 0
    for refused, text in (
        (torch.zeros(3, requires_grad=True), r"requires a gradient: pass x\.detach"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "conjugate or negative view"),
        (torch.zeros(3, dtype=torch.complex64).conj().imag, "conjugate or negative view"),
        (torch.zeros(3, device="meta"), "x is a torch.Tensor on meta"),
        (torch.zeros(3).to_sparse(), "x is a tensor without plain memory"),
    ):
        with pytest.raises(InvalidUsageError, match=text):
            read(refused)
    only_in_torch = torch.zeros(3).to(torch.float8_e4m3fnuz)
    assert read(only_in_torch).spec is only_in_torch  # MPI is asked, and refuses it


SIZE = 3


@pytest.fixture(autouse=True)
def arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    read_device_arrays(monkeypatch)


def made_array(pointer: int, count: int = SIZE, dtype: str = "int64") -> DeviceArray:
    return DeviceArray(pointer, count, np.dtype(dtype))


def read_both(send: Any, receive: Any, algorithm: str = "auto") -> DeviceCounts | None:
    return read_device_counts(send, receive, size=SIZE, algorithm=algorithm)


X, Y = made_array(0x1000, 20, "float32"), made_array(0x2000, 30, "float32")
COUNTS, CAME, DISPLS = made_array(0x3000, dtype="int32"), made_array(0x4000), made_array(0x5000)


def test_counts_in_host_memory_are_read_as_before() -> None:
    for counts in ([1, 2, 3], np.array([1, 2, 3]), ([1, 2, 3], [0, 1, 3]), 4, None):
        assert read_both([X, counts], [Y, counts]) is None
    assert read_both(X, Y) is None
    assert read_both(MPI.IN_PLACE, [Y, [1, 2, 3]]) is None


def test_both_buffers_with_counts() -> None:
    found = read_both([X, COUNTS], [Y, (CAME, DISPLS), "f"])
    assert found is not None
    data, output = found.send.operand, found.receive.operand
    assert (data.pointer, data.total, found.send.displs) == (0x1000, 20, None)
    assert (output.pointer, output.total) == (0x2000, 30)
    indices = [*found.send.indices(), *found.receive.indices()]
    assert [(each.pointer, is_wide(each), each.nbytes) for each in indices] == [
        (0x3000, False, 12), (0x4000, True, 24), (0x5000, True, 24),
    ]  # fmt: skip
    assert found.itemsize == 4


@pytest.mark.parametrize("displs", [7, [0, 7, 14], (0, 7, 14), np.array([0, 7, 14])])
def test_displacements_in_host_memory(displs: Any) -> None:
    found = read_both([X, (COUNTS, displs)], [Y, CAME, displs, MPI.FLOAT])
    assert found is not None
    assert found.send.displs == found.receive.displs == (0, 7, 14)


@pytest.mark.parametrize(
    ("send", "receive", "text"),
    [
        ([X, COUNTS], [Y, [1, 2, 3]], r"the counts of recvbuf are \[1, 2, 3\] in host memory, and sendbuf has counts"),
        ([X, [1, 2, 3]], [Y, CAME], r"the counts of sendbuf are \[1, 2, 3\] in host memory, and recvbuf has counts"),
        ([X, COUNTS], Y, "the counts of recvbuf are missing, and sendbuf has counts"),
        ([X, ([1, 2, 3], DISPLS)], [Y, CAME], r"the counts of sendbuf are \[1, 2, 3\] in host memory: pass"),
        ([X, COUNTS], [Y, made_array(0x4000, dtype="float32")], "the counts of recvbuf have type float32"),
        ([X, COUNTS], [Y, made_array(0x4000, dtype="uint64")], "have type uint64: pass int32 or int64"),
        ([X, made_array(0x3000, 2)], [Y, CAME], "the counts of sendbuf are 2 integers for 3 ranks"),
        ([X, (COUNTS, made_array(0x5000, 4))], [Y, CAME], "the displacements of sendbuf are 4 integers for 3 ranks"),
        ([X, (COUNTS, [0, 1])], [Y, CAME], "2 displacements for 3 ranks"),
        ([X, COUNTS], [Y, COUNTS], "the counts of recvbuf and counts or displacements of sendbuf overlap"),
        ([X, COUNTS], [Y, (CAME, CAME)], "the counts of recvbuf and displacements of recvbuf overlap"),
        ([X, COUNTS], [Y, made_array(0x2010)], "the counts of recvbuf and recvbuf overlap"),
        ([X, COUNTS], [X, CAME], "recvbuf and sendbuf overlap"),
        ([X, made_array(0x2000)], [Y, CAME], "recvbuf and counts or displacements of sendbuf overlap"),
        (MPI.IN_PLACE, [Y, CAME], "sendbuf=MPI.IN_PLACE beside counts on the GPU"),
        ([np.zeros(20, "f"), COUNTS], [Y, CAME], "sendbuf is in host memory, and its counts are on the GPU"),
        ([X, COUNTS], [made_array(0x2000, 30), CAME], "float32, recvbuf of int64: pass elements of one size"),
        (
            [X, COUNTS],
            [made_array(0x10000, 1 << 31, "float32"), made_array(0x4000, dtype="int32")],
            "pass counts of type int64",
        ),
    ],
)
def test_bad_arguments(send: Any, receive: Any, text: str) -> None:
    with pytest.raises(InvalidUsageError, match=text):
        read_both(send, receive)


def test_mpi_cannot_read_them() -> None:
    with pytest.raises(InvalidUsageError, match="which MPI cannot read"):
        read_both([X, COUNTS], [Y, CAME], "mpi")


def test_a_call_with_them_differs_from_a_call_with_other_counts() -> None:
    def hash_of(send: Any, receive: Any) -> int:
        return Call(ALLTOALLV, Arguments(send, receive), 0, SIZE).signature.hash32

    here = hash_of([X, COUNTS], [Y, CAME])
    assert here == hash_of([X, (COUNTS, DISPLS)], [Y, CAME])
    assert here != hash_of([X, [1, 2, 3]], [Y, [1, 2, 3]])
    wide = made_array(0x8000, 9, "float64")
    assert here != hash_of([wide, COUNTS], [made_array(0x9000, 9, "float64"), CAME])
