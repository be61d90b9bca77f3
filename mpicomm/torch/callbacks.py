"""Callbacks of futures: they make their calls at the position where the program has added them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from mpicomm.torch.call_queue import QUEUES

_Callback = Callable[[Any], Any]


def install_places() -> None:
    """Let ``then`` and ``add_done_callback`` of all futures give each callback its position among calls. Local.

    If the future is complete when the program adds a callback, the callback runs in the program's thread, else in the
    thread of a `CallQueue`. Its calls must come at the same position in both cases, because the future may be complete
    on only some ranks. PyTorch makes the futures that ``then`` returns, in a class without subclasses, so this replaces
    methods of that class.
    """
    future: Any = torch._C.Future
    future.then = _with_place(future.then)
    future.add_done_callback = _with_place(future.add_done_callback)


def _with_place(add: Callable[[Any, _Callback], Any]) -> Callable[[Any, _Callback], Any]:
    @wraps(add)
    def add_at_place(future: Any, callback: _Callback) -> Any:
        return add(future, _at_place(future, callback) if QUEUES else callback)

    return add_at_place


def _at_place(future: Any, callback: _Callback) -> _Callback:
    places = [(queue, place) for queue in QUEUES if (place := queue.place(future)) is not None]
    if not places:
        return callback

    def call(done: Any) -> Any:
        for queue, place in places:
            if queue.is_here():
                return queue.call_at(place, callback, done)
        return callback(done)

    return call
