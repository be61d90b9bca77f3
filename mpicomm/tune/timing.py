"""Times the algorithms side by side. The bench checks and times each as if it were another library."""

from __future__ import annotations

from collections.abc import Mapping

from mpicomm.api.communicator import Communicator
from mpicomm.bench.contenders import Contender, Contenders
from mpicomm.bench.content import Content
from mpicomm.bench.machine import Machine
from mpicomm.bench.measure import Effort, Measuring, Outcome
from mpicomm.bench.operations import Case
from mpicomm.bench.own import Mpicomm
from mpicomm.tune.subjects import OP, Subject
from mpicomm.tune.sweep import Measure


class Timing:
    """Times cases of up to ``nbytes`` on this machine, in arrays that all algorithms share. Methods are collective."""

    def __init__(self, comm: Communicator, machine: Machine, nbytes: int, effort: Effort) -> None:
        self._comm = comm
        self._machine = machine
        self._nbytes = nbytes
        self._effort = effort
        self._arrays = {
            registered: [self._peer("auto", registered).allocate(nbytes) for _ in range(2)]
            for registered in (False, True)
        }

    def of(self, subject: Subject) -> Measure:
        """Return the function that measures cases of a subject.

        An algorithm that fails on some rank has a reason in place of an outcome. The function raises an error that
        makes the communicator unusable.
        """
        comm, machine = self._comm, self._machine
        contenders = Contenders(comm, machine, self._nbytes)
        for algorithm in subject.algorithms:
            peer = self._peer(algorithm, subject.kind.registered)
            contenders.present.append(Contender(algorithm, peer, *self._arrays[subject.kind.registered]))
        longest = self._nbytes // subject.dtype.itemsize
        with machine.current():
            content = Content(machine.xp, subject.dtype, OP, comm.size, longest, reduces=True)
        measuring = Measuring(comm, machine, content, contenders, self._effort)

        def measure(case: Case) -> tuple[Mapping[str, Outcome], Mapping[str, str]]:
            found = measuring.run(case)
            comm.check(machine.stream)
            return found

        return measure

    def _peer(self, algorithm: str, registered: bool) -> Mpicomm:
        return Mpicomm(self._comm, self._machine, symmetric=registered, algorithm=algorithm)
