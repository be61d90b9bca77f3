"""Engine: the interface of the engines for device arrays, and of the plans that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mpicomm.collectives.call import Call
    from mpicomm.collectives.exchange import Message
    from mpicomm.collectives.gpu.call_templates import CallTemplate, MessageTemplate
    from mpicomm.collectives.gpu.decision import AlgorithmChoice
    from mpicomm.devices.cuda.events import Completions, LocalEvent
    from mpicomm.symmetric.registry import Mappings


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
