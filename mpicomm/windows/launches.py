"""The launches of a window's kernels. Each kernel has one argument, into which each call writes its own fields."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mpicomm.devices.base import GpuBackend
from mpicomm.kernels.accumulate import (
    ACCUMULATE_THREADS,
    AccumulateArguments,
    SwapArguments,
    accumulate_kernel,
    blocks_for,
    swap_kernel,
)
from mpicomm.kernels.variant import Variant
from mpicomm.kernels.window import WINDOW_THREADS, SynchronisationArguments
from mpicomm.mpi.layout import run_of
from mpicomm.mpi.packing import table_for

_TIMES = 8
"""A launch that a program has made so many times, one after the other, is made ready for more."""


class SynchronisationLaunch:
    """Launches a kernel of window.cu. Construction loads it."""

    def __init__(self, backend: GpuBackend, kernel: Variant, boards: int, rank: int) -> None:
        faults = backend.faults
        limits = backend.timeout_ns, faults.record, faults.failed
        self._arguments = SynchronisationArguments(boards, 0, 0, *limits, rank)
        self._enqueue = backend.launcher(kernel, self._arguments)
        self._lock = threading.Lock()  # threads may call a window at once

    def __call__(
        self,
        operation: int,
        signals: int,
        waits: int,
        stream: int,
        *,
        kind: int = 0,
        exclusive: bool = False,
        yields: bool = False,
    ) -> None:
        """Enqueue the kernel."""
        x = self._arguments
        with self._lock:
            x.operation, x.signals, x.waits = operation, signals, waits
            x.kind, x.exclusive, x.yields = kind, exclusive, yields
            self._enqueue(stream, 1, WINDOW_THREADS)


class RunUpdate:
    """Updates consecutive elements by one operation. Construction loads the kernel."""

    MOST_NBYTES = 1 << 31  # the bytes of a run have 32 bits

    def __init__(self, backend: GpuBackend, reduction: tuple[str, str], itemsize: int, multiprocessors: int) -> None:
        self._backend = backend
        self._kernel = accumulate_kernel(reduction, itemsize)
        # The kernel reads a single run from its argument.
        walk = table_for(run_of(itemsize)).arguments(0, 0, 0, backend.faults.failed, unpacks=True)
        self._arguments = AccumulateArguments(walk, 0)
        self._walk, self._run = self._arguments.walk, self._arguments.walk.first
        self._enqueue = backend.launcher(self._kernel, self._arguments)
        self._itemsize = itemsize
        self._multiprocessors = multiprocessors
        self._lock = threading.Lock()  # threads may call a window at once
        self._last = self._repeated = (0, 0, 0, 0)  # the arguments of the last launch, and of the launch that repeats
        self._times = 0  # the number of such launches, one after the other
        self._repeat: Callable[[int], None] | None = None

    def __call__(self, target: int, values: int, result: int, nbytes: int, stream: int, captures: bool = False) -> None:
        """Enqueue the kernel. ``values`` and ``result`` are addresses; 0 for none.

        ``captures`` says whether the stream captures a graph.
        """
        update = target, values, result, nbytes
        with self._lock:
            if update == self._repeated and self._repeat is not None and not captures:
                self._repeat(stream)
                return
            self._walk.memory, self._walk.packed, self._arguments.result = target, values, result
            self._run.run_nbytes = nbytes
            blocks = blocks_for(nbytes // self._itemsize, self._multiprocessors)
            if update != self._last:
                self._last, self._times = update, 0
            self._times += 1
            if self._times >= _TIMES and not captures:  # for example a counter from which a program draws
                self._repeat = self._backend.fixed_launch(
                    self._kernel, self._arguments, blocks=blocks, threads=ACCUMULATE_THREADS
                )
                self._repeated = update
            self._enqueue(stream, blocks, ACCUMULATE_THREADS)


class SwapLaunch:
    """Compares and swaps one element of ``nbytes`` bytes. Construction loads the kernel."""

    def __init__(self, backend: GpuBackend, nbytes: int) -> None:
        self._arguments = SwapArguments(failed=backend.faults.failed)
        self._enqueue = backend.launcher(swap_kernel(nbytes), self._arguments)
        self._lock = threading.Lock()

    def __call__(self, target: int, value: int, compare: int, result: int, stream: int) -> None:
        """Enqueue the kernel. All arguments are addresses."""
        x = self._arguments
        with self._lock:
            x.target, x.value, x.compare, x.result = target, value, compare, result
            self._enqueue(stream, 1, 1)
