"""CallTemplate: the calls of one kind on plain arrays. Each call fills its addresses and counts into the template."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mpicomm.activity.layout import OFFSET_IN_TEXT, filled
from mpicomm.collectives.call import Call
from mpicomm.collectives.gpu.algorithms.base import Domain, with_place
from mpicomm.collectives.gpu.algorithms.packets.configs import any_length_configs
from mpicomm.collectives.gpu.algorithms.packets.counted import CountedPackets, plain_side
from mpicomm.collectives.gpu.algorithms.sendrecv.plan import SendrecvTemplate
from mpicomm.collectives.gpu.algorithms.steps import Copy, Step
from mpicomm.collectives.gpu.decision import NO_END, AlgorithmChoice, ByLength, Decision, choice_at, enqueuers_of
from mpicomm.collectives.gpu.device import GrowingScratch, finish_launches
from mpicomm.collectives.signature import Signature, counted_hash
from mpicomm.mpi.arguments import Span
from mpicomm.mpi.buffers import array_of
from mpicomm.mpi.device_counts import CountedBuffers
from mpicomm.mpi.plain_arrays import is_counted
from mpicomm.mpi.spec import Shape
from mpicomm.symmetric.registry import Mapped, Mappings

if TYPE_CHECKING:
    from mpicomm.collectives.gpu.step_loader import StepLoader
    from mpicomm.devices.cuda.stream_order import Enqueue

BY_KERNELS = AlgorithmChoice("stream", "kernels match messages")
WITH_COUNTS = AlgorithmChoice("one_shot", "the counts are on the GPU")


class CallTemplate(ABC):
    """Calls that differ in addresses and counts. `DeviceEngine.enqueue` takes it like a `Plan`.

    `fill` makes it the plan of one call. The caller enqueues the filled call before it fills in the next call. Threads
    of a program do not make such calls at the same time. MPI forbids it for collectives. The order of messages in the
    order of streams must be the same on both ranks.
    """

    is_new = is_old = False
    steps = (None,)
    """Never empty: every rank launches something in a call that is filled in, so `enqueue` must not skip it."""
    private_nbytes: int | None = None
    """See `Plan.private_nbytes`."""
    launch: Enqueue | None = None
    enqueue: Enqueue | None = None
    """Both enqueue the filled-in call; the device's context must be current."""

    @abstractmethod
    def fill(self, sent: Any, received: Any) -> bool:
        """Fill in a call with these buffers, as `plain_array` reads them; return whether it is possible. Local.

        The `Memory` of an epilogue's arrays follows the buffers. If `fill` returns False, the call is read and
        checked, which raises the errors of a wrong call, and the engine sets up the memory that it lacks.
        """

    def takes(self, sent: Any, received: Any, *arrays: Any) -> bool:
        """Return whether buffers of these kinds have the fields that `fill` reads. Its arguments are as there."""
        return True

    @property
    @abstractmethod
    def text(self) -> str:
        """The text of the filled-in call."""

    @property
    @abstractmethod
    def choice(self) -> AlgorithmChoice:
        """The algorithm of the filled-in call."""

    def __str__(self) -> str:
        return self.text


class CollectiveTemplate(CallTemplate):
    """The calls of one kind like ``call``, whose form has this ``decision``."""

    collective = True

    def __init__(self, call: Call, decision: Decision) -> None:
        signature = call.signature
        self.words = self._text = signature.text_without_count()
        self.count = 0
        self.offset: int | None = None
        """The text and the numbers of the filled-in call, for `CallLog.post`."""
        self._hash = signature.hash_without_count
        self._into_any = decision.by_length(symmetric=False)
        self._chosen = self._into_any[1][0]
        self._is_private = decision.form.is_private

    @property
    def text(self) -> str:
        return filled(self.words, self.count, self.offset or 0)

    @property
    def choice(self) -> AlgorithmChoice:
        return self._chosen.choice


