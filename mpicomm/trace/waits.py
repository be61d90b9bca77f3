"""The waits of ranks in a collective call for the last rank that came to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mpicomm.recording.event_names import DEVICE
from mpicomm.trace.alignment import Clock
from mpicomm.trace.files import Event

_LEAST_US = 1.0
"""Shorter waits do not count, because ranks never come to a call at exactly the same time."""


@dataclass(frozen=True)
class Wait:
    """The time that ``rank`` waited in a collective call for ``late``, the last rank to come to it."""

    operation: str
    rank: int
    late: int
    waited_us: float
    event: Event
    """The part of the call in which the waiting rank waited longest."""
    late_event: Event
    """The part of the call with which the last rank came."""


@dataclass(frozen=True)
class Sum:
    """All waits of one rank for another rank."""

    rank: int
    late: int
    calls: int
    total_us: float
    longest: Wait


def find_waits(events: Iterable[Event], clocks: Mapping[int, Clock]) -> Iterator[Wait]:
    """Yield the waits in events of all ranks, with times of the common clock.

    A call has several events on a rank: the call, the waits for its request, and its work on a device. A rank comes to
    the call when the first of these events begins. It waits while one of them goes on before the last rank comes. If
    the work of all ranks was measured on devices, the events on the host do not count, because the host only enqueued
    the work. The waits leave out times below the uncertainty of the clocks.
    """
    for parts in _calls(events).values():
        if len(parts) < 2:
            continue
        arrivals = {rank: min(events, key=_begin) for rank, events in parts.items()}
        late = max(arrivals, key=lambda rank: (_begin(arrivals[rank]), rank))
        last_us = _begin(arrivals[late])
        for rank, events_of_rank in parts.items():
            waits = [(max(0.0, min(_end(event), last_us) - _begin(event)), event) for event in events_of_rank]
            waited_us = sum(us for us, _ in waits)
            uncertain_us = (clocks[rank].uncertainty_ns + clocks[late].uncertainty_ns) / 1000
            if rank != late and waited_us > max(_LEAST_US, uncertain_us):
                _, longest = max(waits, key=lambda wait: wait[0])
                operation = arrivals[rank]["name"]
                yield Wait(operation, rank, late, waited_us, longest, arrivals[late])


def sums(waits: Iterable[Wait]) -> list[Sum]:
    """Return the waits by pairs of ranks, the longest total first."""
    pairs: dict[tuple[int, int], list[Wait]] = defaultdict(list)
    for wait in waits:
        pairs[wait.rank, wait.late].append(wait)
    found = [
        Sum(rank, late, len(each), sum(wait.waited_us for wait in each), max(each, key=lambda wait: wait.waited_us))
        for (rank, late), each in pairs.items()
    ]
    return sorted(found, key=lambda pair: -pair.total_us)


def flows(waits: Sequence[Wait]) -> Iterator[Event]:
    """Yield the events that draw an arrow from the call of the last rank to each call that waited for it."""
    for number, wait in enumerate(waits):
        arrow = {"name": f"waited for rank {wait.late}", "cat": "waits", "id": number}
        begin = _begin(wait.late_event)
        yield {**arrow, "ph": "s", "ts": begin, "pid": wait.late, "tid": wait.late_event["tid"]}
        end = min(max(begin, _begin(wait.event)), _end(wait.event))
        yield {**arrow, "ph": "f", "bp": "e", "ts": end, "pid": wait.rank, "tid": wait.event["tid"]}


def _calls(events: Iterable[Event]) -> dict[tuple[str, str], dict[int, list[Event]]]:
    """Return the events of each collective call by rank."""
    calls: dict[tuple[str, str], dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        facts = event.get("args", {})
        if event["ph"] == "X" and "number" in facts:
            calls[facts["comm"], facts["number"]][event["pid"]].append(event)
    for parts in calls.values():
        on_device = {rank: [each for each in events if each["cat"] == DEVICE] for rank, events in parts.items()}
        if all(on_device.values()):
            parts.update(on_device)
    return calls


def _begin(event: Event) -> float:
    return float(event["ts"])


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])
