"""Each function of mpicomm.cuh on GPUs: `mpiexec -n 2 python -m mpi4py -m tests.gpu.device_functions`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt
from cuda.bindings import driver
from mpi4py import MPI

import mpicomm
from mpicomm.devices.cuda.driver import call
from mpicomm.devices.cuda.load import kernel_in
from tests.helpers.inputs.kernel_sources import compile_kernel
from tests.kernels.device_functions_rig import (
    FUNCTIONS,
    GROUPS,
    IN_TIME,
    SOURCE,
    TIMEOUT_S,
    AnyRig,
    Bytes,
    Messages,
    exchange,
    hand_over,
    reduce_all,
)

SHAPES = [
    *(Messages(nbytes) for nbytes in (0, 16, 50_000)),
    *(Messages(117, 3, 3), Messages(50_002, 0, 6)),
    Messages(100, 3, 5, rounds=50),
]
REDUCTIONS = [
    ("float32", "sum", Messages(50_000, 4, 4)),
    ("float16", "sum", Messages(1250, 6, 6)),
    ("bfloat16", "max", Messages(2002, 2, 12)),
]


class GpuRig(AnyRig):
    """The ranks of a communicator, each with a GPU; they may share one."""

    def __init__(self, comm: mpicomm.Communicator, group: str, messages: Messages) -> None:
        super().__init__(group, comm.size, [comm.rank], messages)
        self._comm = comm
        self._arrays: list[Any] = []

    def everywhere(self, nbytes: int) -> Any:
        self._arrays.append(self._comm.zeros(nbytes, "uint8"))
        return self._arrays[-1]

    def read(self, memory: Any, rank: int) -> Bytes:
        content: Bytes = memory.local.get()
        return content

    def write(self, memory: Any, rank: int, content: Bytes) -> None:
        memory.local.set(content)

    def run(
        self,
        entry: str,
        symmetric: Sequence[Any],
        private: Sequence[Any],
        *,
        options: Sequence[str] = (),
        blocks: int = 1,
        timeout_s: float = TIMEOUT_S,
    ) -> list[npt.NDArray[np.uint32]]:
        major, minor = divmod(int(cupy.cuda.Device().compute_capability), 10)
        compiler = (f"-I{mpicomm.include_dir()}", f"-DGROUP={self.group}", *options)
        module = call(driver.cuModuleLoadData, compile_kernel(SOURCE, (major, minor), compiler))
        kernel = kernel_in(module, entry)
        failed = cupy.zeros(self.threads, np.uint32)
        addresses = [array.pointers.data.ptr for array in symmetric] + [array.local.data.ptr for array in private]
        values = [self.arguments(self._comm.rank, failed.data.ptr, timeout_s), *map(ctypes.c_uint64, addresses)]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        cupy.cuda.Device().synchronize()
        self._comm.Barrier()  # by then all ranks have loaded the kernel and zeroed their memory
        kernel.launch_at(0, ctypes.addressof(pointers), blocks, self.threads)
        cupy.cuda.Device().synchronize()
        self._comm.Barrier()
        return [failed.get()]

    def close(self) -> None:
        """Free the memory; collective."""
        for array in self._arrays:
            array.close()


def main() -> None:
    """Run all functions by all groups; an exception on any rank ends all."""
    with mpicomm.Communicator(MPI.COMM_WORLD) as comm:
        assert comm.device != "cpu", "this program needs a GPU"
        for group in GROUPS:
            runs: list[tuple[Messages, Callable[..., Any], tuple[str, ...]]] = []
            runs += [(messages, exchange, (function,)) for messages in SHAPES for function in FUNCTIONS]
            runs += [(messages, reduce_all, (dtype, op)) for dtype, op, messages in REDUCTIONS]
            runs += [(messages, hand_over, ()) for messages in SHAPES]
            for messages, check, arguments in runs:
                rig = GpuRig(comm, group, messages)
                failed = check(rig, *arguments)
                assert not failed[0].any(), (IN_TIME, group, messages, arguments)
                rig.close()
        if comm.rank == 0:
            print(f"all functions of mpicomm.cuh between {comm.size} ranks, by {', '.join(GROUPS)}")  # noqa: T201


if __name__ == "__main__":
    main()
