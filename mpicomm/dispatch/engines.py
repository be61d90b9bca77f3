"""Engines: the engines of one communicator. Each is made when a call first needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from mpicomm.cluster.agreement import Group
from mpicomm.collectives.call import Call
from mpicomm.collectives.call_log import CallLog
from mpicomm.collectives.host import selection
from mpicomm.collectives.host.engine import HostEngine
from mpicomm.errors import CollectiveTimeoutError
from mpicomm.session import Session

if TYPE_CHECKING:
    from mpicomm.collectives.gpu.engine import DeviceEngine
    from mpicomm.collectives.gpu.plan_cache import PlanCache
    from mpicomm.domains.gpu.engine import DomainsEngine
    from mpicomm.domains.host import HostDomains
    from mpicomm.domains.mpi_transfers import Transfers
    from mpicomm.domains.steps import DomainLayout


class Engines:
    """The engines of the communicator of ``session``, and the call logs in which its ranks post their calls.

    The first engine sets up ``session``, collectively.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.tracer = session.tracer
        """It takes the records of calls, if the communicator records."""
        self._call_logs: dict[Group, CallLog] = {}
        self._host: HostEngine | None = None
        self._host_domains: HostDomains | None = None
        self.gpu: PlanCache | None = None
        """The engine for device arrays, after a call has needed it. Every known call reads this public field."""
        # A progress thread that begins a started call may need the first engine at the same time as the program. Two
        # threads that made one each would take each other's answers from the other ranks.
        self._making = threading.Lock()
        self._internode: tuple[str, dict[str, str]] = "", {}
        self._transfers: list[Transfers] = []
        session.has_stray_messages = lambda: any(transfers.has_stray_messages for transfers in self._transfers)

    def internode(self, operation: str) -> tuple[str, dict[str, str]]:
        """Return the name of the transport between peer domains, "" in one domain, and the reasons against better ones.

        Collective if it sets up the engine, else local.
        """
        if len(self.session.placement.domains) > 1 and isinstance(self.session.placement.here.device, str):
            return "mpi", {}
        if len(self.session.placement.domains) > 1 and not self.session.is_suspended:  # it makes no engine
            self.on_gpu(operation)
        return self._internode

    def node_log(self, operation: str) -> CallLog:
        """Return the call log of this rank's node. Collective over all ranks the first time, else local."""
        session = self.session.set_up(operation)
        return self._shared_call_log(session, session.node)

    def on_host(self, operation: str) -> HostEngine:
        """Return the engine for host arrays of this rank's node. Collective over the node the first time, else local.

        Raises as `HostEngine`.
        """
        if self._host is None:
            try:
                session = self.session.set_up(operation)
                session.require_usable(operation)
                self._host = session.keep(HostEngine(session.node, self.node_log(operation)))
                session.host_timeout = self._timeout_on_host
            except CollectiveTimeoutError as error:
                text = str(error).removeprefix(f"{operation}: ")
                raise CollectiveTimeoutError(
                    f"{operation}: {text}; a rank that passes another count or type may be in MPI's {operation}",
                    ranks=error.ranks,
                ) from error
        return self._host

    def of_hosts(self, operation: str) -> Callable[[Call, str], None]:
        """Return what carries out a call on the host arrays of all ranks. Collective the first time, else local."""
        if len(self.session.placement.nodes) == 1:
            return partial(selection.run_mapped, self.on_host(operation))
        if self._host_domains is None:
            from mpicomm.domains.host import HostDomains
            from mpicomm.domains.steps import DomainLayout

            session = self.session.set_up(operation)
            layout = DomainLayout(session.placement.nodes, session.placement.rank)
            # On all nodes together: if one node fails, the others would wait for its messages.
            engine = session.group.agree(f"{operation}: set-up", lambda: self.on_host(operation))
            call_log = self._call_logs[session.node]
            engine.awaited_in_other_domains = call_log.awaited_ranks
            self._host_domains = HostDomains(layout, engine, self._transfers_of(session, layout, call_log))
        return self._host_domains.run

    def on_gpu(self, operation: str) -> PlanCache:
        """Return the engine for device arrays, with the calls that it knows. Collective the first time, else local."""
        if self.gpu is None:
            # Before the lock, because it waits for started calls, for which another thread may need the engine.
            session = self.session.set_up(operation)
            with self._making:
                if self.gpu is None:
                    self.gpu = self._make_on_gpu(session, operation)
        return self.gpu

    def _make_on_gpu(self, session: Session, operation: str) -> PlanCache:
        from mpicomm.collectives.gpu.engine import DeviceEngine
        from mpicomm.collectives.gpu.plan_cache import PlanCache

        backend = session.gpu(operation)
        call_log = self._shared_call_log(session, session.domain)
        ranks_per_device = session.placement.max_ranks_per_device
        most_nbytes = session.placement.here.shared_limit_nbytes

        def make() -> DeviceEngine:
            # The engine allocates and waits. A thread that captures a graph may do so only in this block.
            with backend.loading():
                engine = DeviceEngine(session.domain, backend, session.kind, call_log, ranks_per_device, most_nbytes)
            return session.keep(engine)

        engine = make() if len(session.placement.domains) == 1 else self._of_domains(session, make)
        if session.device_tracer is not None:
            session.device_tracer.trace_engine(engine)
        return PlanCache(session, engine)

    def _of_domains(self, session: Session, make: Callable[[], DeviceEngine]) -> DomainsEngine:
        """Return an engine for all peer domains, on top of the engine of one domain that ``make`` makes. Collective."""
        from mpicomm.domains.gpu.engine import DomainsEngine
        from mpicomm.domains.gpu.transports import choose_transport
        from mpicomm.domains.steps import DomainLayout

        layout = DomainLayout(session.placement.domains, session.placement.rank)
        # On all peer domains together: if one domain fails, the others would wait for its network messages.
        engine = session.group.agree("collectives: set-up", make)
        transfers = self._transfers_of(session, layout, self._call_logs[session.domain])
        backend = session.gpu("collectives")
        # Not in `backend.loading()`, because the first signal enters this block to load its kernel.
        transport, rejected = choose_transport(session, backend, transfers, engine.abort)
        self._internode = transport.name, rejected
        return session.keep(DomainsEngine(layout, engine, backend, transport))

    def _transfers_of(self, session: Session, layout: DomainLayout, call_log: CallLog) -> Transfers:
        from mpicomm.domains.mpi_transfers import Transfers

        transfers = Transfers(session.private, session.placement.here.timeout_s, layout.remote_peers, call_log)
        self._transfers.append(transfers)
        return transfers

    def _shared_call_log(self, session: Session, group: Group) -> CallLog:
        if group not in self._call_logs:
            index = int(group is not session.domain)
            self._call_logs[group] = session.keep(CallLog(group, session.row, index, session.call_by_mpi))
            session.peers_wait_elsewhere = lambda: any(log.ahead() for log in self._call_logs.values())
            for each in (session.group, session.node, session.domain):
                each.absence_reason = self._absence_reason
        return self._call_logs[group]

    def _timeout_on_host(self) -> CollectiveTimeoutError | None:
        error = self._host and self._host.broken
        return error if isinstance(error, CollectiveTimeoutError) else None

    def _absence_reason(self, ranks: Sequence[int]) -> str:
        failed = self._host and self._host.broken
        if failed:
            return f"the ranks have given up an earlier call ({failed}): call Free on every rank after an error"
        ahead = (said for call_log in [*self._call_logs.values()] if (said := call_log.absence_reason()))
        return next(ahead, "") or self.session.absence_reason(ranks)
