"""Compile the kernels that a test needs before its ranks wait for each other, shared out among them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mpi4py import MPI


def compile_kernels(capability: tuple[int, int], pairs: Sequence[tuple[str, str]], comm: MPI.Intracomm) -> None:
    """Let each rank compile some of the kernels for these ``(dtype, op)``, for all. Collective."""
    from mpicomm.kernels.compile import KERNELS, compile_kernel
    from mpicomm.kernels.exchange import exchange_kernel
    from mpicomm.kernels.packets import Wire, flags_can_carry, packet_kernel

    variants = [exchange_kernel(pair) for pair in pairs]
    for pair, fan_out, one_step in itertools.product(pairs, (False, True), (False, True)):
        wires: tuple[Wire, ...] = ("flagged", "sentinel") if flags_can_carry(pair[0]) else ("sentinel",)
        which = {"fan_out": fan_out, "one_step": one_step, "paced": False}
        variants += [packet_kernel(pair, comm.size, wire, **which) for wire in wires]
    with ThreadPoolExecutor() as pool:
        compiled = [
            pool.submit(compile_kernel, KERNELS / variant.source, capability, variant.options)
            for variant in variants[comm.rank :: comm.size]
        ]
    for future in compiled:
        future.result()
    comm.Barrier()
