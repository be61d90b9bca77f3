"""FormPlan: the plan of all calls of one form. Each call fills its addresses and its count into the plan."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from mpicomm.collectives.gpu.algorithms.base import Node
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.registry import ALGORITHMS
from mpicomm.collectives.gpu.algorithms.template import Template
from mpicomm.collectives.gpu.choose import Choice
from mpicomm.collectives.gpu.tuning import Tuning
from mpicomm.collectives.signature import Signature, counted_hash
from mpicomm.devices.cuda.load import Launcher
from mpicomm.kernels.variant import Variant

Load = Callable[[Variant, Any, bool], Launcher]
"""Returns what launches a kernel with these arguments, early or not."""


class FormPlan:
    """The calls of a form, for `DeviceEngine.enqueue` as a `Plan` is. `fill` makes it the plan of one of them.

    It chooses the algorithm for a call as `choose` does. The filled call is enqueued before the next one is filled in:
    MPI lets one thread at a time call collectives of a communicator.
    """

    collective = True
    private_nbytes = None
    is_old = False
    steps = (None,)
    """Not empty: every rank has a part in a call of a form."""

    def __init__(self, form: Form, signature: Signature, asked: str, tuning: Tuning, node: Node, load: Load) -> None:
        self._before, self._after = signature.words_around_count()
        self._hash = signature.hash_without_count
        self._load = load
        self._word_nbytes = form.itemsize * form.factor
        self._nbytes_per_count = form.nbytes_per_count
        self._sent, self._received = form.blocks_sent, form.blocks_received
        self._why = "by the table" if asked == "auto" else f'algorithm="{asked}"'
        choices = [(0, asked)]
        if asked == "auto":
            choices = tuning.choices(form.operation.name, node.size, registered=False)
        self._begins = [begin for begin, _ in choices]
        self._choices = [_Algorithm(name, _template(name, form, node)) for _, name in choices]
        self._count = 0
        self._chosen = self._choices[0]
        self._blocks = self._threads = 0
        self._launcher: Launcher | None = None

    def fill(self, send: int, sent: int, receive: int, received: int) -> bool:
        """Fill in a call; return whether it is possible. Local.

        The buffers have ``sent`` elements at address ``send``, and ``received`` elements at address ``receive``. A
        call that the form does not know is planned, and raises there what it has to.
        """
        if self._received:
            count, rest = divmod(received, self._received)
            if rest or (self._sent and sent != count * self._sent):
                return False
        else:
            count, rest = divmod(sent, self._sent)
        if rest or count <= 0:
            return False
        nbytes = count * self._word_nbytes
        # Buffers that overlap are refused, and the same memory given twice is another form.
        if self._sent and send < receive + nbytes * self._received and receive < send + nbytes * self._sent:
            return False
        chosen = self._choices[bisect_right(self._begins, count * self._nbytes_per_count) - 1]
        template = chosen.template
        if template is None:
            return False
        filled = template.fill(send, receive, nbytes, counted_hash(self._hash, count))
        if filled is None:
            return False
        kernel, self._blocks, self._threads = filled
        launcher = chosen.launchers.get(kernel)
        if launcher is None:
            launcher = self._load(template.variant(kernel), template.arguments, template.early)
            chosen.launchers[kernel] = launcher
        self._count, self._chosen, self._launcher = count, chosen, launcher
        return True

    @property
    def text(self) -> str:
        """The call that is filled in, in words."""
        return f"{self._before}{self._count}{self._after}"

    @property
    def choice(self) -> Choice:
        """The algorithm of the call that is filled in, in words."""
        return Choice(self._chosen.name, self._why)

    def launch(self, stream: int) -> None:
        """Enqueue the call that is filled in; the device's context must be current."""
        assert self._launcher is not None
        self._launcher.launch(stream, self._blocks, self._threads)

    enqueue = launch


class _Algorithm:
    """An algorithm for calls of a form: its template, and the launchers of its kernels."""

    def __init__(self, name: str, template: Template | None) -> None:
        self.name = name
        self.template = template
        self.launchers: dict[Any, Launcher] = {}


def _template(name: str, form: Form, node: Node) -> Template | None:
    for algorithm in ALGORITHMS:
        if algorithm.name == name and algorithm.serves(form.operation) and algorithm.takes(form):
            return algorithm.template(form, node)
    return None
