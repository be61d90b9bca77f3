"""mpi4py's calls on lists of requests, for lists that hold requests of this package.

MPICH ends a program that gives such a call an open generalized request beside other requests. So these calls ask each
request alone, in turn. The first request of this package replaces mpi4py's calls, which go on to serve all other lists.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import itertools
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

    @property
    def error(self) -> BaseException | None:
        """The error that `Wait` will raise for the request, which is complete."""
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


_GENERALIZED = (Driven, MPI.Grequest)


@functools.cache  # only the first call does anything
def replace_list_calls() -> None:
    """Let mpi4py's calls on lists of requests take requests of this package. Local."""
    spellings: tuple[Callable[[str], str], ...] = (str, str.lower)
    for spell, name, kind in itertools.product(spellings, ("Wait", "Test", "Get_status_"), ("all", "any", "some")):
        looks = name == "Get_status_"
        one = getattr(MPI.Request, spell("Get_status_any" if looks else "Testany"))
        find = functools.partial(_all if kind == "all" else _some, one, spell("Get_status" if looks else "Wait"), kind)
        with_objects = spell is not str and not looks
        answer = functools.partial(_answer, kind, name == "Wait", with_objects, find)
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
                return call(*signature.bind(requests, *rest, **named).args)
        return original(requests, *rest, **named)

    replace(owner, name, staticmethod(known))


def _start_all(requests: Sequence[MPI.Prequest]) -> None:
    for request in requests:
        request.Start()


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


Found = tuple[Any, Any] | None
"""The places of requests and the objects that their messages bring; None if the call has to wait for them."""


def _answer(
    kind: str, waits: bool, with_objects: bool, find: Callable[..., Found], requests: Requests, statuses: Any = None
) -> Any:
    """Answer as mpi4py's wait for "all", "any" or "some" requests, or as its test of them."""
    for _ in pauses():
        found = find(requests, statuses)
        if found is not None or not waits:
            break
    if kind == "some":
        places, objects = ([], []) if found is None else found
        return (places, objects) if with_objects else places
    if kind == "all":
        objects = found and found[1]
        if waits:
            return objects if with_objects else True
        return (found is not None, objects) if with_objects else found is not None
    place, obj = found or (MPI.UNDEFINED, None)
    answer = (place,) if waits else (place, found is not None)
    if with_objects:
        return *answer, obj
    return place if waits else answer


# ``one`` is mpi4py's test of any of several requests. It gets one request at a time, because no other call tells
# whether a persistent request of MPI is active. ``take`` is the method that takes a complete request, or looks at it.


def _all(one: Callable[..., Any], take: str, kind: str, requests: Requests, statuses: Any) -> Found:
    # The list asks each request, because each advances only when it is asked, and others may wait for its work.
    complete = [
        not request.is_active() or request.advance() if isinstance(request, Driven) else request.Get_status()
        for request in requests
    ]
    if not all(complete):
        return None
    objects, seen, errors = [], [MPI.Status() for _ in requests], list[Exception]()
    for request, status in zip(requests, seen, strict=True):
        try:
            objects.append(getattr(request, take)(status))
        except Exception as error:
            errors.append(error)
    _tell(statuses, seen)
    if errors:
        raise errors[0]
    return range(len(requests)), objects


def _some(one: Callable[..., Any], take: str, kind: str, requests: Requests, statuses: Any) -> Found:
    """Take all complete requests, or the first of them if ``kind`` is "any"."""
    is_open, takes, places, objects, seen = False, take.lower() == "wait", list[int](), list[Any](), list[MPI.Status]()
    failed: Driven | None = None
    for place, request in enumerate(requests):
        if takes and isinstance(request, Driven) and request.is_active() and request.advance() and request.error:
            failed = failed or request
            continue
        status = MPI.Status()
        active, complete, obj = _ask(one, take, request, status)
        is_open |= active
        if complete:
            places.append(place)
            objects.append(obj)
            seen.append(status)
            if kind == "any":
                break
    if failed is not None and not places:
        getattr(failed, take)(None)  # which raises; earlier calls have returned all requests without an error
    if not places and (is_open or failed is not None):
        return None
    if kind == "any":
        _tell([] if statuses is None else [statuses], seen or [MPI.Status()])
        return (places[0], objects[0]) if places else (MPI.UNDEFINED, None)
    _tell(statuses, seen)
    return (places, objects) if places else (None, None)


def _tell(statuses: Any, seen: list[MPI.Status]) -> None:
    """Copy statuses into those of the caller, whose list grows."""
    if isinstance(statuses, list):
        statuses.extend(MPI.Status() for _ in range(len(seen) - len(statuses)))
    for target, status in zip(statuses or (), seen, strict=False):
        memmove(MPI._addressof(target), MPI._addressof(status), MPI._sizeof(MPI.Status))


def _ask(one: Callable[..., Any], take: str, request: Any, status: MPI.Status | None) -> tuple[bool, bool, Any]:
    """Return whether a request is active, whether it is complete, and its object. Take a complete request."""
    if isinstance(request, _GENERALIZED):
        active = request.is_active() if isinstance(request, Driven) else request != _NULL
        complete = active and (request.advance() if isinstance(request, Driven) else request.Get_status())
        if complete:
            getattr(request, take)(status)
        return active, complete, None
    place, flag, *content = one([request], status)
    return place == 0 or not flag, place == 0, content[0] if content else None


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
