"""Tables of algorithms to test with."""

from __future__ import annotations

from mpicomm.collectives.gpu.tuning import Row, Tuning, kind_of

KIB, MIB = 1 << 10, 1 << 20
GPU = "NVIDIA H200"
NEVER = 1 << 60


def row(operation: str, size: int, *choices: tuple[int, str], registered: bool = False) -> Row:
    return Row(kind_of(operation, registered=registered), size, ((0, "one_shot"), *choices))


def table(*rows: Row) -> Tuning:
    return Tuning("here", rows, GPU)


def chosen(tuning: Tuning, nbytes: int, size: int, operation: str = "Allreduce", *, registered: bool = False) -> str:
    choices = tuning.choices(operation, size, registered=registered)
    return [name for begin, name in choices if begin <= nbytes][-1]
