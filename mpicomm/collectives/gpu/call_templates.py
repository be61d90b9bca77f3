"""CallTemplate: the calls of one kind on plain arrays. Each call fills its addresses and counts into the template."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mpicomm.activity.layout import OFFSET_IN_TEXT
from mpicomm.collectives.call import Call
from mpicomm.collectives.gpu.algorithms.base import AlgorithmChoice, AnyPlan
from mpicomm.collectives.gpu.algorithms.memory import with_place
from mpicomm.collectives.gpu.algorithms.sendrecv.plan import SendrecvTemplate
from mpicomm.collectives.gpu.decision import NO_END, Decision, choice_at, enqueuers_of
from mpicomm.collectives.signature import hash_with_count
from mpicomm.devices.base import GrowingScratch
from mpicomm.mpi.buffers import any_overlap
from mpicomm.mpi.descriptors import descriptor_of, has_count
from mpicomm.mpi.layout import byte_run
from mpicomm.mpi.spec import Shape
from mpicomm.sharing.segments import Mappings

if TYPE_CHECKING:
    from mpicomm.collectives.gpu.plan import StepLoader
    from mpicomm.devices.cuda.stream_order import Enqueue

BY_KERNELS = AlgorithmChoice("stream", "kernels match messages")


class CallTemplate(AnyPlan, ABC):
    """Calls that differ in addresses and counts. `DeviceEngine.enqueue` takes it like a `Plan`.

    `fill` makes it the plan of one call. The caller enqueues the filled call before it fills in the next call. Threads
    of a program do not make such calls at the same time. MPI forbids it for collectives. The order of messages in the
    order of streams must be the same on both ranks.
    """

    lasts = is_new = False
    steps = (None,)
    """Never empty: every rank launches something in a call that is filled in, so `enqueue` must not skip it."""
    launch: Enqueue | None = None
    enqueue: Enqueue | None = None
    """Both enqueue the filled-in call; the device's context must be current."""

    @abstractmethod
    def fill(self, sent: Any, received: Any) -> bool:
        """Fill in a call with these buffers, as `descriptor_of` reads them; return whether it is possible. Local.

        The `Memory` of an epilogue's arrays follows the buffers. If `fill` returns False, the call is read and
        checked, which raises the errors of a wrong call, and the engine sets up the memory that it lacks.
        """

    def takes(self, sent: Any, received: Any, *arrays: Any) -> bool:
        """Return whether buffers of these kinds have the fields that `fill` reads. Its arguments are as there."""
        return True


