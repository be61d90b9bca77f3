"""mpi4py's calls on lists of requests, for lists that hold requests of this package.

MPICH ends a program that gives such a call an open generalized request beside other requests. So MPI gets the list with
null requests in place of this package's requests, and of the program's generalized requests. The calls ask these
requests one by one. They keep their meaning for all other lists. The first request of this package replaces the calls.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import os
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import memmove
from typing import Any, Literal, TypeVar

from mpi4py import MPI

PAUSE_S = 50e-6
SPIN_S = 200e-6
"""A wait polls for this time without a pause, because most device collectives take less."""

Requests = Sequence[MPI.Request]
_NULL = MPI.REQUEST_NULL


class Driven:
    """A request that advances only in a thread that asks for it. The classes of requests inherit from it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<mpicomm.{type(self).__name__} {'active' if self.is_active() else 'inactive'}>"

    def is_active(self) -> bool:
        """Return whether there is something to wait for. Otherwise the request counts as null."""
        raise NotImplementedError

    def advance(self) -> bool:
        """Return whether the request, which is active, is complete."""
        raise NotImplementedError

    def has_failed(self) -> bool:
        """Return whether `Wait` will raise for the request, which is complete."""
        raise NotImplementedError

    def wait(self, status: MPI.Status | None = None) -> None:
        """As ``Wait``. There is no Python object to return."""
        self.Wait(status)  # type: ignore[attr-defined]

    def test(self, status: MPI.Status | None = None) -> tuple[bool, None]:
        """As ``Test``. There is no Python object to return."""
        return self.Test(status), None  # type: ignore[attr-defined]

    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """Return whether the request is complete, and leave it as it is; see mpi4py."""
        if self.is_active():
            self.advance()
        return super().Get_status(status)  # type: ignore[misc,no-any-return]

    def get_status(self, status: MPI.Status | None = None) -> bool:
        """As `Get_status`."""
        return self.Get_status(status)

    def cancel(self) -> None:
        """As ``Cancel``."""
        self.Cancel()  # type: ignore[attr-defined]


_ASKED = (Driven, MPI.Grequest)


@functools.cache  # only the first call does anything
def replace_list_calls() -> None:
    """Let mpi4py's calls on lists of requests take requests of this package. Local."""
    for owner, name, made in _replacements():
        replace(owner, name, made)


def pauses() -> Iterator[None]:
    """Yield for ever, with a pause before each time except the first.

    Early pauses are short, because most work takes less.
    """
    until = time.perf_counter() + SPIN_S
    while True:
        yield
        if time.perf_counter() < until:
            os.sched_yield()  # even time.sleep(0) takes 50 us
        else:
            time.sleep(PAUSE_S)


def _replacements() -> Iterator[tuple[type, str, Any]]:
    for lower in (False, True):
        case = str.lower if lower else str
        named = functools.partial(_original, case)
        test_any, test_some = named("Testany"), named("Testsome")
        for name, call in (
            ("Waitall", functools.partial(_wait_all, named("Waitall"))),
            ("Testall", functools.partial(_test_all, named("Testall"), "Wait")),
            ("Get_status_all", functools.partial(_test_all, named("Get_status_all"), "Get_status")),
            ("Waitany", functools.partial(_wait_any, test_any)),
            ("Testany", functools.partial(_test_any, test_any, "Wait")),
            ("Get_status_any", functools.partial(_test_any, named("Get_status_any"), "Get_status")),
            ("Waitsome", functools.partial(_wait_some, test_some)),
            ("Testsome", functools.partial(_test_some, test_some, "Wait")),
            ("Get_status_some", functools.partial(_test_some, named("Get_status_some"), "Get_status")),
        ):
            yield MPI.Request, case(name), staticmethod(_knowing(named(name), call))
    yield (
        MPI.Prequest,
        "Startall",
        staticmethod(_knowing(MPI.Prequest.Startall, functools.partial(_start_all, MPI.Prequest.Startall))),
    )


