"""pytest.raises for errors that all ranks have to raise together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest
from mpi4py import MPI

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