class CollectiveTemplate(CallTemplate):
    """The calls of one kind like ``call``, whose form has this ``decision``. ``mappings`` are the symmetric arrays."""

    def __init__(self, call: Call, decision: Decision, mappings: Mappings, scratch: GrowingScratch) -> None:
        form, signature = decision.form, call.signature
        self.text_format = self._text = signature.text_without_count()
        self._hash = signature.hash_without_count
        self._mappings, self._scratch, self._decision = mappings, scratch, decision
        self._into_ordinary = self._into_symmetric = decision.by_length(symmetric=False)
        self._symmetric_from = NO_END
        if call.common_output is not None:
            # A lookup of the memory takes more than a microsecond, so only calls for which it matters do it.
            self._into_symmetric = into_symmetric = decision.by_length(symmetric=True)
            for nbytes in sorted({*self._into_ordinary[0], *into_symmetric[0]}):
                usual, chosen = choice_at(nbytes, self._into_ordinary), choice_at(nbytes, into_symmetric)
                if chosen.launcher.into_memory or chosen.launcher is not usual.launcher:
                    self._symmetric_from = nbytes
                    break
        self.choice = self._into_ordinary[1][0].choice
        self._last_array = 0
        """The symmetric array of the last call into one."""
        self._placed_text = ""
        """The text of calls into that array."""
        self._unit_nbytes = form.itemsize
        self._send_nbytes, self._receive_nbytes = _element_nbytes(call)
        self._finish = None if call.epilogue is None else call.epilogue.detached()
        self._is_even, self._is_private = call.operation.is_even, form.is_private
        self._sends, self._receives = form.sends, form.receives
        self._is_followed = self._finish is not None
        shapes = call.operation.send, call.operation.receive
        if self._is_even:
            if form.in_place:  # the receive buffer holds the input
                self._sends, self._receives, shapes = 0, form.sends, ("one", shapes[0])
        else:
            self._read_blocks(call, shapes, form.rank, form.size)
        self._shapes = [
            shape if blocks else None for shape, blocks in zip(shapes, (self._sends, self._receives), strict=True)
        ]

    def _read_blocks(self, call: Call, shapes: tuple[Shape, Shape], rank: int, size: int) -> None:
        """Prepare `fill` for blocks of any lengths and places."""
        sends, receives, near = self._sends, self._receives, call.neighborhood
        self._by_recvcounts, self._call_hash = call.operation.send == "by_recvcounts", hash_with_count(self._hash, None)
        # The numbers of the blocks that this rank sends to itself and takes from itself, if it has both.
        own = rank * (sends > 1), sends + rank * (receives > 1)
        self._to_self = own if sends and receives else None
        itemsizes, adders = (self._send_nbytes, self._receive_nbytes), list[Callable[..., bool]]()
        peers = (None, None) if near is None else (near.destinations, near.sources)
        specs = call.given.send, call.given.receive
        for spec, blocks, shape, nbytes, ranks in zip(specs, (sends, receives), shapes, itemsizes, peers, strict=True):
            if ranks is not None:
                adders.append(partial(_add_for_neighbors, ranks, shape, nbytes, size))
            elif not blocks:
                adders.append(lambda buffer, lengths, begins: True)
            elif shape == "typed" and (gapped := _with_gaps(spec)):
                adders.append(partial(_add_with_gaps, gapped))
            else:
                adders.append(partial(_add_whole, nbytes) if shape == "one" else partial(_add_blocks, size, nbytes))
        self._add_sent, self._add_received = adders
        if self._by_recvcounts and call.in_place:
            self._is_followed = True
            self._add_received = partial(_add_result, self._scratch, rank)

    def takes(self, sent: Any, received: Any, *arrays: Any) -> bool:
        """See `CallTemplate`.

        A list has five numbers. A count beside an array that is cut into blocks is the count of one block.
        """
        return not arrays and all(
            len(plain) == (3 if shape in ("one", "blocks") else 5) and not (shape == "blocks" and has_count(plain))
            for plain, shape in zip((sent, received), self._shapes, strict=True)
            if shape is not None
        )

    def fill(self, sent: Any, received: Any) -> bool:
        # Straight-line code, because every new call comes here.
        send, receive, to, of = sent[0], received[0], self._sends, self._receives
        send_nbytes, receive_nbytes = sent[1] * self._send_nbytes, received[1] * self._receive_nbytes
        overlap = to and of and send < receive + receive_nbytes and receive < send + send_nbytes
        lengths: list[int]
        begins: list[int]
        if self._is_even:
            if overlap:
                return False  # this is an error, and the same memory passed twice is another form
            if of:
                nbytes = received[1] // of * self._receive_nbytes
                if nbytes * of != receive_nbytes or (to and (send_nbytes != nbytes * to or sent[1] % to)):
                    return False
            else:
                nbytes = sent[1] // to * self._send_nbytes
                if nbytes * to != send_nbytes:
                    return False
            if nbytes == 0:
                return False
            # Without ranges of one item, which take longer.
            begins = [send] if to == 1 else [*range(send, send + to * nbytes, nbytes)] if to else []
            if of == 1:
                begins.append(receive)
            elif of:
                begins += range(receive, receive + of * nbytes, nbytes)
            lengths, longest, self.count = [nbytes] * (to + of), nbytes, nbytes // self._unit_nbytes
            call_hash = hash_with_count(self._hash, self.count)
        else:
            lengths, begins = [], []
            if not (self._add_sent(sent, lengths, begins) and self._add_received(received, lengths, begins)):
                return False
            if self._to_self is not None and lengths[self._to_self[0]] != lengths[self._to_self[1]]:
                return False  # this rank sends itself more than it takes, or less
            if overlap:  # of the two buffers, but perhaps of no block
                blocks = zip(begins, lengths, [0] * to + [1] * of, strict=True)
                if any_overlap([(begin, begin + length, owner) for begin, length, owner in blocks]):
                    return False
            longest, call_hash = max(lengths), self._call_hash
            if longest == 0 and not self._is_private:
                return False
            if self._by_recvcounts:  # recvcounts cut all of the input, and all ranks know its length
                if sum(sent[3]) != sent[1]:
                    return False
                self.count = sent[1]
                call_hash = hash_with_count(self._hash, self.count)
        (bounds, choices), memory = self._into_ordinary, None
        if longest >= self._symmetric_from:
            memory = self._mappings.find(receive, receive_nbytes)
            if memory is not None:
                bounds, choices = self._into_symmetric
        chosen = choices[bisect_right(bounds, longest) - 1]
        launcher = chosen.launcher
        filled = launcher.fill((lengths, begins, longest, call_hash, memory, self._finish))
        if filled is None:
            return False
        enqueue = chosen.enqueue_of(filled)
        if self._is_followed:
            output = 0 if self._is_even else send  # of a result that comes from scratch memory
            enqueue = self._decision.followed(enqueue, chosen, lengths, begins, output, self._finish)
        self.launch = self.enqueue = enqueue
        self.choice, self.text_format, self.offset = chosen.choice, self._text, None
        if launcher.into_memory and memory is not None:
            if memory.array != self._last_array:
                self._last_array = memory.array
                self._placed_text = with_place(self._text, memory.text_at(OFFSET_IN_TEXT))
            self.text_format, self.offset = self._placed_text, memory.offset
        return True


