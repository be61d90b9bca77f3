"""Functions that PyTorch compiles give the results of uncompiled functions."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.helpers.inputs.torch_cases import Case, Op, reduced, require_same


def require_compiled(world: dist.ProcessGroup, backend: str) -> None:
    case = Case(world)
    name = world.group_name

    def calculate(given: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(2 * given, "sum", name)
        whole = functional.all_gather_tensor(total + 1, 0, name)
        return functional.reduce_scatter_tensor(whole - 1, "max", 0, name)

    compiled = torch.compile(calculate, backend=backend, fullgraph=True)
    for salt in range(3):
        expected = 2 * reduced(case.all(6, 5, salt=salt), Op.SUM)
        require_same([compiled(case.own(6, 5, salt=salt))], [expected])


def test_functional_collectives(world: dist.ProcessGroup) -> None:
    require_compiled(world, "aot_eager")


@pytest.mark.gpu_alone
@pytest.mark.skipif(not find_spec("triton"), reason="PyTorch compiles for GPUs with Triton")
def test_functional_collectives_beside_compiled_kernels(world: dist.ProcessGroup) -> None:
    require_compiled(world, "inductor")