class EvenTemplate(CollectiveTemplate):
    """The calls with blocks of one length. ``mappings`` are the symmetric arrays."""

    def __init__(self, call: Call, decision: Decision, mappings: Mappings) -> None:
        super().__init__(call, decision)
        form = decision.form
        self._mappings = mappings
        self._into_memory, self._memory_from = self._into_any, NO_END
        if call.common_output is not None:
            self._into_memory = decision.by_length(symmetric=True)
            self._memory_from = _first_difference(self._into_any, self._into_memory)
        self._unit_nbytes = form.itemsize
        self._send_nbytes, self._receive_nbytes = _element_nbytes(call)
        # In place, the receive buffer holds the input.
        self._sent, self._received = (0, form.sends) if form.in_place else (form.sends, form.receives)
        self._finish = None if call.epilogue is None else call.epilogue.without_owners()
        self._array, self._into = 0, ""  # the symmetric array of the last call into one, and the text of such calls

    def takes(self, sent: Any, received: Any, *arrays: Any) -> bool:
        buffers = (self._sent, sent), (self._received, received)
        return not any(blocks and (len(plain) > 3 or (blocks > 1 and is_counted(plain))) for blocks, plain in buffers)

    def fill(self, sent: Any, received: Any) -> bool:
        send, receive = sent[0], received[0]
        to, of = self._sent, self._received
        send_nbytes, receive_nbytes = sent[1] * self._send_nbytes, received[1] * self._receive_nbytes
        if of:
            nbytes = received[1] // of * self._receive_nbytes
            if nbytes * of != receive_nbytes:
                return False
            if to:
                if send_nbytes != nbytes * to or sent[1] % to:
                    return False
                # Buffers that overlap are an error, and the same memory passed twice is another form.
                if send < receive + receive_nbytes and receive < send + send_nbytes:
                    return False
        else:
            nbytes = sent[1] // to * self._send_nbytes
            if nbytes * to != send_nbytes:
                return False
        if nbytes == 0:
            return False
        count = nbytes // self._unit_nbytes
        (bounds, choices), memory = self._into_any, None
        if nbytes >= self._memory_from:
            memory = self._mappings.find(receive, receive_nbytes)
            if memory is not None:
                bounds, choices = self._into_memory
        chosen = choices[bisect_right(bounds, nbytes) - 1]
        # Without ranges of one item, which take longer.
        begins = [send] if to == 1 else [*range(send, send + to * nbytes, nbytes)] if to else []
        if of == 1:
            begins.append(receive)
        elif of:
            begins += range(receive, receive + of * nbytes, nbytes)
        call_hash = counted_hash(self._hash, count)
        filled = chosen.fill([nbytes] * (to + of), begins, nbytes, call_hash, memory, self._finish)
        if filled is None:
            return False
        self.launch = self.enqueue = chosen.enqueue_of(filled)
        self._chosen, self.count = chosen, count
        self.words, self.offset = self._text, None
        if chosen.into_memory and memory is not None:
            self.words, self.offset = self._text_into(memory), memory.offset
        return True

    def _text_into(self, memory: Mapped) -> str:
        """Return the text of calls whose output lies in a symmetric array, without the offset there."""
        if memory.array != self._array:
            self._array, self._into = memory.array, with_place(self._text, memory.text_at(OFFSET_IN_TEXT))
        return self._into