class EpilogueTemplate(CollectiveTemplate):
    """The calls with an epilogue. If it converts, the reduction goes to scratch memory."""

    def __init__(self, call: Call, decision: Decision, mappings: Mappings, scratch: GrowingScratch) -> None:
        super().__init__(call, decision, mappings, scratch)
        assert self._finish is not None
        self._epilogue = finish = self._finish
        self._receive_nbytes = self._unit_nbytes
        self._itemsizes = self._unit_nbytes, finish.result.itemsize, *finish.itemsizes
        self._numbers = range(len(self._itemsizes))

    def takes(self, sent: Any, received: Any, *arrays: Any) -> bool:
        return len(arrays) == len(self._epilogue.itemsizes) and super().takes(sent, received)

    def fill(self, sent: Any, received: Any, *arrays: Any) -> bool:
        finish, count = self._epilogue, (sent if self._sends else received)[1]
        memory = zip((sent, received, *arrays), self._itemsizes, self._numbers, strict=True)
        if any_overlap([(plain[0], plain[0] + plain[1] * nbytes, number) for plain, nbytes, number in memory]):
            return False
        if count != received[1] * finish.reduced_per_element or not finish.rebind(received[0], count, arrays):
            return False
        if finish.converts:
            if self._scratch.nbytes < count * self._unit_nbytes:
                return False  # `DeviceEngine.prepare_call` makes more
            received = self._scratch.pointer, count
        return super().fill(sent, received)


# Each of these functions adds the bytes and the addresses of a buffer's blocks to the two lists. It returns whether the
# blocks are in the buffer. ``nbytes`` are the bytes of an element.


def _add_whole(nbytes: int, buffer: Any, lengths: list[int], begins: list[int]) -> bool:
    lengths.append(buffer[1] * nbytes)
    begins.append(buffer[0] if buffer[1] else 0)
    return True


def _add_result(scratch: GrowingScratch, rank: int, buffer: Any, lengths: list[int], begins: list[int]) -> bool:
    """Add the scratch memory for the result, if there is enough. `DeviceEngine.prepare_call` makes more."""
    nbytes = lengths[rank]
    is_enough = scratch.nbytes >= nbytes
    lengths.append(nbytes)
    begins.append(scratch.pointer if nbytes else 0)
    return is_enough


def _add_for_neighbors(
    peers: Sequence[int], shape: Shape, nbytes: int, ranks: int, buffer: Any, lengths: list[int], begins: list[int]
) -> bool:
    blocks = len(peers)
    of_blocks: tuple[list[int], list[int]] = [], []
    if shape != "vector":  # all neighbours get the whole buffer, or equal parts
        count, rest = divmod(buffer[1], blocks) if shape == "blocks" and blocks else (buffer[1], 0)
        if rest:
            return False
        buffer = (*buffer[:3], [count] * blocks, [0] * blocks if shape == "one" else None)
    if not _add_blocks(blocks, nbytes, buffer, *of_blocks):
        return False
    first = len(lengths)
    lengths += [0] * ranks
    begins += [0] * ranks
    for peer, length, begin in zip(peers, *of_blocks, strict=True):
        if peer >= 0:  # else it is MPI.PROC_NULL
            lengths[first + peer], begins[first + peer] = length, begin
    return True


