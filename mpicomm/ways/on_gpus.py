"""Calls on device arrays that kernels carry out, in one peer domain or in several."""

from __future__ import annotations

from functools import partial
from typing import Any

from mpicomm.collectives.call import Call, in_order
from mpicomm.collectives.operations import Operation
from mpicomm.mpi.buffers import array_of
from mpicomm.mpi.location import require_here
from mpicomm.mpi.requests import Completer, DeferredRequest
from mpicomm.session import Session
from mpicomm.ways.engines import Engines
from mpicomm.ways.location_votes import LocationVotes


class OnGpus:
    """The engine of kernels: it plans a call, enqueues the plan in a stream, and keeps the plan for equal calls."""

    def __init__(self, session: Session, engines: Engines, votes: LocationVotes) -> None:
        self._session = session
        self._engines = engines
        self._completer = Completer(by_itself=True)
        self._votes = votes

    def enqueue(self, call: Call, *, blocking: bool) -> DeferredRequest | None:
        """Enqueue a call that was read; return its request, None if it is ``blocking``. Collective."""
        operation, given, session, copies = call.operation, call.given, self._session, call.copies
        session.require_gpu(operation.name)  # before anything looks at device memory
        session.set_up(operation.name)
        for operand in call.operands:
            require_here(f"{operation}: {operand.name}", operand.device, session.backend.device)
        session.require_usable(operation.name)
        if self._votes.are_needed and not (call.has_voted or call.joins):
            self._votes.vote(operation, on_host=False)  # first, because ranks with host arrays take part in the set-up
        gpu, backend = self._engines.on_gpu(operation.name), session.gpu(operation.name)
        plan = gpu.engine.prepare_call(call, session.mappings, call.algorithm)
        if not call.joins:  # other ranks may pass other memory the next time
            key = (operation, call.algorithm, *in_order(given))
            gpu.add(plan, key, by_output=call.device_array is not array_of(given.send), read=call)
        stream = backend.stream(call.stream, call.device_array)

        def finish() -> None:
            backend.check()
            if copies:
                copies.back()

        if not blocking:
            gpu.engine.enqueue(plan, stream)
            return self._completer.add(DeferredRequest.of(backend.completion(stream), finish), backend.prepare_thread)
        gpu.carry_out(plan, stream, call.device_array)
        by_address = call.stream is None and any(operand.by_address for operand in call.operands)
        if backend.completes or by_address:
            backend.complete(stream)
        if copies:
            backend.synchronize(stream)
            finish()
        return None

    def start_known(
        self, operation: Operation, stream: Any, algorithm: str, given: tuple[Any, ...], *, votes: bool = True
    ) -> DeferredRequest | None:
        """Start a call that was made before, with the fields of `Arguments` in order; None if it was not."""
        gpu = self._engines.gpu
        if gpu is None:
            return None
        send, receive, op, root, counts, epilogue, wire = given
        known = gpu.find(operation, algorithm, send, receive, op, root, counts, epilogue, wire)
        if known is None:
            return None
        backend, mark = self._session.backend, gpu.engine.completions.take()
        vote = self._votes.vote_for_gpus if votes else None
        is_enqueued = gpu.enqueue(known, stream, send, receive, mark, vote=vote)
        done = mark.passed if is_enqueued else partial(bool, True)
        return self._completer.add(DeferredRequest.of(done, backend.check), backend.prepare_thread)