class FinishedTemplate(EvenTemplate):
    """The calls with an epilogue. If it converts, the reduction goes to ``scratch`` memory."""

    def __init__(self, call: Call, decision: Decision, mappings: Mappings, scratch: GrowingScratch) -> None:
        super().__init__(call, decision, mappings)
        assert self._finish is not None
        self._epilogue = finish = self._finish
        self._scratch = scratch
        self._receive_nbytes = self._unit_nbytes
        self._followed, self._domain = decision.followed, decision.domain
        self._itemsizes = self._unit_nbytes, finish.result.itemsize, *finish.itemsizes

    def takes(self, sent: Any, received: Any, *arrays: Any) -> bool:
        return len(arrays) == len(self._epilogue.itemsizes) and super().takes(sent, received)

    def fill(self, sent: Any, received: Any, *arrays: Any) -> bool:
        finish, count = self._epilogue, (sent if self._sent else received)[1]
        memory = zip((sent, received, *arrays), self._itemsizes, strict=True)
        spans = sorted([(plain[0], plain[0] + plain[1] * nbytes) for plain, nbytes in memory])
        if any(end > begin for (_, end), (begin, _) in pairwise(spans)):
            return False  # arrays overlap
        if count != received[1] * finish.in_element or not finish.place(received[0], count, arrays):
            return False
        if finish.converts:
            scratch = self._scratch.largest
            if scratch.nbytes < count * self._unit_nbytes:
                return False  # `DeviceEngine.prepare_call` makes more
            received = scratch.pointer, count
        if not super().fill(sent, received):
            return False
        if not self._chosen.finishes:
            assert self.launch is not None
            reduced, domain = Span(received[0], count), self._domain
            launches = finish_launches(finish, reduced, domain.team.faults, domain.multiprocessors)
            self.launch = self.enqueue = self._followed(self.launch, launches)
        return True


class BlocksTemplate(CollectiveTemplate):
    """The calls with blocks of any lengths and places."""

    _add_sent: Callable[[Any, list[int], list[int]], bool]
    _add_received: Callable[[Any, list[int], list[int]], bool]

    def __init__(self, call: Call, decision: Decision, scratch: GrowingScratch) -> None:
        super().__init__(call, decision)
        form, operation = decision.form, call.operation
        self._element_nbytes = _element_nbytes(call)
        self._counted = operation.send == "counted"
        self._sends, self._receives = sent, received = form.sends, form.receives
        single = [shape == "one" and call.neighborhood is None for shape in (operation.send, operation.receive)]
        self._vectors = sent > 0 and not single[0], received > 0 and not single[1]
        self._singles = sent > 0 and single[0], received > 0 and single[1]
        # The numbers of the blocks that this rank sends to itself and takes from itself, if it has both.
        self._own = None
        if sent and received:
            self._own = form.rank * self._vectors[0], sent + form.rank * self._vectors[1]
        self._add_sent, self._add_received = (
            partial(_add_blocks, form.size, nbytes)
            if vector
            else partial(_add_whole, nbytes)
            if single
            else _add_nothing
            for nbytes, vector, single in zip(self._element_nbytes, self._vectors, self._singles, strict=True)
        )
        self._followed, self._moves = decision.followed, self._counted and call.in_place
        if self._moves:
            self._add_received = partial(_add_result, scratch, form.rank)
        self._call_hash = counted_hash(self._hash, None)

    def takes(self, sent: Any, received: Any, *arrays: Any) -> bool:
        lengths = len(sent), len(received)
        return all(
            length == (5 if vector else 3)
            for length, vector, single in zip(lengths, self._vectors, self._singles, strict=True)
            if vector or single
        )

    def fill(self, sent: Any, received: Any) -> bool:
        if self._sends and self._receives:
            # The two buffers must not overlap, for any blocks in them.
            of_send, of_receive = self._element_nbytes
            send, receive = sent[0], received[0]
            if send < receive + received[1] * of_receive and receive < send + sent[1] * of_send:
                return False
        lengths: list[int] = []
        begins: list[int] = []
        if not (self._add_sent(sent, lengths, begins) and self._add_received(received, lengths, begins)):
            return False
        if self._own is not None:
            to_itself, of_itself = self._own
            if lengths[to_itself] != lengths[of_itself]:
                return False  # this rank sends itself more than it takes, or less
        longest, call_hash = max(lengths), self._call_hash
        if self._counted:  # recvcounts cut all of the input, and all ranks know its length
            if sum(sent[3]) != sent[1]:
                return False
            self.count = sent[1]
            call_hash = counted_hash(self._hash, self.count)
        if longest == 0 and not self._is_private:
            return False
        bounds, choices = self._into_any
        chosen = choices[bisect_right(bounds, longest) - 1]
        filled = chosen.fill(lengths, begins, longest, call_hash)
        if filled is None:
            return False
        self.launch = self.enqueue = chosen.enqueue_of(filled)
        if self._moves and begins[-1]:
            move = Copy(sent[0], begins[-1], lengths[-1], local=True)
            self.launch = self.enqueue = self._followed(self.launch, [move])
        self._chosen = chosen
        self.private_nbytes = chosen.launcher.private_nbytes
        return True


