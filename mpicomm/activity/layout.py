"""The layout of the memory in which a process describes its calls: signed words of 64 bits, and texts of UTF-8.

The memory holds a header, a row for each communicator and each window, and the texts of calls. The texts are a ring.
The position of a text counts all bytes that the process has written before it. The text lies there, modulo the length
of the ring.
"""

from __future__ import annotations

MEMORY_NAME = "mpicomm-activity"
"""The name of the memory, as the links in /proc/PID/fd show it."""
MAGIC = 0x34796C706D6F6368
"""The first word. Its last byte changes with the layout."""

HEADER_NBYTES = 4096
ROW_NBYTES = 512
ROWS = 1024
TEXTS_NBYTES = 256 << 10
ROWS_AT = HEADER_NBYTES
TEXTS_AT = ROWS_AT + ROWS * ROW_NBYTES
NBYTES = TEXTS_AT + TEXTS_NBYTES

# Words of the header.
PID = 1
WORLD_RANK = 2
WORLD_SIZE = 3
TEXTS_END = 4  # the position after the last text
STEP = 5  # the position of the text of `step_text` plus 1; 0 outside of a step
STEP_SINCE = 6  # when the step began, in nanoseconds of the monotonic clock

# Words of a row.
KEY = 0  # names the communicator, the same in all its processes; 0 if the row is free
RANK = 1
SIZE = 2
CALLS_BY_MPI = 3  # how many collective calls this rank has begun that MPI carries out
CALL = 4  # the last collective call: the position of its text plus 1, or `by_mpi` of its name
SINCE = 5  # when the last call that has a text began, in nanoseconds of the monotonic clock
RECEIVES = 6  # how many blocking receives and probes this rank has begun
SOURCE = 7  # the source of the receive that is in progress, or `NOBODY`
TAG = 8
SENDS = 9  # how many blocking sends this rank has begun
DEST = 10  # the destination of the send that is in progress, or `NOBODY`
SEND_TAG = 11
ON_GPU = 12  # whether the communicator has GPUs, so that calls with a text may have enqueued their work
COUNT = 13  # the number that replaces `COUNT_IN_TEXT` in the text of the last call
NUMBER = 14  # tells this communicator from other communicators of the same processes, which have the same name
POSTS = 15  # how many other collective calls this rank has begun: kernels or mapped memory carry these out
POST = 16  # the last of these calls: the position of its text plus 1
OFFSET = 17  # the number that replaces `OFFSET_IN_TEXT` in its text
IS_WINDOW = 18  # 1 in the row of a window, whose collective calls are its fences
WORDS = 19
# Texts of a row, in bytes.
NAME = slice(8 * WORDS, 272)
NODE_RANKS = slice(272, ROW_NBYTES)
# The row of a window has counts in the place of the ranks of the node, because all ranks of a window are on one node.
# Each is a list of bytes, one for each rank of the window. The counts wrap around.
MOST_RANKS = 56
POSTED = slice(NODE_RANKS.start, NODE_RANKS.start + MOST_RANKS)
"""How often this rank has named a rank in Post."""
COMPLETED = slice(POSTED.stop, POSTED.stop + MOST_RANKS)
"""How often this rank has named a rank in Complete."""

COUNT_IN_TEXT = "\x1a"
"""Stands for a count in the text of a call, so that calls that differ only in a count share a text. No text of a user
has this character."""
OFFSET_IN_TEXT = "\x1c"
"""Stands for the place of the output in a symmetric array, as `COUNT_IN_TEXT` stands for a count."""

NOBODY = -(1 << 40)
"""It is no rank, and no constant of any MPI that stands for a rank."""

BY_MPI = (
    "",
    *("Allgather", "Allgatherv", "Allreduce", "Alltoall", "Alltoallv", "Alltoallw", "Barrier", "Bcast", "Exscan"),
    *("Gather", "Gatherv", "Reduce", "Reduce_scatter", "Reduce_scatter_block", "Scan", "Scatter", "Scatterv"),
    *("Neighbor_allgather", "Neighbor_allgatherv", "Neighbor_alltoall", "Neighbor_alltoallv", "Neighbor_alltoallw"),
    *("allgather", "allreduce", "alltoall", "bcast", "exscan", "gather", "reduce", "scan", "scatter"),
    *("Clone", "Create", "Create_cart", "Create_dist_graph", "Create_dist_graph_adjacent", "Create_graph"),
    *("Dup", "Dup_with_info", "Split", "Split_type", "Sub"),
)
"""The names of collective calls that MPI carries out. They have numbers, because writing a text would take too long.

A program and the doctor have the same table, because `MAGIC` tells versions of mpicomm apart.
"""
_NUMBERS = {name: number for number, name in enumerate(BY_MPI)}


def step_text(text: str, ranks: str) -> str:
    """Return a step and the ranks of MPI.COMM_WORLD that make it, as one text, so that one word publishes both."""
    return f"{ranks} {text}"


def filled(text: str, count: int, offset: int) -> str:
    """Return a text of a call with its numbers."""
    return text.replace(COUNT_IN_TEXT, str(count)).replace(OFFSET_IN_TEXT, str(offset))


def by_mpi(name: str) -> int:
    """Return the value of `CALL` for a collective call that MPI carries out."""
    return -_NUMBERS[name]
