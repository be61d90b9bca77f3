"""The three forms of a collective, which differ in the name of the method and in the request that it returns."""

from __future__ import annotations

from mpi4py import MPI

FORMS = ("{}", "I{}", "{}_init")


def method_name(form: str, operation: str) -> str:
    return form.format(operation.lower() if form == "I{}" else operation)


def complete(request: MPI.Request | None, starts: int = 1) -> None:
    """Wait for a call in any form. A persistent request is started ``starts`` times and freed."""
    if isinstance(request, MPI.Prequest):
        for _ in range(starts):
            request.Start()
            request.Wait()
        request.Free()
    elif request is not None:
        request.Wait()
