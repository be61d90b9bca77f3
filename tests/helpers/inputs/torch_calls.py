"""Calls of torch.distributed with their tensors, which lie in memory in many ways, and with the right results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.inputs.torch_cases import FLOATS8, Case, Op, reduced, require_same

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Function:
    """A function of ``torch.distributed``, whose ``call`` gets the `Call`, what receives, and what is sent."""

    name: str
    call: Callable[[Call, Any, Any], dist.Work | None]
    sends: bool = False
    """Whether a rank sends a block to each rank, and not one to all."""
    gathers: bool = False
    """Whether a rank receives a block from each rank, and not one."""
    reduces: bool = False
    root: str = ""
    """What only the root does, if there is one."""
    joined: bool = False
    """Whether the blocks are parts of one tensor, and not a list."""
    divides: bool = False
    """Whether the blocks may have different sizes."""
    coalesces: bool = False

    @property
    def in_place(self) -> bool:
        """Whether the function has one tensor, which is sent and receives."""
        return not (self.sends or self.gathers)


def gather_single(call: Call, got: Any, sent: Any) -> dist.Work | None:
    """The call of `torch.distributed.gather_single`, which versions up to 2.14 lack."""
    options = dist.GatherOptions()
    options.rootRank, options.asyncOp = call.root, call.async_op
    work = call.group.gather_single(call.empty(0) if got is None else got, sent, options)
    return work if call.async_op else None


def all_to_all_single(call: Call, got: Any, sent: Any) -> dist.Work | None:
    splits = (call.rows_of("got"), call.rows_of("sent")) if call.uneven else (None, None)
    return dist.all_to_all_single(got, sent, *splits, **call.options)


def two_buffers(call: Call, got: Any, sent: Any) -> dist.Work | None:
    """The call of a function that takes what receives, what is sent, and the operation if it reduces."""
    op = [call.op] if call.function.reduces else []
    work: dist.Work | None = getattr(dist, call.function.name)(got, sent, *op, **call.options)
    return work


def function(name: str, call: Callable[[Call, Any, Any], dist.Work | None], *facts: str, root: str = "") -> Function:
    """Return the function of that name, with the facts that hold for it."""
    holds: dict[str, Any] = dict.fromkeys(facts, True)
    return Function(name, call, root=root, **holds)


FUNCTIONS = [
    function("all_reduce", lambda call, got, _: dist.all_reduce(got, call.op, **call.options), "reduces", "coalesces"),
    function(
        "reduce",
        lambda call, got, _: dist.reduce(got, op=call.op, group_dst=call.root, **call.options),
        "reduces",
        root="receives",
    ),
    function("broadcast", lambda call, got, _: dist.broadcast(got, group_src=call.root, **call.options), root="sends"),
    function("all_gather", two_buffers, "gathers", "divides"),
    function("all_gather_into_tensor", two_buffers, "gathers", "joined", "coalesces"),
    function(
        "gather",
        lambda call, got, sent: dist.gather(sent, got, group_dst=call.root, **call.options),
        *("gathers", "divides"),
        root="receives",
    ),
    function("gather_single", gather_single, "gathers", "joined", root="receives"),
    function(
        "scatter",
        lambda call, got, sent: dist.scatter(got, sent, group_src=call.root, **call.options),
        *("sends", "divides"),
        root="sends",
    ),
    function("reduce_scatter", two_buffers, "sends", "reduces", "divides"),
    function("reduce_scatter_tensor", two_buffers, "sends", "reduces", "joined", "coalesces"),
    function("all_to_all", two_buffers, "sends", "gathers", "divides"),
    function("all_to_all_single", all_to_all_single, "sends", "gathers", "joined", "divides"),
]


def plain(case: Call, rows: Sequence[int]) -> Tensors:
    return [case.empty(count, case.columns) for count in rows]


def turned(case: Call, rows: Sequence[int]) -> Tensors:
    return [case.empty(case.columns, count).t() for count in rows]


def with_gradients(case: Call, rows: Sequence[int]) -> Tensors:
    can = case.dtype.is_floating_point or case.dtype.is_complex
    return [tensor.requires_grad_(can) for tensor in plain(case, rows)]


def parts(case: Call, rows: Sequence[int]) -> Tensors:
    return list(case.empty(sum(rows), case.columns).split(list(rows)))


def from_the_last_to_the_first(case: Call, rows: Sequence[int]) -> Tensors:
    return parts(case, rows[::-1])[::-1]


def with_gaps(case: Call, rows: Sequence[int]) -> Tensors:
    return [part[:-1] for part in parts(case, [count + 1 for count in rows])]


def of_two_allocations(case: Call, rows: Sequence[int]) -> Tensors:
    both = with_gaps(case, rows), from_the_last_to_the_first(case, rows)
    return [both[index % 2][index] for index in range(len(rows))]


def half_an_element_apart(case: Call, rows: Sequence[int]) -> Tensors:
    if case.device.type != "cpu":  # PyTorch makes no such tensors itself
        return plain(case, rows)
    nbytes = case.dtype.itemsize * case.columns
    memory, place, made = bytearray((sum(rows) + len(rows) + 1) * (nbytes + case.dtype.itemsize)), 0, Tensors()
    for count in rows:
        numel = count * case.columns
        given = {"count": numel, "offset": place} if numel else {"count": 1}
        made.append(torch.frombuffer(memory, dtype=case.dtype, **given)[:numel].view(count, case.columns))
        place += count * nbytes + case.dtype.itemsize // 2
    return made


def every_second_column(case: Call, rows: Sequence[int]) -> Tensors:
    return list(case.empty(sum(rows), 2 * case.columns)[:, ::2].split(list(rows)))


def with_the_other_sign(case: Call, rows: Sequence[int]) -> Tensors:
    can = case.dtype.is_signed and case.dtype not in FLOATS8
    return [torch._neg_view(part) if can else part for part in parts(case, rows)]


Layout = Callable[["Call", Sequence[int]], Tensors]
FOR_ONE: list[Layout] = [plain, turned, with_gradients]
FOR_LISTS: list[Layout] = [
    *(*FOR_ONE, parts, from_the_last_to_the_first, with_gaps, of_two_allocations),
    *(half_an_element_apart, every_second_column, with_the_other_sign),
]


@dataclass
class Call(Case):
    """A call with its tensors. ``in_one_memory`` is the place of the output in the input, or the other way round."""

    function: Function = FUNCTIONS[0]
    op: Any = Op.SUM
    root: int = 0
    base: int = 2
    columns: int = 3
    uneven: bool = False
    in_one_memory: str = ""
    coalesced: bool = False
    layouts: tuple[int, int] = (0, 0)
    got: Tensors | None = field(init=False)
    sent: Tensors | None = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.root %= self.size
        is_root, root = self.rank == self.root, self.function.root
        self.receives, self.gives = is_root or root != "receives", is_root or root != "sends"
        got, sent = self.rows_of("got"), self.rows_of("sent")
        many = self.function.gathers, self.function.sends
        self.got, self.sent = (
            self._laid_out(rows, layout, listed) if there or self.function.in_place else None
            for rows, layout, listed, there in zip(
                (got, sent), self.layouts, many, (self.receives, self.gives), strict=True
            )
        )
        if self.function.in_place:
            self.sent = self.got
        elif self.in_one_memory and self.got and self.sent:
            self._share(got, sent)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of all functions. PyTorch's coalescing manager says whether its calls are asynchronous."""
        return {"group": self.group, "async_op": self.async_op and not self.coalesced}

    def _laid_out(self, rows: list[int], layout: int, listed: bool) -> Tensors:
        layouts = FOR_LISTS if listed and not self.function.joined else FOR_ONE
        return layouts[layout % len(layouts)](self, [sum(rows)] if self.function.joined else rows)

    def _share(self, got: list[int], sent: list[int]) -> None:
        """Put what receives and what is sent into one memory."""
        assert self.got and self.sent
        if self.in_one_memory.isdecimal():  # the outputs are in the other order, and begin so many elements later
            shift, place = int(self.in_one_memory), 2 * (max(*got, *sent) + 1) * self.columns
            memory = self.empty(place * self.size + shift)

            def at(start: int, count: int) -> torch.Tensor:
                return memory[start:][: count * self.columns].view(count, self.columns)

            self.sent = [at(place * index, count) for index, count in enumerate(sent)]
            self.got = [at(place * (self.size - 1 - index) + shift, count) for index, count in enumerate(got)]
            return
        index = self.rank if self.in_one_memory == "own block" else 0
        whole = self.empty(self.size * self.base, self.columns)
        blocks = list(whole.chunk(self.size)) if self.base else [whole] * self.size
        listed = [whole] if self.function.joined else blocks
        self.got = listed if self.function.gathers else [blocks[index]]
        self.sent = listed if self.function.sends else [blocks[index]]

    def rows_of(self, what: str) -> list[int]:
        """Return the rows of each block that is ``got`` or ``sent``."""
        ranks = range(self.size)
        if what == "got":
            return [self._rows(peer, self.rank) for peer in (ranks if self.function.gathers else [self.root])]
        return [self._rows(self.rank, peer) for peer in (ranks if self.function.sends else [0])]

    def _rows(self, sender: int, receiver: int) -> int:
        if not self.uneven:
            return self.base
        by_sender, by_receiver = not self.function.reduces, self.function.sends
        return self.base + (sender * by_sender + 2 * receiver * by_receiver) % 3

    def _block(self, sender: int, receiver: int, salt: int) -> torch.Tensor:
        """Return what one rank sends to another."""
        peer = receiver if self.function.sends else 0
        return self.of(sender, self._rows(sender, peer), self.columns, salt=self.size * salt + peer)

    def _given(self, salt: int) -> Tensors:
        """Return what this rank sends."""
        return [self._block(self.rank, peer, salt) for peer in range(self.size if self.function.sends else 1)]

    def fill(self, salt: int) -> None:
        """Give the tensors of this rank new contents."""
        if self.sent is not None:
            put(self.sent, self._given(salt))

    def begin(self) -> dist.Work | None:
        """Make the call."""

        def spelled(tensors: Tensors | None, many: bool) -> Any:
            return tensors if tensors is None or (many and not self.function.joined) else tensors[0]

        got, sent = spelled(self.got, self.function.gathers), spelled(self.sent, self.function.sends)
        return self.function.call(self, got, sent)

    def want_gradients(self) -> None:
        """Let autograd want gradients of the outputs, as after a functional collective has begun."""
        for tensor in self.got or ():
            tensor.requires_grad_()

    def check(self, salt: int) -> None:
        """Assert that the outputs have the result, and that what was only sent has stayed."""
        if self.receives:
            assert self.got is not None
            senders = [self.root] if self.function.root == "sends" else range(self.size)
            came = [self._block(sender, self.rank, salt) for sender in senders]
            expected = [self._reduced(came)] if self.function.reduces else came
            got = contents(self.got)
            expected = [torch.cat(expected)] if self.function.joined and self.function.gathers else expected
            # The quotient of a complex and a real number has other last bits if both are divided as complex numbers.
            if self.dtype.is_complex and self.op == Op.AVG:
                torch.testing.assert_close(got, expected, check_device=False)
            else:
                require_same(got, expected)
            assert all(tensor.is_leaf for tensor in self.got)
        if self.sent is not None and not self.in_one_memory and not (self.function.in_place and self.receives):
            given = self._given(salt)
            given = [torch.cat(given)] if self.function.joined else given
            require_same(contents(self.sent), given)

    def _reduced(self, tensors: Tensors) -> torch.Tensor:
        return reduced(tensors, Op.SUM) / 2 if is_half(self.op) else reduced(tensors, self.op)


def put(tensors: Tensors, values: Tensors) -> None:
    """Copy the values into the tensors, of which one may have the rows of all values."""
    with torch.no_grad():
        for tensor, value in zip(tensors, values if len(tensors) > 1 else [torch.cat(values)], strict=True):
            tensor.copy_(value)


def contents(tensors: Tensors) -> Tensors:
    return [tensor.detach().resolve_neg().clone(memory_format=torch.contiguous_format) for tensor in tensors]


def is_half(op: Any) -> bool:
    return not isinstance(op, Op.RedOpType) and op.op == Op.PREMUL_SUM