class NeighborTemplate(BlocksTemplate):
    """The calls with blocks for neighbours. A neighbour is another rank or no rank."""

    def __init__(self, call: Call, decision: Decision, scratch: GrowingScratch) -> None:
        super().__init__(call, decision, scratch)
        assert call.neighborhood is not None
        self._shapes = call.operation.send, call.operation.receive
        peers = call.neighborhood.destinations, call.neighborhood.sources
        self._add_sent, self._add_received = (
            partial(_add_for_neighbors, *of_buffer, decision.form.size)
            for of_buffer in zip(peers, self._shapes, self._element_nbytes, strict=True)
        )

    def takes(self, sent: Any, received: Any, *arrays: Any) -> bool:
        return all(
            len(plain) == (5 if shape == "vector" else 3) and not (shape == "blocks" and is_counted(plain))
            for plain, shape in zip((sent, received), self._shapes, strict=True)
        )


# Each of these functions adds the bytes and the addresses of a buffer's blocks to the two lists. It returns whether the
# blocks are in the buffer. ``nbytes`` are the bytes of an element.


def _add_nothing(buffer: Any, lengths: list[int], begins: list[int]) -> bool:
    return True


def _add_whole(nbytes: int, buffer: Any, lengths: list[int], begins: list[int]) -> bool:
    lengths.append(buffer[1] * nbytes)
    begins.append(buffer[0] if buffer[1] else 0)
    return True


def _add_result(scratch: GrowingScratch, rank: int, buffer: Any, lengths: list[int], begins: list[int]) -> bool:
    """Add the scratch memory for the result, if there is enough. `DeviceEngine.prepare_call` makes more."""
    part, nbytes = scratch.largest, lengths[rank]
    lengths.append(nbytes)
    begins.append(part.pointer if nbytes else 0)
    return part.nbytes >= nbytes


def _add_for_neighbors(
    peers: Sequence[int],
    shape: Shape | None,
    nbytes: int,
    ranks: int,
    buffer: Any,
    lengths: list[int],
    begins: list[int],
) -> bool:
    blocks = len(peers)
    of_blocks: tuple[list[int], list[int]] = [], []
    if shape == "vector":
        if not _add_blocks(blocks, nbytes, buffer, *of_blocks):
            return False
    elif blocks:
        pointer, total = buffer[0], buffer[1] * nbytes
        length = total if shape == "one" else buffer[1] // blocks * nbytes
        if shape == "blocks" and length * blocks != total:
            return False
        step = 0 if shape == "one" else length
        places = [pointer + step * block for block in range(blocks)] if length else [0] * blocks
        of_blocks = [length] * blocks, places
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


def _first_difference(into_any: ByLength, into_memory: ByLength) -> int:
    """Return the bytes from which on it matters whether the output lies in symmetric memory.

    A look for the memory would cost each call more than a microsecond.
    """
    for nbytes in sorted({*into_any[0], *into_memory[0]}):
        usual, chosen = (choice_at(nbytes, by_length) for by_length in (into_any, into_memory))
        if chosen.into_memory or chosen.launcher is not usual.launcher:
            return nbytes
    return NO_END


def _element_nbytes(call: Call) -> tuple[int, int]:
    """Return the bytes of an element of the send buffer and of the receive buffer, as the caller passed them."""
    if call.operation.of_neighbors:  # the call counts bytes
        given = call.given.send, call.given.receive
        send, receive = (int(array_of(spec).itemsize) for spec in given)
        return send, receive
    send, receive = (
        0 if operand is None or operand.dtype is None else operand.dtype.itemsize
        for operand in (call.send, call.receive)
    )
    return send, receive


