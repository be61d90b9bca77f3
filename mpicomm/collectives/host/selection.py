"""The choice between MPI and mapped memory for collectives on host arrays, and the exchanges on mapped memory.

The sizes are measured. `scripts/measuring/measure_host_collectives.py` compares mapped memory with MPICH 5, which
copies from process to process, for 2 and 4 ranks on 2 cores. Reductions gain most, because MPI spends most of their
time between its copies. Collectives that only move data gain little, because memory also bounds them in MPI. They may
lose much, because slots pass from cache to cache, which takes four times as long between cores that share no cache.

The *fast path of MPI* is for collectives on NumPy arrays that certainly go to MPI, in every form of a buffer argument:
small reductions, collectives that only move data, and all collectives between nodes. `mpi_fast_path` recognises them in
a fraction of a microsecond, because MPI takes about a microsecond for 8 bytes. `Call` would take longer to read the
arguments than MPI takes for the call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import add
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy import may_share_memory, ndarray

from mpicomm.collectives.call import Call
from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.host.engine import HostEngine
from mpicomm.collectives.operations import OPERATIONS, Operation
from mpicomm.devices.memory_location import has_driver
from mpicomm.kernels.reductions import is_custom
from mpicomm.mpi import types
from mpicomm.mpi.buffers import is_host_view
from mpicomm.mpi.spec import Shape, parts_of
from mpicomm.mpi.types import numpy_dtype

_KIB = 1024
_MIB = 1024 * _KIB
NEVER = 1 << 63
"""More bytes than a call has."""

_MAPPED_THRESHOLDS = {
    "Allreduce": (_MIB, _MIB),
    "Reduce": (128 * _KIB, 128 * _KIB),
    "Reduce_scatter": (4 * _MIB, 16 * _MIB),
    "Reduce_scatter_block": (4 * _MIB, 16 * _MIB),
    "Scan": (256 * _KIB, 256 * _KIB),
    "Exscan": (128 * _KIB, 256 * _KIB),
}
"""The fewest bytes for mapped memory, with 2 ranks and with more ranks. MPI carries out operations that only move data
at any size. One rank may pass a derived datatype, which only MPI knows, while another rank passes plain elements. Also,
MPI copies once in Allgather, Alltoall and Bcast, but mapped memory copies twice."""

_TWO_SHOT_THRESHOLDS = {"Allreduce": _MIB}
_SHARD_NBYTES = _MIB

MPI_TYPES = frozenset(np.dtype(code) for code in "?bBhHiIlLqQfdFD")
"""Element types that MPI reduces and moves as mpicomm documents it."""

FastPathCheck = Callable[..., bool]
"""Returns whether a call with these buffers, this operation if it reduces, and this root if it has one, certainly goes
to MPI. Local."""

_Op = MPI.Op  # the class of MPI's operations; MPI cannot carry out `AVG` and `Op`, which have other classes
_Datatype = MPI.Datatype
_LISTS = frozenset((list, tuple))
_in_place = MPI.IN_PLACE
_no_type = MPI.DATATYPE_NULL
# By the identity of mpi4py's objects, because programs nearly always pass these, and this look-up is the shortest.
_predefined: dict[int, np.dtype[Any]] = {}


def mapped_threshold(operation: Operation, size: int, nodes: int) -> int:
    """Return the fewest bytes with which a collective goes through mapped memory; `NEVER` if it does not. Local.

    Ranks of several nodes cannot map each other's memory.
    """
    if nodes > 1 or size == 1:
        return NEVER
    few, many = _MAPPED_THRESHOLDS.get(operation.name, (NEVER, NEVER))
    return many if size > 2 else few


def goes_to_mpi(call: Call, size: int, nodes: int, *, blocking: bool, ordered: bool = False) -> bool:
    """Return whether MPI carries out a call on host arrays; local, with the same answer on all ranks.

    A nonblocking or persistent call becomes a request of MPI. With ``ordered`` MPI carries out no reduction that
    mpicomm has.
    """
    operation, dtype, op = call.operation, call.dtype, call.op
    if dtype is None or call.algorithm == "mpi":
        return True
    if call.algorithm != "auto":
        return False
    # Data that is only moved needs no MPI type: see `Call`. In a reduction MPI fixes no order for expressions of the
    # user, and rounds float16 after every step.
    lacks = op in ("avg", "tree") or (op and is_custom(op)) or dtype == np.float16 or types.mpi_datatype(dtype) is None
    if op is not None and (ordered or lacks):
        return False
    threshold = mapped_threshold(operation, size, nodes)
    return not blocking or threshold == NEVER or (call.nbytes or 0) < threshold


def algorithms_for(operation: Operation) -> tuple[str, ...]:
    """Return the algorithms that a collective has on mapped memory; none if MPI carries out all calls."""
    if operation.of_neighbors or operation.send == "typed":
        return ()
    # With two shots every rank sends on data from its output, so all ranks must have an output.
    names = ["one_shot"] + ["two_shot"] * (operation.into_all and operation.two_shot is not None)
    return tuple(names + ["ring"] * (operation.ring is not None))


def mapped_algorithm(operation: Operation, nbytes: int) -> str:
    """Return the algorithm for a collective of ``nbytes`` on mapped memory; local."""
    return "two_shot" if nbytes >= _TWO_SHOT_THRESHOLDS.get(operation.name, NEVER) else "one_shot"


def schedule(call: Call, algorithm: str, scratch: int) -> list[Exchange]:
    """Return a call on mapped memory as exchanges."""
    operation, buffers = call.operation, call.buffers(scratch)
    if algorithm == "ring":
        assert operation.ring is not None
        return operation.ring(buffers)
    two_shot = operation.two_shot
    if algorithm == "auto":
        algorithm = mapped_algorithm(operation, call.nbytes or 0)
    if two_shot is None or buffers.size == 1 or algorithm == "one_shot":
        return [operation.one_shot(buffers)]
    # A piece has a shard for each rank. A shard is small enough to stay in the cache until the second exchange reads
    # it.
    return [exchange for piece in buffers.pieces(_SHARD_NBYTES * buffers.size) for exchange in two_shot(piece)]


def run_mapped(engine: HostEngine, call: Call, algorithm: str) -> None:
    """Carry out a call on mapped memory of a node. Collective, blocking; raises as `HostEngine.run`."""
    scratch = np.empty(call.blocks.nbytes, np.uint8)
    engine.run(schedule(call, algorithm, scratch.ctypes.data), call.signature)


@lru_cache(maxsize=64)
def mpi_fast_path(size: int, rank: int, nodes: int, *, ordered: bool = False) -> dict[str, FastPathCheck]:
    """Return the check of each blocking and nonblocking collective, by mpi4py's name of the method. Local.

    The checks agree with `goes_to_mpi`, which decides on ranks that pass their buffers in other forms.
    """
    if not _predefined:  # an import may not fill the table, because it would ask MPI, which may not run yet
        for datatype in vars(MPI).values():
            if type(datatype) is _Datatype and (dtype := numpy_dtype(datatype)) is not None and dtype in MPI_TYPES:
                _predefined[id(datatype)] = dtype
    checks: dict[str, FastPathCheck] = {}
    for name, row in OPERATIONS.items():
        never = ordered and row.reduces
        checks[name] = _never if never else _check(row, size, rank, mapped_threshold(row, size, nodes))
        checks[row.nonblocking] = _never if never else _check(row, size, rank, NEVER)
    return checks


def with_votes(
    checks: dict[str, FastPathCheck],
    is_on_host: Callable[[Operation], bool],
    starts_on_host: Callable[[Operation], bool],
) -> dict[str, FastPathCheck]:
    """Return the checks of a communicator on GPUs, where a call goes to MPI only if all ranks pass host arrays.

    ``is_on_host`` finds that out for a blocking call, and ``starts_on_host`` for a nonblocking one.
    """

    def with_vote(check: FastPathCheck, row: Operation, vote: Callable[[Operation], bool]) -> FastPathCheck:
        return lambda send, receive, op=None, root=0: check(send, receive, op, root) and vote(row)

    voting: dict[str, FastPathCheck] = {}
    for name, row in OPERATIONS.items():
        voting[name] = with_vote(checks[name], row, is_on_host)
        voting[row.nonblocking] = with_vote(checks[row.nonblocking], row, starts_on_host)
    return voting


def are_disjoint(a: Any, b: Any) -> bool:
    """Return whether two NumPy arrays certainly lie in host memory and do not overlap.

    MPICH 5 ends the program if they overlap. A NumPy array may be a view of device memory.
    """
    x, y = a.base, b.base
    if x is None:
        x = a
    if y is None:
        y = b
    if type(x) is type(y) is ndarray and x.base is y.base is None:  # x and y own the memory of a and b
        return x is not y or not may_share_memory(a, b)
    if has_driver() and not ((x is a or is_host_view(a)) and (y is b or is_host_view(b))):
        return False
    return not may_share_memory(a, b)


def _never(send: Any, receive: Any, op: Any = None, root: int = 0) -> bool:
    return False


def _check(row: Operation, size: int, rank: int, threshold: int) -> FastPathCheck:
    """Return the check of a collective that goes through mapped memory from ``threshold`` bytes on."""
    if row.send == "typed":
        return _never
    reduces, rooted, gathers = row.reduces, bool(row.rooted), row.rooted == "receive"
    # If recvcounts cut an input in place, MPI must get a copy of it. MPI may accept MPI.IN_PLACE of neighbours, which
    # `Call` refuses.
    only_arrays = row.send == "by_recvcounts" or row.of_neighbors
    no_list_in_place = reduces and row.send != "one"  # because it counts the blocks in another way
    ragged = "vector" in (row.send, row.receive) and not row.of_neighbors
    read_sent, read_received = (_reader(shape, size, rank, reduces) for shape in (row.send, row.receive))
    sent_blocks, received_blocks = (size if shape == "blocks" else 1 for shape in (row.send, row.receive))

    # Straight-line code for two arrays. The first test of `are_disjoint` is inlined, because it nearly always decides.

    def check_reduction(send: Any, receive: Any, op: Any = None, root: int = 0) -> bool:
        if type(send) is type(receive) is ndarray:
            if not ((send.base is receive.base is None and send is not receive) or are_disjoint(send, receive)):
                return False
            # The input decides, because only the root has a meaningful output.
            return send.nbytes < threshold and type(op) is _Op and send.dtype in MPI_TYPES
        return check_others(send, receive, op, root)

    def check_movement(send: Any, receive: Any, op: Any = None, root: int = 0) -> bool:
        if type(send) is type(receive) is ndarray and not ragged:
            if not ((send.base is receive.base is None and send is not receive) or are_disjoint(send, receive)):
                return False
            # MPI may miss that a rank sends more to itself than it receives. Neighbours are other ranks.
            fits = send.nbytes * received_blocks == receive.nbytes * sent_blocks
            return (fits or only_arrays or (rooted and rank != root)) and send.dtype in MPI_TYPES
        return check_others(send, receive, op, root)

    def check_others(send: Any, receive: Any, op: Any = None, root: int = 0) -> bool:
        """Check a call with other buffers than two arrays."""
        if type(receive) is ndarray and (send is None or send is _in_place):
            if only_arrays or not (receive.base is None or is_host_view(receive)):
                return False
            return receive.dtype in MPI_TYPES and (not reduces or (type(op) is _Op and receive.nbytes < threshold))
        if only_arrays or (reduces and type(op) is not _Op):
            return False
        if no_list_in_place and (send is None or send is _in_place):
            return False
        if type(send) in _LISTS or type(receive) in _LISTS:
            send = _array_of(send, sent_blocks) if type(send) in _LISTS else send
            receive = _array_of(receive, received_blocks) if type(receive) in _LISTS else receive
            if type(send) not in _LISTS and type(receive) not in _LISTS:
                return check(send, receive, op, root)
        in_place = send is None or send is _in_place
        if in_place or receive is None:
            if not in_place and not (gathers and rank != root):
                return False
            found = read_received(receive) if in_place else read_sent(send)
            if found is None:
                return False
            array, nbytes, _ = found
            return (array.base is None or is_host_view(array)) and (not reduces or nbytes < threshold)
        sent, received = read_sent(send), read_received(receive)
        if sent is None or received is None:
            return False
        (a, nbytes, block), (b, _, room) = sent, received
        if block != room or (reduces and nbytes >= threshold):
            return False
        return (a.base is b.base is None and a is not b) or are_disjoint(a, b)

    check = check_reduction if reduces else check_others if row.rooted == "bcast" else check_movement
    return check


def _array_of(buffer: Any, blocks: int) -> Any:
    """Return the array of a list that only repeats the type of the array, and perhaps its size; else the list."""
    if len(buffer) == 2:
        array, datatype = buffer
    elif len(buffer) == 3:
        array, count, datatype = buffer
        if type(count) is not int or type(array) is not ndarray or count * blocks != array.size:
            return buffer
    else:
        return buffer
    return array if type(array) is ndarray and _predefined.get(id(datatype)) is array.dtype else buffer


def _reader(shape: Shape, size: int, rank: int, reduces: bool) -> Callable[[Any], tuple[Any, int, int] | None]:
    """Return a function that reads a buffer of a shape.

    It returns an array, the bytes of it that the argument names, and the bytes of the block of ``rank``. It returns
    None unless the array certainly holds all of them.
    """
    blocks = size if shape == "blocks" else 1
    is_vector = shape == "vector"

    def read(buffer: Any) -> tuple[Any, int, int] | None:
        kind = type(buffer)
        if kind is ndarray:
            array, counts, displs, datatype = buffer, None, None, None
        else:
            parts = parts_of(buffer) if kind is list or kind is tuple else None
            if parts is None:
                return None
            array, counts, displs, datatype = parts
            if type(array) is not ndarray:
                return None
        if datatype is not None:
            itemsize = _itemsize(array, datatype, reduces)
        else:
            itemsize = array.itemsize if array.dtype in MPI_TYPES else 0
        if not itemsize:  # no check can decide about the elements
            return None
        room = array.nbytes
        if is_vector:
            reach, count = _reach(counts, displs, size, rank)
            return (array, room, count * itemsize) if 0 <= reach * itemsize <= room else None
        if counts is None:
            return (array, room, room // blocks) if displs is None and room % (itemsize * blocks) == 0 else None
        if displs is not None or type(counts) is not int or counts < 0 or counts * blocks * itemsize > room:
            return None
        return array, counts * blocks * itemsize, counts * itemsize

    return read


def _itemsize(array: Any, datatype: Any, reduces: bool) -> int:
    """Return the bytes from one element of a datatype to the next; 0 if no check can decide about them."""
    dtype = _predefined.get(id(datatype))
    if dtype is not None:
        return dtype.itemsize if not reduces or dtype is array.dtype or dtype == array.dtype else 0
    if reduces or type(datatype) is not _Datatype or datatype == _no_type:
        return 0
    return max(datatype.extent, 0)  # MPI moves elements of every type


def _reach(counts: Any, displs: Any, size: int, rank: int) -> tuple[int, int]:
    """Return the elements up to the end of the last block, or -1 if unsure, and the elements of this rank's block."""
    if type(counts) is ndarray:
        counts = counts.tolist()
    if type(displs) is ndarray:
        displs = displs.tolist()
    if type(counts) is not list or len(counts) != size:
        return -1, 0
    try:
        total = sum(counts)  # an integer only of integers
        if type(total) is not int or min(counts) < 0:
            return -1, 0
        if displs is None:
            return total, counts[rank]
        if type(displs) not in _LISTS or len(displs) != size or type(sum(displs)) is not int or min(displs) < 0:
            return -1, 0
    except (TypeError, OverflowError):  # `Call` names the items that are no integers of 64 bits
        return -1, 0
    return max(map(add, displs, counts)), counts[rank]
