"""The communication hook for DistributedDataParallel. PyTorch reads its annotations, so they must be objects."""

from collections.abc import Callable
from functools import wraps

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mpicomm.collectives.wire import Wire
from mpicomm.errors import InvalidUsageError
from mpicomm.torch.groups import group_of
from mpicomm.torch.known_calls import TensorCall
from mpicomm.torch.process_group import ProcessGroup

_AVG = dist.ReduceOp.AVG
_CODES = {torch.float8_e4m3fn: Wire("float8_e4m3fn"), torch.int8: Wire("int8")}


class AllreduceState:
    """The state of `allreduce_hook`: the group that averages, and the type of the elements that travel.

    ``group`` is a group of the backend ``mpicomm``, by default the group of all ranks. Without ``wire_dtype`` gradients
    travel in their type. With ``torch.bfloat16`` or ``torch.float16`` gradients of float32 travel in half of the bytes.
    Kernels add in float32 and round once. With ``torch.float8_e4m3fn`` or ``torch.int8`` gradients travel as codes of 8
    bits: see ``wire_dtype`` of `mpicomm.Communicator.Allreduce`, which also states the error. A NaN or an infinity
    makes its block of 128 elements NaN on all ranks, so ``torch.amp.GradScaler`` notices it. The constructor is local,
    and raises `InvalidUsageError` for other types and groups.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, wire_dtype: torch.dtype | None = None) -> None:
        if wire_dtype not in (None, torch.bfloat16, torch.float16, *_CODES):
            raise InvalidUsageError(
                f"wire_dtype={wire_dtype}: pass torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, or "
                "leave it out"
            )
        self.group = group_of(group)
        self.wire_dtype = wire_dtype
        self._wire = None if wire_dtype is None else _CODES.get(wire_dtype)
        self._converted: dict[int, torch.Tensor] = {}

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begin to average the gradients of ``bucket`` over all ranks; see `allreduce_hook`."""
        gradients = bucket.buffer()
        if self.wire_dtype in (None, gradients.dtype) or self._wire is not None:
            return _average(self.group, bucket, gradients, self._wire)
        converted, all_reduce = self._copy_of(bucket.index(), gradients), self.group.collectives.all_reduce

        def average_wire() -> None:
            converted.copy_(gradients)
            self.group.enqueue(all_reduce, (converted, _AVG, "bucket", None))
            gradients.copy_(converted)

        beside, call = _is_beside(bucket), TensorCall(average_wire)
        return self.group.future("average", call, (), gradients, [converted], beside=beside)

    def _copy_of(self, index: int, gradients: torch.Tensor) -> torch.Tensor:
        """Return the memory in which the gradients of a bucket travel. On GPUs it is collective for a new size."""
        converted = self._converted.get(index)
        if converted is None or converted.numel() != gradients.numel():  # the first backward pass has other buckets
            converted = self._converted[index] = self.group.allocate_tensor(
                gradients.numel(), dtype=self.wire_dtype, device=gradients.device
            )
        return converted


def _is_beside(bucket: dist.GradBucket) -> bool:
    """Return whether the call goes on a side stream. After the last bucket it would overlap with no other work."""
    return not bucket.is_last()


def _average(
    group: ProcessGroup, bucket: dist.GradBucket, gradients: torch.Tensor, wire: Wire | None = None
) -> torch.futures.Future[torch.Tensor]:
    given = gradients, _AVG, "bucket", wire
    call = group.collectives.all_reduce
    return group.future("average", call, given, gradients, beside=_is_beside(bucket))


def allreduce_hook(
    state: AllreduceState | dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a bucket over all ranks: ``model.register_comm_hook(state, allreduce_hook)``.

    *Collective*. It returns a future. The kernels divide after the sum, so no earlier pass over the gradients is
    needed, and float16 does not overflow within the sum. ``state`` is an `AllreduceState`, or a group for
    ``AllreduceState(group)``.
    """
    if not isinstance(state, AllreduceState):
        if not isinstance(state, dist.ProcessGroup | None):
            raise InvalidUsageError(
                f"state={state!r} is no state of allreduce_hook: pass None, a group, or AllreduceState(wire_dtype=...)"
            )
        return _average(group_of(state), bucket, bucket.buffer())
    return state.average(bucket)


def with_fp16_hook(register_builtin: Callable[..., None]) -> Callable[..., None]:
    """Return ``register_builtin`` of DDP, with `allreduce_hook` as the hook ``FP16_COMPRESS`` of groups of mpicomm.

    PyTorch's own hook, in C++, refuses the value of a future that Python has made.
    """

    @wraps(register_builtin)
    def register(model: DistributedDataParallel, comm_hook_type: dist.BuiltinCommHookType) -> None:
        group = model.process_group
        if comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS and isinstance(group, ProcessGroup):
            model.register_comm_hook(AllreduceState(group, wire_dtype=torch.float16), allreduce_hook)
        else:
            register_builtin(model, comm_hook_type)

    return register
