"""The slowdown of a matrix product while a collective runs on another stream of the same GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpicomm.api.communicator import Communicator
from mpicomm.bench.contenders import Contenders
from mpicomm.bench.machine import Call, Machine
from mpicomm.bench.measure import PeerFailureError, together
from mpicomm.bench.operations import Case
from mpicomm.bench.peers import Peer

_EDGE = 8192
_PRODUCTS = 20
_LAUNCH = 10  # calls of the collective in one graph
_SPAN = 3  # the collective runs this many times as long as the products without it, because it slows the products down


@dataclass(frozen=True)
class Slowdown:
    """The time of a product, without and with the collective of a contender, on the slowest rank."""

    name: str
    nbytes: int
    alone_us: float
    beside_us: float
    spanned: bool
    """Whether the collective ran until the products ended."""
    failure: str = ""

    def __str__(self) -> str:
        what = f"{_EDGE}^3 product beside {self.name}, {self.nbytes} B"
        if self.failure:
            return f"{what}: {self.failure}"
        short = "" if self.spanned else ", though the collective was over before"
        ratio = self.beside_us / self.alone_us
        return f"{what}: {self.beside_us:.0f} us, alone {self.alone_us:.0f} us: {ratio:.2f} times as long{short}"


def slowdowns(comm: Communicator, machine: Machine, contenders: Contenders, case: Case) -> list[Slowdown]:
    """Time the product without a collective, and during each contender's collective. Collective."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    multiply = _product(stream, comm.device)

    def time_products() -> float:
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        for _ in range(_PRODUCTS):
            multiply()
        stop.record(stream)
        stop.synchronize()
        milliseconds: float = cupy.cuda.get_elapsed_time(start, stop)
        return milliseconds * 1e3 / _PRODUCTS

    time_products()  # the first call sets the library up
    comm.barrier()
    alone = max(comm.allgather(time_products()))
    found = []
    for contender in contenders.present:
        beside, spanned, failure = 0.0, False, ""
        try:
            beside, spanned = _time_beside(comm, machine, contender, case, time_products, alone)
        except PeerFailureError as error:
            failure = str(error)
        found.append(Slowdown(contender.name, case.nbytes, alone, beside, spanned, failure))
    return found


def _time_beside(
    comm: Communicator,
    machine: Machine,
    contender: Peer,
    case: Case,
    time_products: Callable[[], float],
    alone_us: float,
) -> tuple[float, bool]:
    call = _fastest(comm, machine, contender, case)
    launch: Call = call
    with suppress(PeerFailureError):  # without a graph the host issues each call
        graph = together(comm, lambda: machine.capture(call, _LAUNCH))
        launch = partial(machine.launch, graph)
    each_s = max(comm.allgather(together(comm, lambda: machine.time_calls(launch, 3)).complete))
    launches = math.ceil(_SPAN * _PRODUCTS * alone_us * 1e-6 / each_s)

    def overlap() -> tuple[float, bool]:
        for _ in range(launches):
            launch()
        return time_products(), not machine.stream.done

    beside, spanned = together(comm, overlap)
    machine.finish()
    comm.check(machine.stream)
    everybody = comm.allgather((beside, spanned))
    return max(time for time, _ in everybody), all(spanned for _, spanned in everybody)


def _fastest(comm: Communicator, machine: Machine, contender: Peer, case: Case) -> Call:
    """Return the call of the contender's fastest way."""
    calls = together(comm, lambda: contender.prepare(case, contender.buffers(case)))
    if not contender.capturable:
        raise PeerFailureError("its calls block the caller, so nothing runs beside them")
    times = {
        way: max(comm.allgather(together(comm, lambda: machine.time_calls(call, 5)).complete))  # noqa: B023
        for way, call in calls.items()
    }
    return calls[min(times, key=lambda way: times[way])]


def _product(stream: Any, ordinal: int | str) -> Call:
    """Return a product of bfloat16 by PyTorch on a GPU's ``stream``."""
    import torch

    device = torch.device("cuda", ordinal)
    left, right, out = (torch.randn(_EDGE, _EDGE, device=device).to(torch.bfloat16) for _ in range(3))
    torch.cuda.synchronize(device)
    external = torch.cuda.ExternalStream(stream.ptr, device=device)

    def multiply() -> None:
        with torch.cuda.stream(external):
            torch.matmul(left, right, out=out)

    return multiply
