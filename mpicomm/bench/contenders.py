"""Contenders: mpicomm and its peers. All ranks open a peer together, and drop it together if it fails on one rank.

If calls vary, a contender has a list of variations of a case, and makes the next one in each call.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import cycle, islice
from typing import Any, TypeVar

import numpy as np

from mpicomm.api.communicator import Communicator
from mpicomm.bench.content import Content
from mpicomm.bench.measure import (
    Call,
    CheckedCall,
    Machine,
    Measuring,
    Outcome,
    PeerFailureError,
    Trial,
    UnsupportedError,
    those_that_work,
)
from mpicomm.bench.operations import BARRIER, Case, CaseBuffers
from mpicomm.bench.peers import ORDINARY, OWN, UNCODED, Mpicomm, Peer, PlainMpi
from mpicomm.collectives.wire import Wire

P = TypeVar("P", bound=Peer)
_SEED = 48
_STEP_NBYTES = 512  # PyTorch and CuPy place arrays of GPUs at multiples of it
_PLACES = 64
ROOM_NBYTES = _STEP_NBYTES * _PLACES
"""The bytes that an array for all variations has in addition to the largest case."""
_WITHOUT_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}  # NCCL has a configuration
_CHECKED = 8  # variations in each check, because a call may go wrong only after a call of another size


def draw(largest: int, wanted: int) -> list[tuple[int, int]]:
    """Return ``wanted`` different variations of a call on at most ``largest`` elements, or all that exist.

    A variation is a block and how many bytes into their arrays its buffers begin, as in a program with changing batches
    and an allocator that places arrays anew. Blocks have more than half of ``largest``, so that each call has the
    algorithm and the geometry of the largest. Every rank draws the same variations.
    """
    smallest = largest // 2 + 1
    possible = (largest - smallest + 1) * _PLACES
    drawn = np.random.default_rng([_SEED, largest]).choice(possible, min(wanted, possible), replace=False)
    return [(smallest + number // _PLACES, number % _PLACES * _STEP_NBYTES) for number in drawn.tolist()]


def mean_share(largest: int) -> float:
    """Return the mean block of all variations, divided by ``largest``."""
    return (largest // 2 + 1 + largest) / 2 / largest


def open_own(
    comm: Communicator, machine: Machine, kinds: Sequence[str], algorithm: str, wire: Wire | None, nbytes: int
) -> list[Peer]:
    """Return mpicomm on symmetric arrays, on ordinary arrays, or on both. Elements travel as ``wire``. Collective.

    With ``wire`` the last contender is mpicomm without it, on arrays of the first kind.
    """
    own = [(ORDINARY if kind == "ordinary" and len(kinds) > 1 else OWN, kind, wire) for kind in kinds]
    return [
        Mpicomm(comm, machine, symmetric=kind == "symmetric", algorithm=algorithm, wire=travels).named(name, nbytes)
        for name, kind, travels in [*own, *([] if wire is None else [(UNCODED, kinds[0], None)])]
    ]


def close(contenders: Sequence[Peer]) -> None:
    """Close all contenders, the last one first. Collective."""
    for contender in reversed(contenders):
        contender.first = contender.second = None
        # Keep the results even if closing the peer fails.
        with suppress(Exception) if not contender.own else nullcontext():
            contender.close()


def measure(
    measuring: Measuring, contenders: Iterable[Peer], content: Content, case: Case, checks: int, *, vary: bool = False
) -> tuple[dict[str, Outcome], dict[str, str]]:
    """Measure a case with ``checks`` checked calls, as `Measuring.run`. If calls ``vary``, it is in variations."""
    trials: list[Trial] = []
    silent: dict[str, str] = {}
    for contender in contenders:
        try:
            trials += _trials(measuring, content, contender, case, checks, vary=vary)
        except PeerFailureError as failure:
            silent[contender.name] = str(failure)
    return measuring.run(trials, silent)


def open_peers(
    comm: Communicator, machine: Machine, known: Mapping[str, type[Peer] | str], names: Iterable[str], nbytes: int = 0
) -> tuple[dict[str, Any], dict[str, str]]:
    """Open the libraries of these names, with arrays of ``nbytes``. Collective.

    Return those that all ranks can open, and the reasons of the others. The classes are ``known``, or their modules,
    which then load at this moment. Multicast is off for all.
    """
    os.environ.update(_WITHOUT_MULTICAST)

    def open_one(name: str) -> Peer:
        made = known[name]
        if isinstance(made, str):
            module, _, cls = made.partition(".")
            made = getattr(importlib.import_module(f"mpicomm.bench.{module}"), cls)
        peer: Peer = open_peer(made, comm, machine).named(name, nbytes)
        return peer

    return those_that_work(comm, names, open_one)


def open_peer(made: type[P], comm: Communicator, machine: Machine) -> P:
    """Open another library by its class. Collective. Raises `UnsupportedError` on all ranks."""
    if machine.stream is None and made is not PlainMpi:
        raise UnsupportedError("skipped, because it needs GPUs and these ranks are on the cpu")
    # All ranks check before one of them waits for another rank.
    reason = next((reason for reason in comm.allgather(made.missing()) if reason is not None), None)
    if reason is not None:
        raise UnsupportedError(reason)
    return made(comm, machine)


def _trials(
    measuring: Measuring, content: Content, contender: Peer, case: Case, checks: int, *, vary: bool
) -> list[Trial]:
    """Return a trial for each way of a contender. Raises `PeerFailureError`."""
    scenes = [(case, contender.buffers(case))]
    if vary:
        checks *= _CHECKED
        calls_of_all = checks + measuring.warmups + measuring.iterations * measuring.rounds
        varied = [(replace(case, block=block), shift) for block, shift in draw(case.block, calls_of_all)]
        scenes = [(one, contender.buffers(one, shift)) for one, shift in varied]
    if case.operation is BARRIER:
        checks = 0

    def check(scene: tuple[Case, CaseBuffers], call: Call) -> CheckedCall:
        def write() -> None:
            if vary:  # a call that reads at the last call's addresses must not find the same data
                content.poison(contender.first[: scene[0].nbytes + ROOM_NBYTES])
            content.prepare(*scene)

        exact, error = contender.exact, contender.error
        return CheckedCall(write, call, lambda: content.count_wrong(*scene, exact=exact, error=error))

    prepared = measuring.step(lambda: [contender.prepare(*scene) for scene in scenes], own=contender.own)
    trials = []
    for way in prepared[0]:
        calls = [ways[way] for ways in prepared]
        trial = Trial(contender.name, _in_turn(calls, checks))
        trial.own, trial.way, trial.capturable = contender.own, way, contender.capturable
        trial.checks = [check(*each) for each in islice(cycle(zip(scenes, calls, strict=True)), checks)]
        trial.check_graph = not case.in_place
        if case.operation.reduces:
            # The data is fresh, because sums in place grow with every call, and PyTorch's two-shot changes its input.
            trial.refresh = lambda: content.prepare(case, contender.buffers(case))
        trials.append(trial)
    return trials


def _in_turn(calls: Sequence[Call], start: int) -> Call:
    """Return a call that makes the next call of ``calls`` each time, and begins with number ``start``."""
    if len(calls) == 1:
        return calls[0]
    turns = islice(cycle(calls), start, None)
    return lambda: next(turns)()
