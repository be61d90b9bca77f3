"""Compile the kernels that a test needs before its ranks wait for each other, shared out among them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mpi4py import MPI


def compile_kernels(capability: tuple[int, int], pairs: Sequence[tuple[str, str]], comm: MPI.Intracomm) -> None:
    """Let each rank compile some of the kernels for these ``(dtype, op)``, for all. Collective."""
    from mpicomm.collectives.gpu.algorithms.chunks.plan import exchange_kernel
    from mpicomm.collectives.gpu.algorithms.packets.arguments import Protocol, Steps, flags_can_carry, packet_kernel
    from mpicomm.devices.cuda.load import compile_kernel

    variants = [exchange_kernel(pair) for pair in pairs]
    kinds: list[tuple[Protocol, Steps]] = [("sentinel", "one"), ("sentinel", "few"), ("sentinel", "laps")]
    for pair, fan_out in itertools.product(pairs, (False, True)):
        flagged: list[tuple[Protocol, Steps]] = (
            [("flagged", "one"), ("flagged", "few")] if flags_can_carry(pair[0]) else []
        )
        variants += [packet_kernel(pair, comm.size, *kind, fan_out=fan_out) for kind in kinds + flagged]
    with ThreadPoolExecutor() as pool:
        compiled = [
            pool.submit(compile_kernel, variant.source, capability, variant.options)
            for variant in variants[comm.rank :: comm.size]
        ]
    for future in compiled:
        future.result()
    comm.Barrier()
