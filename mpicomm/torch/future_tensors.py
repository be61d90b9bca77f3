"""The tensors in the value of a future, for which PyTorch looks."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import _jit_internal


def install_quick_look() -> None:
    """Let PyTorch find the tensor of a value that is one tensor at once. Local.

    PyTorch looks for the tensors of a value when a future gets it, and DistributedDataParallel looks again when it
    takes it. Code in C++ pickles the value for this, which takes as long as all else that a bucket needs of PyTorch.
    PyTorch keeps the function at the first look, so later looks of a program that has looked before do not change.
    """
    look: Any = _jit_internal._extract_tensors

    @wraps(look)
    def quick_look(value: Any) -> list[torch.Tensor]:
        return [value] if type(value) is torch.Tensor else look(value)

    _jit_internal._extract_tensors = quick_look
