"""mpi4py's calls on lists of requests, for lists that hold requests of this package.

MPICH ends a program that passes such a call a generalized request that is not complete beside other requests. So these
calls pass MPI the list without the incomplete ones, and poll those in turn. The first request of this package replaces
mpi4py's calls, which go on to serve all other lists.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import inspect
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

from mpi4py import MPI

PAUSE_S = 50e-6
SPIN_S = 1e-3
"""A wait polls for this time without a pause: a pause takes twice its time, and ranks of a program that launches
kernels from Python often come some hundred microseconds apart."""

Requests = Sequence[MPI.Request]


class Driven:
    """The base of this package's requests, which advance only in a thread that polls them."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<mpicomm.{type(self).__name__} {'inactive' if self.active is None else 'active'}>"

    @property
    def active(self) -> Any:
        """The `DeferredRequest` for which a wait would wait; None for a null request."""
        raise NotImplementedError

    def wait(self, status: MPI.Status | None = None) -> None:
        """As ``Wait``. There is no Python object to return."""
        self.Wait(status)  # type: ignore[attr-defined]

    def test(self, status: MPI.Status | None = None) -> tuple[bool, None]:
        """As ``Test``. There is no Python object to return."""
        return self.Test(status), None  # type: ignore[attr-defined]

    def Get_status(self, status: MPI.Status | None = None) -> bool:
        """Return whether the request is complete, and leave it as it is; see mpi4py."""
        active = self.active
        if active is not None:
            active.advance()
        return _get_status(_in_mpi(self), status)

    get_status = Get_status

    def cancel(self) -> None:
        """As ``Cancel``."""
        self.Cancel()  # type: ignore[attr-defined]


_GENERALIZED = (Driven, MPI.Grequest)


@functools.cache  # only the first call does anything
def replace_list_calls() -> None:
    """Let mpi4py's calls on lists of requests take requests of this package. Local."""
    spellings: tuple[Callable[[str], str], ...] = (str, str.lower)
    for spell, name, find in itertools.product(spellings, ("Wait", "Test", "Get_status_"), (_all, _any, _some)):
        kind, takes, waits = find.__name__[1:], name != "Get_status_", name == "Wait"
        test = getattr(MPI.Request, spell(("Test" if takes else name) + kind))
        answer = functools.partial(_answer, find, waits, takes, test)
        if waits and find is _all:
            answer = functools.partial(_wait_all, getattr(MPI.Request, spell("Waitall")))
        _replace_for_own(MPI.Request, spell(name + kind), answer)
    _replace_for_own(MPI.Prequest, "Startall", _start_all)


