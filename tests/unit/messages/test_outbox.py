"""The slots of messages in the outbox do not overlap, and are all released; headers tell where they lie."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast
from unittest import mock

import numpy as np
import pytest

from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.devices.handle import PACKET_NBYTES, MemoryUse
from mpicomm.devices.host import array_at
from mpicomm.errors import HandleError
from mpicomm.kernels.message import MESSAGE_WORDS
from mpicomm.messages import outbox, rendezvous_header
from mpicomm.messages.in_flight import DONE, MOST_IN_FLIGHT, OutboxSlot
from mpicomm.messages.outbox import MEMORY_DIVISOR, Outbox, OutboxFullError
from mpicomm.messages.rendezvous_header import (
    HEADER_NBYTES,
    KERNEL_NBYTES,
    PREFIX,
    SLOT_KEY_NBYTES,
    RendezvousHeader,
    piece_count,
    pieces,
    put_nbytes,
)
from tests.helpers.fakes.message_devices import ThreadDevice
from tests.helpers.jobs.mpiexec import run_job
from tests.helpers.jobs.pace import stretched

MOST = 24 << 20
SECRET = bytes(32)


@pytest.fixture
def device(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadDevice]:
    monkeypatch.setattr(outbox, "FIRST_BLOCK_NBYTES", 2 << 20)
    double = ThreadDevice(0, 5.0, total_nbytes=MEMORY_DIVISOR * MOST, slowest_s=0)
    yield double
    double.close()


@pytest.fixture
def box(device: ThreadDevice) -> Iterator[Outbox]:
    box = Outbox(cast(GpuBackend, device), SECRET)
    yield box
    box.close()


def header_of(slot: OutboxSlot) -> RendezvousHeader:
    """Return the header that MPI carries."""
    header = RendezvousHeader.unpack(bytes(slot.header[0]), SECRET)
    assert header is not None
    return header


def range_of(box: Outbox, slot: OutboxSlot) -> tuple[int, int]:
    """Return the addresses of the first byte of a message, and after the last byte."""
    header = header_of(slot)
    segment = box.find(header.block)
    assert segment is not None and header.offset + header.capacity <= segment.nbytes
    assert header.nbytes <= header.capacity
    start = segment.pointer + header.offset
    assert start == slot.pointer
    return start, start + header.nbytes


def finish(box: Outbox, slot: OutboxSlot) -> None:
    """Set the `done` words, as the receiver does when it has copied the message."""
    header = header_of(slot)
    words = box.find(header.words)
    assert words is not None
    done = array_at(words.pointer + header.line + DONE, MESSAGE_WORDS, np.dtype(np.uint64))
    done += np.uint64(piece_count(header.nbytes))


class LateDevice(ThreadDevice):
    """A device whose copies are over after the host has asked ``late`` times. They read at their begin or end."""

    late = 0
    reads_first = False
    asked_in_vain = 0

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        content = ctypes.string_at(source, nbytes) if self.reads_first else source
        self._copy = partial(ctypes.memmove, target, content, nbytes)

    def completion(self, stream: int) -> Callable[[], bool]:
        polls = iter((False,) * self.late)

        def is_over() -> bool:
            if next(polls, True):
                return bool(self._copy())
            self.asked_in_vain += 1
            return False

        return is_over


@pytest.mark.parametrize("lengths", [(1, 40_000, 70_000, 1 << 20, 3 << 20, (5 << 20) + 1), (100_000,), (2 << 20, 9)])
@pytest.mark.parametrize("reads_first", [False, True])
@pytest.mark.parametrize("late", [0, 1, 5])
def test_messages_do_not_overlap_and_nothing_is_lost(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], late: int, reads_first: bool
) -> None:
    """Messages in flight, and polls that were begun before a message was read."""
    monkeypatch.setattr(outbox, "FIRST_BLOCK_NBYTES", 2 << 20)
    device, rng = LateDevice(0, 5.0, total_nbytes=MEMORY_DIVISOR * MOST, slowest_s=0), random.Random(late)
    device.late, device.reads_first = late, reads_first
    box = Outbox(cast(GpuBackend, device), SECRET)
    in_flight: list[OutboxSlot] = []
    for number in range(400):
        nbytes = rng.choice(lengths)
        try:
            slot = box.reserve(nbytes)
        except OutboxFullError:
            assert sum(each.nbytes for each in in_flight) + nbytes > MOST // 3, "there should have been room"
            finish(box, in_flight.pop(rng.randrange(len(in_flight))))
            continue
        start, stop = range_of(box, slot)
        assert stop - start == nbytes
        taken = sorted(range_of(box, each) for each in (*in_flight, slot))
        ends = [0, *(stop for _, stop in taken)]
        assert all(end <= start for end, (start, _) in zip(ends, taken, strict=False)), number
        in_flight.append(slot)
        while in_flight and rng.random() < 0.5:
            finish(box, in_flight.pop(rng.randrange(len(in_flight))))
        if rng.random() < 0.1:
            assert box.is_drained() == (not in_flight)
    for each in in_flight:
        finish(box, each)
    assert box.is_drained()
    box.reserve(MOST // 4)  # each block is one range again
    assert device.allocated <= MOST + (1 << 20)
    box.close()
    device.close()


@pytest.mark.parametrize("shorter", [40_000, 1 << 20])
def test_messages_seldom_wait_for_polls_after_many_shorter_messages(no_leaks: None, shorter: int) -> None:
    """Shorter messages fill all of the outbox but the room for one message of another length."""
    device = LateDevice(0, 5.0, total_nbytes=MEMORY_DIVISOR * 512 << 20, slowest_s=0)
    box = Outbox(cast(GpuBackend, device), SECRET)
    count = (outbox.FIRST_BLOCK_NBYTES - (4 << 20)) // max(shorter, 64 << 10)
    for header in [box.reserve(shorter) for _ in range(count)]:
        finish(box, header)
    device.late = 1
    for _ in range(100):
        finish(box, box.reserve(4 << 20))
    assert device.asked_in_vain < 30
    assert box.memory_use().device_nbytes - 2 * DONE == outbox.FIRST_BLOCK_NBYTES
    box.close()
    device.close()


@pytest.mark.parametrize("late", [0, 1, 5])
def test_a_loop_of_many_lengths_takes_no_more_than_the_messages_in_flight(no_leaks: None, late: int) -> None:
    """The receivers copy each message when ``late`` more are sent. Two rounds of messages are of one length."""
    double = ThreadDevice(0, 5.0, total_nbytes=MEMORY_DIVISOR * 512 << 20, slowest_s=0)
    box = Outbox(cast(GpuBackend, double), SECRET)
    lengths = [4, 16_384, 12_000_000, 68, 2_800_000, 6_000_004, 256, 12_000_000]
    in_flight: list[OutboxSlot] = []
    most_nbytes = 0
    for number in range(400):
        in_flight.append(box.reserve(lengths[number // 2 % len(lengths)]))
        most_nbytes = max(most_nbytes, sum(slot.capacity for slot in in_flight))
        while len(in_flight) > late:
            finish(box, in_flight.pop(0))
    assert box.memory_use().device_nbytes - 2 * DONE <= max(outbox.FIRST_BLOCK_NBYTES, 2 * most_nbytes)
    for slot in in_flight:
        finish(box, slot)
    assert box.is_drained()
    box.close()
    double.close()


def test_there_are_only_so_many_messages_in_flight(no_leaks: None) -> None:
    device = ThreadDevice(0, 5.0, total_nbytes=MEMORY_DIVISOR * MOST_IN_FLIGHT * (128 << 10), slowest_s=0)
    box = Outbox(cast(GpuBackend, device), SECRET)
    in_flight = [box.reserve(40_000) for _ in range(MOST_IN_FLIGHT)]
    with pytest.raises(OutboxFullError, match=f"{MOST_IN_FLIGHT} messages are in flight"):
        box.reserve(40_000)
    finish(box, in_flight[3])
    assert box.reserve(40_000).line == in_flight[3].line
    box.close()
    device.close()


def test_an_outbox_stays_below_its_bound(no_leaks: None, device: ThreadDevice) -> None:
    box = Outbox(cast(GpuBackend, device), SECRET, 8 << 20)
    kept = [box.reserve(2 << 20) for _ in range(3)]
    taken = range_of(box, kept[1])
    assert box.memory_use() == MemoryUse("outbox", device_nbytes=device.allocated)
    assert device.allocated <= 8 << 20
    with pytest.raises(OutboxFullError, match=f"MPICOMM_MEMORY leaves {8 << 20} bytes for the outbox: raise it"):
        box.reserve(2 << 20)
    finish(box, kept[1])
    assert range_of(box, box.reserve(2 << 20)) == taken and not box.is_drained()
    box.close()
    assert box.memory_use().device_nbytes == 0


def test_blocks_are_few_and_quick_to_open(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "FIRST_BLOCK_NBYTES", 2 << 20)
    monkeypatch.setattr(outbox, "LARGEST_BLOCK_NBYTES", 8 << 20)
    double = ThreadDevice(0, 5.0, total_nbytes=MEMORY_DIVISOR * 64 << 20, slowest_s=0)
    box, blocks = Outbox(cast(GpuBackend, double), SECRET), [2 * DONE]
    for nbytes in (*[1 << 20] * 30, 12 << 20):
        box.reserve(nbytes)
        if (grown := box.memory_use().device_nbytes - sum(blocks)) > 0:
            blocks.append(grown)
    assert [block >> 20 for block in blocks[1:]] == [2, 2, 4, 8, 8, 8, 12]
    box.close()
    double.close()


@pytest.mark.parametrize("most_nbytes", [0, 1 << 20, 3 << 20])
def test_an_outbox_without_room_for_a_block_takes_no_memory(device: ThreadDevice, most_nbytes: int) -> None:
    box = Outbox(cast(GpuBackend, device), SECRET, most_nbytes)
    with pytest.raises(OutboxFullError, match=f"MPICOMM_MEMORY leaves {most_nbytes} bytes"):
        box.reserve(40_000)
    assert device.allocated == 0


def test_a_set_up_that_fails_is_made_again(device: ThreadDevice, box: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(device, "zero", mock.Mock(side_effect=HandleError("no memory is left")))
        with pytest.raises(HandleError):
            box.reserve(40_000)
    words = box.find(header_of(box.reserve(40_000)).words)
    assert words is not None and not array_at(words.pointer, 2 * DONE, np.dtype(np.uint8)).any()


OWN_SECRET = os.urandom(32)
PACKET = os.urandom(PACKET_NBYTES)
LONG = 2 * KERNEL_NBYTES
HEADER = RendezvousHeader(LONG, PACKET, 32, PACKET[::-1], 2**33, LONG + 20)


def test_a_header_comes_back_and_data_is_none() -> None:
    message = HEADER.pack(OWN_SECRET)
    assert len(message) == HEADER_NBYTES
    assert RendezvousHeader.unpack(message, OWN_SECRET) == HEADER
    others = (b"", message[:-1], message + b"\0", os.urandom(HEADER_NBYTES), bytes([message[0] ^ 1]) + message[1:])
    assert {RendezvousHeader.unpack(data, OWN_SECRET) for data in others} == {None}
    assert RendezvousHeader.unpack(message, os.urandom(32)) is None
    longer = replace(HEADER, nbytes=LONG + 21)  # than its slot
    with pytest.raises(HandleError, match="header of a message"):
        RendezvousHeader.unpack(longer.pack(OWN_SECRET), OWN_SECRET)


@pytest.mark.parametrize("nbytes", [1, 1 << 15, (8 << 20) + 1, 100 << 20, 10 << 30])
def test_pieces_are_few_and_make_up_the_message(nbytes: int) -> None:
    found = list(pieces(1 << 40, nbytes))
    assert len(found) <= rendezvous_header.MOST_PIECES and piece_count(nbytes) == len(found)
    ends = [start + piece for start, piece in found]
    assert [start for start, _ in found] == [1 << 40, *ends[:-1]]
    assert sum(piece for _, piece in found) == nbytes


def test_the_begin_of_a_header_tells_its_slot() -> None:
    message = HEADER.pack(OWN_SECRET)
    key, nbytes = PREFIX.unpack_from(message)
    put_nbytes(message, SLOT_KEY_NBYTES, KERNEL_NBYTES + 1)
    assert RendezvousHeader.unpack(bytes(message), OWN_SECRET) == replace(HEADER, nbytes=KERNEL_NBYTES + 1)
    assert (nbytes, PREFIX.unpack_from(message)) == (HEADER.nbytes, (key, KERNEL_NBYTES + 1))
    other = replace(HEADER, slot_id=RendezvousHeader(1, PACKET, 32, PACKET, 0, 1).slot_id)
    assert PREFIX.unpack_from(other.pack(OWN_SECRET))[0] != key != PREFIX.unpack_from(HEADER.pack(os.urandom(32)))[0]


PRELUDE = """
import atexit, os, sys, time
import numpy as np
from mpi4py import MPI