def _original(case: Callable[[str], str], name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(MPI.Request, case(name))
    return found


def _knowing(original: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that takes ``call`` for lists with requests of this package, and ``original`` for other lists."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def known(requests: Requests, *rest: Any, **named: Any) -> Any:
        for request in requests:
            if isinstance(request, _ASKED):
                return call(*signature.bind(requests, *rest, **named).args)
        return original(requests, *rest, **named)

    return known


def _for_mpi(requests: Requests) -> list[MPI.Request]:
    return [_NULL if isinstance(request, _ASKED) else request for request in requests]


def _asked(requests: Requests) -> list[tuple[int, Any]]:
    """Return the active requests that the call asks one by one, with their places."""
    return [
        (place, each)
        for place, each in enumerate(requests)
        if isinstance(each, _ASKED) and (each.is_active() if isinstance(each, Driven) else each != _NULL)
    ]


def _advance(request: Any) -> bool:
    return bool(request.advance() if isinstance(request, Driven) else request.Get_status())


def _are_complete(asked: Sequence[tuple[int, Any]], others: Requests) -> bool:
    """Return whether all requests that are asked one by one are complete. If not, let MPI advance the others."""
    # The loop asks each request, because each advances only when it is asked, and others may wait for its work.
    answers = [_advance(request) for _, request in asked]
    if all(answers):
        return True
    for request in others:
        request.Get_status()
    return False


def _finish(asked: Sequence[tuple[int, Any]], method: str, statuses: Sequence[MPI.Status] | None) -> None:
    """Fill the statuses of requests that are complete. Raise the first error after all are finished."""
    errors: list[BaseException] = []
    for place, request in asked:
        try:
            getattr(request, method)(statuses[place] if statuses is not None and place < len(statuses) else None)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _wait_all(original: Callable[..., Any], requests: Requests, statuses: Any = None) -> Any:
    asked, others = _asked(requests), _for_mpi(requests)
    for _ in pauses():
        if _are_complete(asked, others):
            break
    try:
        return original(others, statuses)
    finally:
        _finish(asked, "Wait", statuses)


def _test_all(original: Callable[..., Any], method: str, requests: Requests, statuses: Any = None) -> Any:
    asked, others = _asked(requests), _for_mpi(requests)
    if not _are_complete(asked, others):
        return (False, None) if original.__name__ == "testall" else False
    found = original(others, statuses)
    if found is True or (isinstance(found, tuple) and found[0]):
        _finish(asked, method, statuses)
    return found


def _test_any(original: Callable[..., Any], method: str, requests: Requests, statuses: Any = None) -> Any:
    asked = _asked(requests)
    nothing = (None,) if original.__name__ == "testany" else ()
    for place, request in asked:
        if _advance(request):
            getattr(request, method)(statuses)
            return (place, True, *nothing)
    found = original(_for_mpi(requests), statuses)
    return (MPI.UNDEFINED, False, *nothing) if asked and found[0] == MPI.UNDEFINED else found


def _wait_any(test: Callable[..., Any], requests: Requests, statuses: Any = None) -> Any:
    for _ in pauses():
        place, flag, *content = _test_any(test, "Wait", requests, statuses)
        if flag:
            return (place, *content) if content else place
    raise AssertionError("unreachable")


def _test_some(original: Callable[..., Any], method: str, requests: Requests, statuses: Any = None) -> Any:
    lower = original.__name__ == "testsome"
    asked = _asked(requests)
    complete = [(place, request) for place, request in asked if _advance(request)]
    sound = [(place, each) for place, each in complete if not (isinstance(each, Driven) and each.has_failed())]
    seen: list[MPI.Status] = []
    found = original(_for_mpi(requests), seen)
    places, contents = found if lower else (found, None)
    if places is None and not asked:
        return found
    if not places and not sound and complete:
        _finish(complete[:1], method, None)  # which raises; earlier calls have returned all requests without an error
    done = {place: (seen[index], contents[index] if contents else None) for index, place in enumerate(places or ())}
    for place, request in sound:
        status = MPI.Status()
        getattr(request, method)(status)
        done[place] = status, None
    order = sorted(done)
    _fill(statuses, [done[place][0] for place in order])
    return (order, [done[place][1] for place in order]) if lower else order


def _wait_some(test: Callable[..., Any], requests: Requests, statuses: Any = None) -> Any:
    for _ in pauses():
        found = _test_some(test, "Wait", requests, statuses)
        places = found[0] if isinstance(found, tuple) else found
        if places is None or places:
            return found
    raise AssertionError("unreachable")


def _fill(statuses: Any, seen: Sequence[MPI.Status]) -> None:
    """Fill the first statuses of the caller's list, which grows if it is too short, as in mpi4py."""
    if statuses is None:
        return
    if isinstance(statuses, list):
        statuses.extend(MPI.Status() for _ in range(len(seen) - len(statuses)))
    for target, status in zip(statuses, seen, strict=False):
        memmove(MPI._addressof(target), MPI._addressof(status), MPI._sizeof(MPI.Status))


def _start_all(original: Callable[..., None], requests: Sequence[MPI.Prequest]) -> None:
    mine = [isinstance(request, Driven) and isinstance(request, MPI.Prequest) for request in requests]
    for request, is_mine in zip(requests, mine, strict=True):
        if is_mine:
            request.Start()
    original([request for request, is_mine in zip(requests, mine, strict=True) if not is_mine])


# Looked up once, because `super()` and attributes add their time to each request.
_wait = MPI.Request.Wait
_test = MPI.Request.Test
_new_holding = MPI.Request.__new__

_MpiRequest = TypeVar("_MpiRequest", bound=MPI.Request)


def holding(request: _MpiRequest, held: object) -> _MpiRequest:
    """Return ``request``, which keeps ``held`` until its Wait or Test has completed it, or until it dies. Local.

    mpi4py keeps the buffers of only some calls, and a caller may drop them, as in ``Iallreduce(x + 1, y)``.
    """
    # `__new__` by itself is quicker than the class.
    prequest = isinstance(request, MPI.Prequest)
    held_by: Any = _HoldingPrequest(request) if prequest else _new_holding(_HoldingRequest, request)
    held_by._held = held
    return held_by  # type: ignore[no-any-return]


class _HoldingRequest(MPI.Request):
    """A request of MPI that keeps the memory which MPI uses."""

    __slots__ = ("_held",)  # a dictionary takes as long as the look-up of a plain call

    _held: object

    def __repr__(self) -> str:
        return f"<mpicomm.Request {'active' if self else 'inactive'}>"

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        _wait(self, status)
        self._held = None
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        done = _test(self, status)
        if done:
            self._held = None
        return done


class _HoldingPrequest(MPI.Prequest):
    """A persistent request of MPI that keeps the memory which each start uses."""

    __slots__ = ("_held",)

    _held: object


def replace(owner: Any, name: str, value: Any) -> Any:
    """Set an attribute of the module or of a class of mpi4py. Return its old value."""
    if not isinstance(owner, type):
        original = getattr(owner, name)
        setattr(owner, name, value)
        return original
    # Classes of extension modules refuse changes. A subclass in the place of a class would differ from the class of
    # mpi4py's objects, and programs compare classes. So this changes the dictionary under the read-only view of the
    # class.
    (attributes,) = gc.get_referents(owner.__dict__)
    original = attributes[name]
    attributes[name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))  # it clears the interpreter's cache of attributes
    return original