def has_template(call: Call) -> bool:
    """Return whether calls on plain arrays like this one differ only in addresses, counts and displacements."""
    shapes, neighborhood = {call.operation.send, call.operation.receive}, call.neighborhood
    typed = shapes == {"typed"} and neighborhood is None and call.scratch_nbytes == 0  # each block is a run of bytes
    readable = typed or shapes <= {"one", "blocks", "vector", "counted"}
    if neighborhood is not None and readable:
        # A datatype gives the size of elements at an address. If a rank is a neighbour twice, its message has two
        # blocks.
        readable = neighborhood.names_ranks_once and not any(operand.by_address for operand in call.operands)
    return readable and (typed or call.packed is None) and call.counted is None


def template_of(call: Call, decision: Decision, mappings: Mappings, scratch: GrowingScratch) -> CollectiveTemplate:
    """Return the template of all calls that differ from ``call`` only in addresses, counts and displacements."""
    if call.epilogue is not None:
        return FinishedTemplate(call, decision, mappings, scratch)
    if call.operation.is_even:
        return EvenTemplate(call, decision, mappings)
    return (BlocksTemplate if call.neighborhood is None else NeighborTemplate)(call, decision, scratch)


class MessageTemplate(CallTemplate):
    """The messages of one route between ranks, from and into buffers of one kind.

    ``element_nbytes`` are the bytes of an element of both buffers; 0 for a buffer that no message uses.
    """

    collective = False
    choice = BY_KERNELS

    def __init__(
        self, text: str, template: SendrecvTemplate, loader: StepLoader, element_nbytes: tuple[int, int]
    ) -> None:
        self._text = text
        self._template = template
        self._enqueue_of = enqueuers_of(template, loader)
        self._send_nbytes, self._receive_nbytes = element_nbytes

    @property
    def text(self) -> str:
        return self._text

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


class CountedTemplate(CallTemplate):
    """The calls of a form with counts on the device. Their buffers are of the same kinds as ``buffers``."""

    collective = True
    choice = WITH_COUNTS
    count = 0
    offset: int | None = None
    """See `CollectiveTemplate`."""

    def __init__(self, signature: Signature, buffers: CountedBuffers, domain: Domain, loader: StepLoader) -> None:
        self.words = str(signature)
        self._template = CountedPackets(domain, buffers, signature.hash32, any_length_configs(domain))
        self._enqueue_of = enqueuers_of(self._template, loader)
        self._itemsize = buffers.itemsize
        self._most = NO_END if buffers.receive.counts.is_wide else (1 << 31) - 1
        send, receive = ([each.nbytes for each in side.indices()] for side in (buffers.send, buffers.receive))
        self._nbytes = send[0], send[-1], receive[0], receive[-1]
        """The bytes of counts and of displacements to send, and of those to receive."""

    @property
    def text(self) -> str:
        return self.words

    def takes(self, sent: Any, received: Any, *arrays: Any) -> bool:
        return type(sent[3]) is type(received[3]) is int

    def fill(self, sent: Any, received: Any) -> bool:
        send, room, _, counts, displs = sent
        receive, most, _, coming, places = received
        if most > self._most:
            return False
        of_counts, of_displs, of_coming, of_places = self._nbytes
        nbytes, end, last = room * self._itemsize, receive + most * self._itemsize, coming + of_coming
        read = [(send, nbytes), (counts, of_counts)]
        if type(displs) is int:
            read.append((displs, of_displs))
        if type(places) is int:
            read.append((places, of_places))
        for begin, length in read:
            if (begin < end and receive < begin + length) or (begin < last and coming < begin + length):
                return False  # the call would write into an array that it reads
        if receive < last and coming < end:
            return False
        self.launch = self.enqueue = self._enqueue_of(self._template.fill(sent, received))
        self.private_nbytes = nbytes
        return True

    def steps_of(self, buffers: CountedBuffers) -> list[Step]:
        """Return the steps of a read call, which later calls do not overwrite."""
        self.private_nbytes = buffers.send.room * self._itemsize
        return self._template.steps(self._template.fill(plain_side(buffers.send), plain_side(buffers.receive)))