def at_the_end(*_):
    # It is registered before mpicomm registers its own call, in which rank 0 waits for rank 1. So it runs after that.
    print("received" if os.path.exists(RECEIVING) else "not received yet", flush=True)

if MPI.COMM_WORLD.rank == 0:
    if FINALIZE:
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=at_the_end), None)
    else:
        atexit.register(at_the_end)
import mpicomm
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.rigs.message_rigs import take_for_gpu
child = mpicomm.Communicator(MPI.COMM_WORLD, device="cpu", timeout_s=TIMEOUT_S).Dup()
device = take_for_gpu(child)
sent = DeviceArray(device, np.arange(100_000))
"""


@pytest.mark.parametrize("finalize", [False, True])
def test_what_was_sent_arrives(tmp_path: Path, finalize: bool) -> None:
    code = """
if child.rank == 0:
    child.Send(sent, 1)
else:
    time.sleep(0.5)
    open(RECEIVING, "w").close()
    received = np.zeros(100_000, int)
    child.Recv(received, 0)
    assert (received == np.arange(100_000)).all()
if FINALIZE:
    MPI.Finalize()
"""
    result = run_job(2, "-c", settings(tmp_path, finalize=finalize) + PRELUDE + code)
    assert (result.returncode, result.stderr, result.stdout) == (0, "", "received\n")


def settings(tmp_path: Path, *, finalize: bool) -> str:
    return f"FINALIZE, RECEIVING, TIMEOUT_S = {finalize}, {str(tmp_path / 'receiving')!r}, {stretched(1.5)}"


def test_what_no_rank_receives_does_not_keep_a_program(tmp_path: Path) -> None:
    code = "child.Isend(sent, child.rank) if child.rank == 0 else None; time.sleep(0.1)"
    result = run_job(2, "-c", settings(tmp_path, finalize=False) + PRELUDE + code)
    assert f"messages of GPU arrays were not received within {stretched(1.5):g} s" in result.stderr
