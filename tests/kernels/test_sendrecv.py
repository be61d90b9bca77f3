"""Messages in the order of streams: random messages, races, ranks that depend on each other, mistakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from mpicomm.collectives.exchange import Message
from mpicomm.collectives.gpu.algorithms.chunks.plan import CHANNEL_NBYTES
from mpicomm.collectives.gpu.algorithms.sendrecv.plan import (
    SENDRECV_CHUNK_NBYTES,
    SENDRECV_CHUNK_SLOTS,
    SENDRECV_PART_NBYTES,
    SENDRECV_SLOTS,
)
from tests.kernels.build import Builds
from tests.kernels.kernel_calls import sizes_around
from tests.kernels.machine import Array, Machine, Place, RunFailedError, controls, without_mistake
from tests.kernels.mistakes import Change, Changes
from tests.kernels.rig import SendrecvRig

CHANNELS = 2
SHORT_NBYTES = CHANNELS * SENDRECV_PART_NBYTES  # goes in packets
FITS_NBYTES = CHANNELS * SENDRECV_CHUNK_NBYTES  # fits into the slots while the message before is not credited
LIMITS = (16, SENDRECV_PART_NBYTES, SHORT_NBYTES, CHANNELS * CHANNEL_NBYTES, FITS_NBYTES, 2 * FITS_NBYTES)


LONG_NBYTES = SENDRECV_PART_NBYTES + 1
MISMATCHES = {
    "length": (100, 99, 7),
    "tag": (100, 100, 8),
    "tag of a long message": (LONG_NBYTES, LONG_NBYTES, 8),
    "long for short": (LONG_NBYTES, 100, 7),
    "short for long": (100, LONG_NBYTES, 7),
}


def content_of(rng: np.random.Generator, nbytes: int) -> Array:
    return rng.integers(0, 256, nbytes, np.uint8)


def random_round(
    rig: SendrecvRig, rng: np.random.Generator, sizes: list[int], blocks: Sequence[int]
) -> Callable[[], None]:
    """Enqueue messages between random ranks; return a check. Each rank sends one at most, perhaps to itself.

    ``blocks`` are the sizes of blocks to choose from, 0 being the package's.
    """
    sent: dict[int, Message] = {}
    received: dict[int, Message] = {}
    arrived: list[tuple[Place, Array]] = []
    for source, target in enumerate(rng.permutation(rig.size).tolist()):
        if rng.random() < 0.2:
            continue
        tag, content = int(rng.integers(5)), content_of(rng, int(rng.choice(sizes)))
        out = rig.machine.place(source, content, offset=int(rng.integers(4)) * 4)
        arrived.append((rig.machine.allocate(target, content.size, offset=int(rng.integers(20))), content))
        sent[source] = rig.message(target, out, tag)
        received[target] = rig.message(source, arrived[-1][0], None if rng.integers(2) else tag)
    # A message that fits into the slots may be sent before its receiver comes. Then no rank must send and receive at
    # once.
    apart = all(message.span.count <= FITS_NBYTES for message in sent.values()) and bool(rng.integers(2))
    for rank in range(rig.size):
        threads, nap_us = int(rng.choice(blocks)) or None, int(rng.choice((0, 0, 800)))
        mine, theirs = sent.get(rank), received.get(rank)
        rig.exchange(rank, mine, None if apart else theirs, threads=threads, nap_us=nap_us)
        if apart:
            rig.exchange(rank, None, theirs, threads=threads)

    def check() -> None:
        for place, content in arrived:
            differ = np.flatnonzero(place.bytes != content)
            assert not differ.size, f"{differ.size} of {content.size} bytes differ, first at {differ[0]}"

    return check


def play(
    builds: Builds,
    rounds: int,
    size: int = 3,
    *,
    limits: Sequence[int] = LIMITS,
    start: int = 2**32 - 3,
    seed: int = 0,
    changes: Changes = (),
    few_threads: bool = False,
    limit_s: float = 60,
) -> None:
    rng = np.random.default_rng([size, seed])
    # Each thread more takes ThreadSanitizer a while, and so does each that polls until time is up.
    blocks = (64,) if builds.sanitize else (32,) if few_threads else (0, 64, 512)
    rig = SendrecvRig(Machine(builds, size), CHANNELS, changes=changes)
    rig.begin_after(start, rng)
    checks = [random_round(rig, rng, sizes_around(*limits), blocks) for _ in range(rounds)]
    rig.machine.run(checks, seed=seed, jitter_us=200, limit_s=limit_s)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_random_messages_past_the_end_of_32_bits(builds: Builds, size: int) -> None:
    for seed in range(3):
        play(builds, 12, size, seed=seed)


def play_short(builds: Builds, size: int = 2, **options: Any) -> None:
    """Many messages in packets, and some in chunks. They begin shortly before the end of 30 bits."""
    play(builds, 60, size, limits=(16, SENDRECV_PART_NBYTES, SHORT_NBYTES), start=2**30 - 6, **options)


@pytest.mark.parametrize("size", [2, 3])
def test_short_messages_past_the_end_of_30_bits(builds: Builds, size: int) -> None:
    for seed in range(3):
        play_short(builds, size, seed=seed)


def test_a_send_does_not_wait_for_a_receive(builds: Builds) -> None:
    """Rank 0 sends much to 1 and receives at the same time from 2, which sends once 1 has got all of it."""
    rng = np.random.default_rng(2)
    rig = SendrecvRig(Machine(builds, 3), 1)
    content = content_of(rng, 3 * SENDRECV_CHUNK_SLOTS * SENDRECV_CHUNK_NBYTES)
    places = [rig.machine.place(0, content), *(rig.machine.allocate(rank, content.size) for rank in (1, 2))]
    back = rig.machine.allocate(0, content.size)
    rig.exchange(0, rig.message(1, places[0]), rig.message(2, back))
    for rank, following in pairwise((1, 2, 0)):
        rig.exchange(rank, None, rig.message(rank - 1, places[rank]))
        rig.exchange(rank, rig.message(following, places[rank]))
    rig.machine.run(limit_s=30)
    assert (back.bytes == content).all()


@pytest.mark.parametrize(("sent_nbytes", "nbytes", "tag"), MISMATCHES.values(), ids=MISMATCHES)
def test_ranks_that_disagree_on_a_message_notice(builds: Builds, sent_nbytes: int, nbytes: int, tag: int) -> None:
    rig = SendrecvRig(Machine(builds, 2), 1)
    rig.exchange(0, rig.message(1, rig.machine.allocate(0, sent_nbytes), 7))
    target = rig.machine.allocate(1, nbytes)
    rig.exchange(1, None, rig.message(0, target, tag))
    with pytest.raises(RunFailedError, match=r"fault on rank 1: state=2, operation=3, sequence=1, block=0, peer=10"):
        rig.machine.run(limit_s=10)


def send_ahead(builds: Builds, lengths: Sequence[int], *, seed: int = 0, changes: Changes = ()) -> None:
    """Rank 0 sends to rank 1, which is late at times. Rank 0 is late with long messages."""
    rng = np.random.default_rng(seed)
    rig = SendrecvRig(Machine(builds, 2), 1, changes=changes)
    arrived = []
    for number, nbytes in enumerate(lengths):
        arrived.append((rig.machine.allocate(1, nbytes), content_of(rng, nbytes)))
        sent = rig.message(1, rig.machine.place(0, arrived[-1][1]))
        rig.exchange(0, sent, nap_us=3000 * (nbytes >= LONG_NBYTES), threads=64)
        rig.exchange(1, None, rig.message(0, arrived[-1][0]), nap_us=3000 * (number % 16 == 8), threads=64)
    rig.machine.run(seed=seed, jitter_us=100, limit_s=30)
    differing = [number for number, (place, content) in enumerate(arrived) if (place.bytes != content).any()]
    assert not differing, f"{len(differing)} messages differ, first at {differing[0]}"


AHEAD = [100] * 40
BOTH_KINDS = [LONG_NBYTES, 100] * 6


@pytest.mark.parametrize("lengths", [AHEAD, BOTH_KINDS], ids=["short", "both kinds"])
def test_a_sender_is_ahead_of_its_receiver(builds: Builds, watched_builds: Builds, lengths: list[int]) -> None:
    send_ahead(builds, lengths)
    send_ahead(watched_builds, lengths)


@pytest.mark.parametrize("nbytes", [100, SENDRECV_PART_NBYTES])
def test_short_messages_that_are_sent_before_their_receive(builds: Builds, nbytes: int) -> None:
    """Rank 0 sends to 1, which receives only after it has learnt from 2 that rank 0 has sent all that fits."""
    rng = np.random.default_rng(3)
    rig = SendrecvRig(Machine(builds, 3), 1)
    arrived = []
    for _ in range(2):  # so that slots are used again
        contents = [content_of(rng, nbytes) for _ in range(SENDRECV_SLOTS - 1)]
        for content in contents:
            rig.exchange(0, rig.message(1, rig.machine.place(0, content)))
        for rank, following in pairwise((0, 2, 1)):
            rig.exchange(rank, rig.message(following, rig.machine.allocate(rank, 1)))
            rig.exchange(following, None, rig.message(rank, rig.machine.allocate(following, 1)))
        for content in contents:
            arrived.append((rig.machine.allocate(1, nbytes), content))
            rig.exchange(1, None, rig.message(0, arrived[-1][0]))
    rig.machine.run(limit_s=30)
    assert all((place.bytes == content).all() for place, content in arrived)


def test_rank_that_is_missing_is_named(builds: Builds) -> None:
    rig = SendrecvRig(Machine(builds, 3), 1, timeout_s=0.2)
    rig.exchange(1, None, rig.message(2, rig.machine.allocate(1, 5)))
    with pytest.raises(RunFailedError, match=r"fault on rank 1: state=2, operation=4, sequence=1, block=0, peer=12"):
        rig.machine.run(limit_s=10)


_FLAG = "store_release(sends ? flag(epoch)"
_BARRIER = """      __syncthreads();
      // A flag:"""
