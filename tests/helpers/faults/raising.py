"""Errors that all ranks have to raise together, and one rank on which a stage of a set-up fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from mpi4py import MPI

from mpicomm import HandleError
from mpicomm.devices import host

E = TypeVar("E", bound=BaseException)


@contextmanager
def raises_everywhere(
    comm: MPI.Comm, exc_type: type[E], *, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[E]]:
    """Like `pytest.raises`; fails on every rank unless all raise the same class with the same text.

    ``comm`` must still work after the error. Collective.
    """
    excinfo = pytest.ExceptionInfo[E].for_later()
    raised: BaseException | None = None
    try:
        yield excinfo
    except Exception as error:
        raised = error
    # A rank that did not raise has to come here too: the others wait for it.
    everyone = comm.allgather(None if raised is None else f"{type(raised).__name__}: {raised}")
    if raised is not None and not isinstance(raised, exc_type):
        raise raised
    if None in everyone or len(set(everyone)) > 1:
        lines = [f"rank {rank}: {text or 'raised nothing'}" for rank, text in enumerate(everyone)]
        raise AssertionError("\n".join([f"not the same {exc_type.__name__} on all ranks", *lines])) from raised
    assert isinstance(raised, exc_type)
    assert raised.__traceback__ is not None
    excinfo.fill_unfilled((type(raised), raised, raised.__traceback__))
    if match is not None:
        excinfo.match(match)


WORLD = MPI.COMM_WORLD
EVERY_RANK = range(WORLD.size)
FIRST_AND_LAST = sorted({0, WORLD.size - 1})

# Makes a stage raise the error; gets the class of the backend.
Break = Callable[[pytest.MonkeyPatch, Any, type[BaseException]], None]


def raising(error: type[BaseException]) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(5, "injected") if error is OSError else error("injected")

    return fail


def backend_method(name: str) -> Break:
    return lambda patch, backend, error: patch.setattr(backend, name, raising(error))


def attribute(owner: Any, name: str) -> Break:
    return lambda patch, backend, error: patch.setattr(owner, name, raising(error))


def backend_of(device: str) -> Any:
    if device == "cpu":
        return host.HostBackend
    from mpicomm.devices.cuda.backend import CudaBackend

    return CudaBackend


@contextmanager
def broken(culprit: int, device: str, break_: Break, error: type[BaseException] = OSError) -> Iterator[None]:
    """Break a stage on one rank."""
    with pytest.MonkeyPatch.context() as patch:
        if WORLD.rank == culprit:
            break_(patch, backend_of(device), error)
        yield


@contextmanager
def fails_everywhere(
    culprit: int,
    device: str,
    break_: Break,
    error: type[BaseException] = OSError,
    *,
    match: str | None = None,
) -> Iterator[None]:
    """Break a stage on one rank, and require that all ranks get its HandleError."""
    said = match or f"failed on rank {culprit}: .*injected"
    with broken(culprit, device, break_, error), raises_everywhere(WORLD, HandleError, match=said):
        yield


ALLOCATE = {
    "allocate": backend_method("allocate"),
    "export": backend_method("export"),
}
VIEW = {"view": backend_method("view")}
ZERO = {"zero": backend_method("zero")}
