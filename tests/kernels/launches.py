"""Launches of the package's kernels on the processor."""

from __future__ import annotations

from collections.abc import Sequence

from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.kernels.variant import Variant
from tests.kernels.build import Builds, Change, Kernel
from tests.kernels.machine import Machine


def kernel_of(builds: Builds, variant: Variant, changes: Sequence[Change] = ()) -> Kernel:
    """Return a kernel of the package for the processor."""
    options = [option for option in variant.options if option.startswith("-D")]
    return builds.kernel(variant.source, variant.entry, options, changes=changes)


def enqueue(
    machine: Machine,
    rank: int,
    launch: Launch,
    *,
    changes: Sequence[Change] = (),
    threads: int | None = None,
    nap_us: int = 0,
) -> None:
    """Enqueue a launch on a rank; blocks of ``threads`` instead of as many as the package wants."""
    kernel = kernel_of(machine.builds, launch.variant, changes)
    machine.launch(
        rank, kernel, [launch.arguments], blocks=launch.blocks, threads=threads or launch.threads, nap_us=nap_us
    )
