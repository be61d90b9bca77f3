"""The registration of the backend ``mpicomm`` with PyTorch, and the functions of PyTorch that it replaces."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from mpicomm.torch.groups import install_rendezvous_handler
from mpicomm.torch.process_group import ProcessGroup, create
from mpicomm.torch.training import AllreduceState, allreduce_hook
from mpicomm.torch.works import Work

NAME = "mpicomm"


def register() -> None:
    """Register the backend ``mpicomm`` for tensors of the host and of GPUs. Local. A second call does nothing.

    ``import mpicomm.torch`` calls it. PyTorch from 2.14 on also calls it when a program names the backend, because the
    package names this function as an entry point. But PyTorch reads the environment for the ranks before that. So
    without the import the program must set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """
    if hasattr(dist.Backend, NAME.upper()):
        return
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    # PyTorch from 2.15 on records the calls of a group in C++, unless the backend says that it records them itself. A
    # group in Python has no such calls, and PyTorch raises an error when it looks for them.
    recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(NAME)
    install_rendezvous_handler()
    for owner, name, replaced in (
        (c10d.Reducer, "_set_forward_pass_work_handle", _with_kept_works),  # of `DistributedDataParallel.join`
        (c10d, "_register_work", _with_kept_works),  # of `wait_tensor`
        (torch._jit_internal, "_extract_tensors", _with_quick_look),
        (DistributedDataParallel, "_register_builtin_comm_hook", _with_fp16_hook),
    ):
        function = getattr(owner, name, None)
        if function is not None:  # most of these are internal, so a version of PyTorch may lack them
            setattr(owner, name, replaced(function))


def _with_kept_works(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call``, a function that keeps a work in C++, for works of mpicomm.

    Python frees its part of a work with the last reference in Python, and C++ holds no such reference. PyTorch takes
    care of works that its code in C++ gets from a group, but not of works that Python hands to C++.
    """

    def kept(given: Any) -> Any:
        return given.for_cpp() if isinstance(given, Work) else given

    @wraps(call)
    def convert(*given: Any, **named: Any) -> Any:
        return call(*map(kept, given), **{name: kept(each) for name, each in named.items()})

    return convert


def _with_quick_look(look: Callable[[Any], list[torch.Tensor]]) -> Callable[[Any], list[torch.Tensor]]:
    """Return ``look``, which finds the tensors in the value of a future, faster for a tensor and a list of tensors.

    PyTorch's function pickles the value. A step of DDP calls it twice for each bucket, which takes as long as all else
    that the bucket needs of PyTorch. PyTorch loads the function at the first look, so nothing changes for a program
    that has looked before.
    """

    @wraps(look)
    def quick_look(value: Any) -> list[torch.Tensor]:
        listed = value if type(value) is list else [value]
        return listed if {*map(type, listed)} <= {torch.Tensor} else look(value)

    return quick_look


def _with_fp16_hook(register_builtin: Callable[..., None]) -> Callable[..., None]:
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
