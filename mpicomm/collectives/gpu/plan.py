"""Plan: the steps of a collective on GPUs, ready to be enqueued again and again; and the interface of engines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from cupy.cuda import runtime

from mpicomm.collectives.gpu.decision import NO_CHOICE, AlgorithmChoice
from mpicomm.devices.cuda.stream_order import Enqueue

if TYPE_CHECKING:
    import cupy

    from mpicomm.collectives.call import Call
    from mpicomm.collectives.exchange import Message
    from mpicomm.collectives.gpu.call_templates import CallTemplate, MessageTemplate
    from mpicomm.devices.cuda.events import Completions, LocalEvent
    from mpicomm.symmetric.registry import Mappings


class Plan:
    """The steps of one call, ready to be enqueued.

    ``text`` names the call in errors. ``choice`` names its algorithm in records. ``collective`` is whether all ranks
    make the call. Then ranks can compare their calls.
    """

    def __init__(
        self, text: str, steps: Sequence[Enqueue], choice: AlgorithmChoice = NO_CHOICE, *, collective: bool = True
    ) -> None:
        self.text = self.words = text
        self.count = 0
        self.offset: int | None = None
        """The text and the numbers of the call for `CallLog.post`."""
        self.choice = choice
        self.collective = collective
        self.private_nbytes: int | None = None
        """This rank's longest message if only the two ranks of a message know its length; else None."""
        self.is_new = True
        """Whether the plan was not enqueued yet. Then the call log has the call already."""
        self.is_old = False
        """Whether the call has to be planned again, because ranks may change the memory that it uses."""
        self.steps = tuple(steps)
        self.launch: Enqueue | None = None
        """Enqueues the steps as a graph; None until there is a graph."""
        self._graph: Any = None

    def __str__(self) -> str:
        return self.text

    def enqueue(self, stream: int) -> None:
        """Enqueue the steps one by one; the device's context must be current."""
        for step in self.steps:
            step(stream)

    def make_graph(self, stream: cupy.cuda.Stream) -> None:
        """Make `launch` by a capture on ``stream``, which is idle. A graph is faster to enqueue than its steps.

        After an exception, also a Ctrl-C, neither a capture nor a graph is left.
        """
        try:
            stream.begin_capture(runtime.streamCaptureModeRelaxed)
            self.enqueue(stream.ptr)
        except BaseException:
            # CUDA refuses to end a capture that has not begun, or that has a fork without its join. This error must not
            # replace the exception in flight, which may be a Ctrl-C.
            with suppress(runtime.CUDARuntimeError):
                stream.end_capture()
            raise
        self._graph = stream.end_capture()
        self.launch = partial(runtime.graphLaunch, self._graph.graphExec)

    def drop_graph(self) -> None:
        """Destroy the graph, if there is one."""
        self.launch = self._graph = None


class AnyPlan(Protocol):
    """A call that an engine can enqueue repeatedly. Its ``str`` is `text`, for errors."""

    @property
    def text(self) -> str:
        """The text of the call, for errors."""

    @property
    def choice(self) -> AlgorithmChoice:
        """The algorithm of the call."""

    @property
    def is_old(self) -> bool:
        """Whether the call has to be planned again."""


class Engine(Protocol):
    """An engine for device arrays: `DeviceEngine`, or the engine of several peer domains together."""

    completions: Completions
    """The events that callers pass to `enqueue`."""

    def prepare_call(self, call: Call, mappings: Mappings, asked: str) -> AnyPlan:
        """See `DeviceEngine.prepare_call`."""

    def template(self, call: Call, mappings: Mappings, asked: str) -> CallTemplate | None:
        """See `DeviceEngine.template`."""

    def prepare_barrier(self) -> AnyPlan:
        """See `DeviceEngine.prepare_barrier`."""

    def require_same(self, text: str) -> None:
        """See `DeviceEngine.require_same`."""

    def prepare_messages(self, text: str, sent: Message | None, received: Message | None) -> AnyPlan:
        """See `DeviceEngine.prepare_messages`."""

    def message_template(
        self, text: str, sent: Message | None, received: Message | None, element_nbytes: tuple[int, int]
    ) -> MessageTemplate:
        """See `DeviceEngine.message_template`."""

    def enqueue(self, plan: Any, stream: int, event: LocalEvent | None = None, meets: bool = False) -> bool:
        """See `DeviceEngine.enqueue`."""