def _replace_for_own(owner: type, name: str, call: Callable[..., Any]) -> None:
    """Let a call of mpi4py take ``call`` for lists with requests of this package or generalized requests."""
    original = getattr(owner, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def known(requests: Requests, *rest: Any, **named: Any) -> Any:
        for request in requests:
            if isinstance(request, _GENERALIZED):
                if named:
                    rest = signature.bind(requests, *rest, **named).args[1:]
                return call(requests, *rest)
        return original(requests, *rest, **named)

    replace(owner, name, staticmethod(known))


def _start_all(requests: Sequence[MPI.Prequest]) -> None:
    for request in requests:
        request.Start()


def backoff() -> Iterator[None]:
    """Yield for ever, so that the caller polls: at first without sleep, because most work takes less than `SPIN_S`."""
    until = time.perf_counter() + SPIN_S
    while True:
        yield
        if time.perf_counter() < until:
            os.sched_yield()  # even time.sleep(0) takes 50 us
        else:
            time.sleep(PAUSE_S)


Found = tuple[bool, list[Any]]
"""Whether a wait is over, and the items of the answer of mpi4py's test: indices, flag and objects of messages."""


def _answer(
    find: Callable[..., Found],
    waits: bool,
    takes: bool,
    test: Callable[..., Any],
    requests: Requests,
    statuses: Any = None,
) -> Any:
    """Answer as mpi4py's wait for requests, or as ``test``, its test of them. A call that ``takes`` ends requests."""
    for _ in backoff():
        over, answer = find(test, takes, requests, statuses)
        if over or not waits:
            break
    if waits and find is _any:
        del answer[1]  # the flag
    return tuple(answer) if len(answer) > 1 else answer[0]


def _wait_all(wait: Callable[..., Any], requests: Requests, statuses: Any = None) -> Any:
    """Answer as ``wait``, mpi4py's wait for all requests. Until MPI has all of them, this thread drives the work."""
    in_mpi = [*map(_in_mpi, requests)]
    works: dict[int, Any] = {index: each for index, each in enumerate(in_mpi) if isinstance(each, Driven)}
    for work in works.values():
        work.driven = True
    try:
        left, others = [*works.values()], [each for each in in_mpi if not isinstance(each, Driven)]
        for _ in backoff():
            left = [work for work in left if not work.advance()]
            others = [each for each in others if not _get_status(each)]  # MPI goes on with them: work may wait for that
            if not (left or others):
                break
    finally:
        for work in works.values():
            work.driven = False
    for work in works.values():
        work.silent = True
    objects = wait(in_mpi, statuses)
    for index, status in enumerate(statuses or ()):  # mpi4py has added those that were missing
        if index in works:
            works[index].fill(status)
    _raise([work for work in works.values() if work.error is not None])
    return objects


# MPI gets MPI.REQUEST_NULL, which it passes over, for each request that is open here, and for those that have failed:
# a call that raises returns no request, so they raise when MPI finds no others.


def _all(test: Callable[..., Any], takes: bool, requests: Requests, statuses: Any) -> Found:
    in_mpi, failed, is_open = _sort(requests, takes)
    if is_open:
        for request in in_mpi:  # MPI goes on with them: work may wait for that
            _get_status(request)
        return False, [False, None] if test.__name__ == "testall" else [False]
    answer = _items(test(in_mpi, statuses))
    if answer[0]:
        _raise(failed)
    return answer[0], answer


def _any(test: Callable[..., Any], takes: bool, requests: Requests, status: Any) -> Found:
    in_mpi, failed, is_open = _sort(requests, takes)
    answer = _items(test(in_mpi, status))
    if answer[0] == MPI.UNDEFINED:
        _raise(failed)
        answer[1] = answer[1] and not is_open
    return answer[1], answer


def _some(test: Callable[..., Any], takes: bool, requests: Requests, statuses: Any) -> Found:
    in_mpi, failed, is_open = _sort(requests, takes)
    answer = _items(test(in_mpi, statuses))
    if not answer[0]:
        _raise(failed)
        if is_open and answer[0] is None:  # MPI has seen no active request
            answer = [[] for _ in answer]
    return answer[0] != [], answer


def _sort(requests: Requests, takes: bool) -> tuple[list[Any], list[Any], bool]:
    """Return the requests for MPI, the failed ones, and whether one is open."""
    in_mpi, failed, is_open = list[Any](), list[Any](), False
    for request in requests:  # all of them, because each advances only when it is asked
        known = _in_mpi(request)
        is_own = isinstance(known, Driven)
        if not (known.advance() if is_own else not isinstance(known, MPI.Grequest) or _get_status(known)):
            is_open, known = True, MPI.REQUEST_NULL
        elif is_own and takes and known.error is not None:
            known.silent = True
            failed.append(known)
            known = MPI.REQUEST_NULL
        in_mpi.append(known)
    return in_mpi, failed, is_open


def _in_mpi(request: Any) -> Any:
    """Return the request that MPI knows: the `DeferredRequest` of a request of this package, or the request itself."""
    if not isinstance(request, Driven):
        return request
    active = request.active
    return MPI.REQUEST_NULL if active is None else active


def _raise(failed: list[Any]) -> None:
    """Take the requests that have failed, and raise the error of the first."""
    for request in failed[1:]:
        with contextlib.suppress(Exception):
            request.wait()
    if failed:
        failed[0].wait()


def _items(answer: Any) -> list[Any]:
    return list(answer) if isinstance(answer, tuple) else [answer]


# Looked up once, because `super()` and attributes add their time to each request.
_wait = MPI.Request.Wait
_test = MPI.Request.Test
_get_status = MPI.Request.Get_status
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
