"""FormPlan: one plan for all calls of a form. Each call fills its addresses and counts into the plan."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from mpicomm.activity.layout import OFFSET_IN_TEXT, filled
from mpicomm.collectives.gpu.algorithms.base import with_place
from mpicomm.collectives.gpu.algorithms.steps import Copy
from mpicomm.collectives.gpu.choose import AlgorithmChoice
from mpicomm.collectives.gpu.filled_plan import FilledPlan
from mpicomm.collectives.gpu.fillings import NO_END, ByLength, Fillings, filling_at
from mpicomm.collectives.gpu.growing_scratch import GrowingScratch
from mpicomm.collectives.gpu.launches_around import finish_launches
from mpicomm.collectives.operations import Shape
from mpicomm.collectives.signature import Signature, counted_hash
from mpicomm.mpi.plain_arrays import is_counted
from mpicomm.mpi.span import Span
from mpicomm.symmetric.registry import Mapped, Mappings


class FormPlan(FilledPlan):
    """The calls of a form. It chooses the algorithm for a call as `choose` does."""

    collective = True

    def __init__(self, signature: Signature, fillings: Fillings) -> None:
        self.words = self._text = signature.text_without_count()
        self.count = 0
        self.offset: int | None = None
        """The text and the numbers of the filled-in call, for `CallLog.post`."""
        self._hash = signature.hash_without_count
        self._why = "by the table" if fillings.asked == "auto" else f'algorithm="{fillings.asked}"'
        self._into_any = fillings.by_length(symmetric=False)
        self._filling = self._into_any[1][0]

    @abstractmethod
    def takes(self, sent: Any, received: Any) -> bool:
        """Return whether buffers of these kinds have the fields that `fill` reads. Its arguments are as there."""

    @property
    def text(self) -> str:
        return filled(self.words, self.count, self.offset or 0)

    @property
    def choice(self) -> AlgorithmChoice:
        """The algorithm of the filled-in call."""
        return AlgorithmChoice(self._filling.name, self._why)


class EvenPlan(FormPlan):
    """The calls of a form with blocks of one length. ``mappings`` are the symmetric arrays."""

    def __init__(self, signature: Signature, fillings: Fillings, mappings: Mappings) -> None:
        super().__init__(signature, fillings)
        form = fillings.form
        self._mappings = mappings
        self._into_memory, self._memory_from = self._into_any, NO_END
        if form.has_common_output:
            self._into_memory = fillings.by_length(symmetric=True)
            self._memory_from = _first_difference(self._into_any, self._into_memory)
        self._unit_nbytes = form.itemsize
        self._send_nbytes, self._receive_nbytes = form.element_nbytes
        self._sent, self._received = form.blocks_sent, form.blocks_received
        self._array, self._into = 0, ""  # the symmetric array of the last call into one, and the text of such calls

    def takes(self, sent: Any, received: Any) -> bool:
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
                # The engine refuses buffers that overlap, and the same memory passed twice is another form.
                if send < receive + receive_nbytes and receive < send + send_nbytes:
                    return False
        else:
            nbytes = sent[1] // to * self._send_nbytes
            if nbytes * to != send_nbytes:
                return False
        if nbytes == 0:
            return False
        count = nbytes // self._unit_nbytes
        (begins, choices), memory = self._into_any, None
        if nbytes >= self._memory_from:
            memory = self._mappings.find(receive, receive_nbytes)
            if memory is not None:
                begins, choices = self._into_memory
        chosen = choices[bisect_right(begins, nbytes) - 1]
        filled = chosen.fill(send, receive, nbytes, counted_hash(self._hash, count), memory)
        if filled is None:
            return False
        self.launch = self.enqueue = chosen.launch_of(filled)
        self._filling, self.count = chosen, count
        self.words, self.offset = self._text, None
        if chosen.into_memory and memory is not None:
            self.words, self.offset = self._text_into(memory), memory.offset
        return True

    def _text_into(self, memory: Mapped) -> str:
        """Return the text of calls whose output lies in a symmetric array, without the offset there."""
        if memory.array != self._array:
            self._array, self._into = memory.array, with_place(self._text, memory.text_at(OFFSET_IN_TEXT))
        return self._into


class FinishedPlan(EvenPlan):
    """The calls of a form with an epilogue. If it converts, the reduction goes to ``scratch`` memory."""

    def __init__(self, signature: Signature, fillings: Fillings, mappings: Mappings, scratch: GrowingScratch) -> None:
        super().__init__(signature, fillings, mappings)
        assert fillings.form.epilogue is not None
        self._epilogue = finish = fillings.form.epilogue
        self._scratch = scratch
        self._receive_nbytes = self._unit_nbytes
        self._followed, self._node = fillings.followed, fillings.node
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
                return False  # a plan of the call makes more
            received = scratch.pointer, count
        if not super().fill(sent, received):
            return False
        if not self._filling.finishes:
            assert self.launch is not None
            reduced, node = Span(received[0], count), self._node
            launches = finish_launches(finish, reduced, node.team.faults, node.multiprocessors)
            self.launch = self.enqueue = self._followed(self.launch, launches)
        return True


class BlocksPlan(FormPlan):
    """The calls of a form with blocks of any lengths and places."""

    _add_sent: Callable[[Any, list[int], list[int]], bool]
    _add_received: Callable[[Any, list[int], list[int]], bool]

    def __init__(self, signature: Signature, fillings: Fillings, scratch: GrowingScratch) -> None:
        super().__init__(signature, fillings)
        form = fillings.form
        self._element_nbytes = form.element_nbytes
        self._counted = form.sends == "counted"
        self._vectors = form.sends in ("vector", "counted", "typed"), form.receives in ("vector", "typed")
        self._singles = form.sends == "one", form.receives == "one"
        self._sends, self._receives = (part > 0 for part in form.parts)
        # The numbers of the blocks that this rank sends to itself and takes from itself, if it has both.
        sent, received = form.parts
        self._own = None
        if sent and received:
            self._own = form.rank * self._vectors[0], sent + form.rank * self._vectors[1]
        self._add_sent, self._add_received = (
            partial(_add_blocks, form.size, nbytes)
            if vector
            else partial(_add_whole, nbytes)
            if single
            else _add_nothing
            for nbytes, vector, single in zip(form.element_nbytes, self._vectors, self._singles, strict=True)
        )
        self._followed, self._moves = fillings.followed, form.moves
        if form.moves:
            self._add_received = partial(_add_result, scratch, form.rank)
        self._call_hash = counted_hash(self._hash, None)

    def takes(self, sent: Any, received: Any) -> bool:
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
        bounds, choices = self._into_any
        chosen = choices[bisect_right(bounds, longest) - 1]
        filled = chosen.fill(lengths, begins, longest, call_hash)
        if filled is None:
            return False
        self.launch = self.enqueue = chosen.launch_of(filled)
        if self._moves and begins[-1]:
            move = Copy(sent[0], begins[-1], lengths[-1], local=True)
            self.launch = self.enqueue = self._followed(self.launch, [move])
        self._filling = chosen
        self.private_nbytes = chosen.template.private_nbytes
        return True


class NeighborPlan(BlocksPlan):
    """The calls of a form with blocks for neighbours. A neighbour is another rank or no rank."""

    def __init__(self, signature: Signature, fillings: Fillings, scratch: GrowingScratch) -> None:
        super().__init__(signature, fillings, scratch)
        form = fillings.form
        assert form.neighborhood is not None
        self._shapes = form.operation.send, form.operation.receive
        peers = form.neighborhood.destinations, form.neighborhood.sources
        self._add_sent, self._add_received = (
            partial(_add_for_neighbors, *of_buffer, form.size)
            for of_buffer in zip(peers, self._shapes, form.element_nbytes, strict=True)
        )

    def takes(self, sent: Any, received: Any) -> bool:
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
    """Add the scratch memory for the result, if there is enough. A plan of the call makes more."""
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
        usual, chosen = (filling_at(nbytes, by_length) for by_length in (into_any, into_memory))
        if chosen.into_memory or chosen is not usual:
            return nbytes
    return NO_END


def form_plan(signature: Signature, fillings: Fillings, mappings: Mappings, scratch: GrowingScratch) -> FormPlan:
    """Return the plan of all calls of a form, which differ from ``signature`` only in the count."""
    if fillings.form.epilogue is not None:
        return FinishedPlan(signature, fillings, mappings, scratch)
    if fillings.form.is_even:
        return EvenPlan(signature, fillings, mappings)
    return (BlocksPlan if fillings.form.neighborhood is None else NeighborPlan)(signature, fillings, scratch)