def _add_blocks(blocks: int, nbytes: int, buffer: Any, lengths: list[int], begins: list[int]) -> bool:
    pointer, size, _, counts, displs = buffer
    if len(counts) != blocks:
        return False
    # One loop, because several passes by built-in functions take longer for up to 8 ranks.
    if displs is None:
        begin, end = pointer, pointer + size * nbytes
        for count in counts:
            length = count * nbytes
            lengths.append(length)
            begins.append(begin if count else 0)
            begin += length
            if count < 0:
                return False
        return bool(begin <= end)
    for count, displ in zip(counts, displs, strict=False):
        if count == 0:  # it may lie anywhere
            lengths.append(0)
            begins.append(0)
        elif 0 <= displ <= size - count and count > 0:
            lengths.append(count * nbytes)
            begins.append(pointer + displ * nbytes)
        else:
            return False
    return True


def _with_gaps(spec: Any) -> list[tuple[int, int, int, int]]:
    """Return the blocks of an argument with datatypes if any has gaps; all calls of its kind have the same ones.

    A block has its bytes, and from its displacement on its first run, its first byte, and the byte after its last.
    """
    plain = descriptor_of(spec)
    if plain is None or plain[2][-1] != "gaps":
        return []
    found = zip(*plain[2][1:3], strict=True)
    layouts = [byte_run(each * count) if type(each) is int else each.repeated(count) for each, count in found]
    return [(each.nbytes, each.regions[0].offset if each.regions else 0, each.begin, each.end) for each in layouts]


def _add_with_gaps(
    blocks: Sequence[tuple[int, int, int, int]], buffer: Any, lengths: list[int], begins: list[int]
) -> bool:
    pointer, size, _, _, displs = buffer
    for (nbytes, first, begin, end), displ in zip(blocks, displs, strict=True):
        if nbytes and (displ + begin < 0 or displ + end > size):
            return False
        lengths.append(nbytes)
        begins.append(pointer + displ + first if nbytes else 0)
    return True


def _element_nbytes(call: Call) -> list[int]:
    """Return the bytes of an element of the send buffer and of the receive buffer, as the caller passed them."""
    operands = call.send, call.receive
    # Blocks with a datatype each are in bytes.
    return [each.dtype.itemsize if each and each.dtype is not None else int(each is not None) for each in operands]


def template_of(
    call: Call, decision: Decision, mappings: Mappings, scratch: GrowingScratch
) -> CollectiveTemplate | None:
    """Return the template of all calls that differ from ``call`` only in addresses, counts and displacements.

    Return None if calls of this kind have to be read one by one.
    """
    shapes, neighborhood = {call.operation.send, call.operation.receive}, call.neighborhood
    typed = shapes == {"typed"} and neighborhood is None
    readable = typed or shapes <= {"one", "blocks", "vector", "by_recvcounts"}
    if neighborhood is not None and readable:
        # A datatype gives the size of elements at an address. If a rank is a neighbour twice, its message has two
        # blocks.
        readable = neighborhood.names_ranks_once and not any(operand.memory.by_address for operand in call.operands)
    if not readable or (not typed and any(operand.derived for operand in call.operands)):
        return None
    kind = CollectiveTemplate if call.epilogue is None else EpilogueTemplate
    return kind(call, decision, mappings, scratch)


class MessageTemplate(CallTemplate):
    """The messages of one route between ranks, from and into buffers of one kind.

    The bytes of an element are 0 for a buffer that no message uses.
    """

    collective = False
    choice = BY_KERNELS

    def __init__(
        self, text: str, template: SendrecvTemplate, loader: StepLoader, send_nbytes: int, receive_nbytes: int
    ) -> None:
        self.text_format = text
        self._template = template
        self._enqueue_of = enqueuers_of(template, loader)
        self._send_nbytes, self._receive_nbytes = send_nbytes, receive_nbytes

    def fill(self, sent: Any, received: Any) -> bool:
        send, receive = sent[0], received[0]
        send_nbytes, receive_nbytes = sent[1] * self._send_nbytes, received[1] * self._receive_nbytes
        if send < receive + receive_nbytes and receive < send + send_nbytes:
            return False  # the buffers overlap
        filled = self._template.fill(send, send_nbytes, receive, receive_nbytes)
        if not filled[1]:
            return False  # there is nothing to enqueue
        self.launch = self.enqueue = self._enqueue_of(filled)
        return True