_ADMITTED = """    if (!__syncthreads_and(ok)) return;
    if (thread == 0) {"""
MISTAKES = {
    "release turned relaxed": Change("sendrecv.cu", _FLAG, "store_relaxed(sends ? flag(epoch)"),
    "acquire turned relaxed": Change("channel_words.cuh", "value = load_acquire(word)", "value = load_relaxed(word)"),
    "flag before the block has written": Change("sendrecv.cu", _BARRIER, _BARRIER.replace("__syncthreads();", "")),
    "slot read before the flag": Change(
        "sendrecv.cu", "      if (!__syncthreads_and(ok)) return;", "      if (!ok) return;"
    ),
    "credit for one chunk too many": Change(
        "sendrecv.cu", "epoch - kSendrecvChunkSlots)", "epoch - kSendrecvChunkSlots - 1)"
    ),
    "stride of the message": Change(
        "sendrecv.cu",
        "line(sender, channel) * kChannelNbytes",
        "line(sender, channel) * (owner == team.rank ? received : sent).stride",
    ),
    "count of packets read after it is written": Change(
        "sendrecv.cu", _ADMITTED, "    if (!ok) return;\n    if (thread == 0) {"
    ),
}
WRONG = {
    "count not advanced": Change("sendrecv.cu", "if (thread == 0) *count = last + chunks;", ""),
    "mask forgotten": Change("channel_words.cuh", "& mask) == 0", ") == 0"),
}
WRONG_IN_PACKETS = {
    "count of sent packets not advanced": Change("sendrecv.cu", "*count = epoch;\n    }", "}"),
    "count of taken packets not advanced": Change("sendrecv.cu", "if (thread == 0) *count = epoch;", ""),
    "packets taken too early": Change("sendrecv.cu", "all &= Protocol::has_arrived", "Protocol::has_arrived"),
    "no credit for packets": Change("sendrecv.cu", "word_of(last, 0));", "word_of(last - 4, 0));"),
    "one slot for packets": Change("sendrecv.cu", "+ epoch % kSendrecvSlots * kPacketsOfSlot", ""),
    "slots not wiped": Change("sendrecv.cu", "\n    wipe(epoch);", ""),
    "flag of packets not sent": Change("sendrecv.cu", "store_relaxed(flag(epoch), word_of(epoch, side.tag));", ""),
}


