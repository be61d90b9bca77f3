"""PlanningComm: a Communicator that plans calls on tensors of the host as if they were on a GPU, and moves nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mpicomm.collectives.gpu.algorithms.steps import NO_CHOICE
from mpicomm.collectives.gpu.call_templates import CallTemplate
from mpicomm.collectives.gpu.plan_cache import PlanCache
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.symmetric.registry import Mappings


class TemplateOfForm(CallTemplate):
    """The plan of all calls of a form. ``filled`` has the buffers of each call that was filled in."""

    text = "a form"
    choice = NO_CHOICE

    def __init__(self) -> None:
        self.filled: list[Any] = []

    def takes(self, *buffers: Any) -> bool:
        return True

    def fill(self, *buffers: Any) -> bool:
        self.filled.append(buffers)
        return True


class PlanningComm:
    """The Communicator of a rank of two, which plans all calls that it gets. The GPU has the memory of the host."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.knows_forms = False
        """Whether all calls of a form are known after the first one, whatever their counts."""
        session: Any = SimpleNamespace(mappings=Mappings(), channel=None)
        self._session = session
        self.form = TemplateOfForm()
        engine: Any = SimpleNamespace(template=lambda *_: self.form)
        self.cache = PlanCache(session, engine)

    def __getattr__(self, name: str) -> Callable[..., None]:
        operation = OPERATIONS[name]

        def call(send: Any, receive: Any = None, op: Any = None, root: int = 0, *, algorithm: str, **_: Any) -> None:
            if name == "Bcast":
                send, receive, op, root = None, send, None, receive
            plan: Any = SimpleNamespace(text=name, is_old=False, lasts=True)
            key = (operation, algorithm, send, receive, op if operation.reduces else None, root, None, None, None)
            read: Any = SimpleNamespace(operands=(), in_place=False) if self.knows_forms else None
            self.cache.add(plan, key, by_output=False, read=read)

        return call
