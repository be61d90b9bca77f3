"""Works and values of futures that PyTorch's code in C++ takes from Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from mpicomm.torch.works import Work


def install_conversions() -> None:
    """Let the functions of PyTorch that keep a work in C++ get a work that lives there. Local.

    Python frees its part of a work with the last reference in Python, and C++ holds no such reference. PyTorch takes
    care of works that its code in C++ gets from a group, but not of works that Python hands to C++. So this replaces
    the functions that hand over works: of ``DistributedDataParallel.join`` and of ``wait_tensor``. It also replaces the
    function that finds the tensors of a future, because a step of DDP calls it twice for each bucket.
    """
    reducer: Any = c10d.Reducer
    torch._jit_internal._extract_tensors = _with_tensors_at_once(torch._jit_internal._extract_tensors)
    reducer._set_forward_pass_work_handle = _with_kept_works(reducer._set_forward_pass_work_handle)
    c10d._register_work = _with_kept_works(c10d._register_work)


def _with_tensors_at_once(extract: Callable[[Any], list[torch.Tensor]]) -> Callable[[Any], list[torch.Tensor]]:
    """Return a function that finds the tensors in the value of a future. PyTorch's own function pickles the value."""

    @wraps(extract)
    def tensors_of(value: Any) -> list[torch.Tensor]:
        listed = value if type(value) is list else [value]
        for each in listed:
            if not isinstance(each, torch.Tensor):
                return extract(value)
        return listed

    return tensors_of


def _with_kept_works(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def convert(*given: Any, **named: Any) -> Any:
        return call(*map(_kept, given), **{name: _kept(each) for name, each in named.items()})

    return convert


def _kept(given: Any) -> Any:
    return given.kept_by_cpp() if isinstance(given, Work) else given