test_race_is_seen = controls(partial(play, rounds=3), MISTAKES, watched=True)
test_failure_is_seen = controls(partial(play, rounds=6), WRONG)


def test_no_race(watched_builds: Builds) -> None:
    play(watched_builds, 3, changes=without_mistake(MISTAKES))


# Without a mistake all takes a third of a second. With one, many messages wait until their time is up.
test_failure_in_packets_is_seen = controls(partial(play_short, few_threads=True, limit_s=2), WRONG_IN_PACKETS)
# With few threads many seeds do not show it.
NOT_WIPED = {"slots not wiped by chunks": Change("sendrecv.cu", "if (!sends) wipe(epoch);", "")}
test_slots_that_chunks_leave_are_seen = controls(play_short, NOT_WIPED)


WITHOUT_CREDIT = {
    "credit for packets not awaited": (AHEAD, Change("sendrecv.cu", "(epoch - kSendrecvSlots)", "(epoch - 8)")),
    "credit for packets that have not come": (
        AHEAD,
        Change("sendrecv.cu", "word_of(last, 0));", "word_of(last + 4, 0));"),
    ),
}
test_missing_credit_is_seen = controls(send_ahead, WITHOUT_CREDIT)


def test_packets_taken_without_a_look_at_the_flag_are_seen(builds: Builds) -> None:
    change = Change("sendrecv.cu", "if (ok && thread == 0 && differs())", "if (false)")
    rig = SendrecvRig(Machine(builds, 2), 1, changes=[change])
    rig.exchange(0, rig.message(1, rig.machine.allocate(0, 100), 7))
    rig.exchange(1, None, rig.message(0, rig.machine.allocate(1, 100), 8))
    rig.machine.run(limit_s=10)  # which raises without the change
