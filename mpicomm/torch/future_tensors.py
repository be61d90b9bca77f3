"""The tensors in the value of a future, for which PyTorch looks."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import _jit_internal


def install_quick_look() -> None:
    """Let PyTorch find the tensors of a value that is a tensor or a list of tensors at once. Local.

    PyTorch looks for the tensors when a future gets its value, and DistributedDataParallel looks again when it takes
    the value. PyTorch's function pickles the value, which takes as long as all else that a bucket needs of PyTorch.
    PyTorch loads the function at the first look, so nothing changes for a program that has looked before. The function
    is internal, so a version of PyTorch may lack it.
    """
    look: Any = getattr(_jit_internal, "_extract_tensors", None)
    if look is None:
        return

    @wraps(look)
    def quick_look(value: Any) -> list[torch.Tensor]:
        kind = type(value)
        if kind is torch.Tensor:
            return [value]
        return [*value] if kind is list and {*map(type, value)} == {torch.Tensor} else look(value)

    _jit_internal._extract_tensors = quick_look
