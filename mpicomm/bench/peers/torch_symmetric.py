"""PyTorch's symmetric memory: its one-shot and two-shot all-reduce. At each size the faster one counts."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from mpicomm.api.communicator import Communicator
from mpicomm.bench.machine import Call, Machine
from mpicomm.bench.operations import Case, CaseBuffers
from mpicomm.bench.peers.base import UnsupportedError, view_bytes
from mpicomm.bench.peers.torch_group import begin_group
from mpicomm.devices.cuda.driver import cuda_major


def missing() -> str | None:
    """Return the package to install, or None. Local."""
    if importlib.util.find_spec("torch") is None:
        return "not installed: pip install torch"
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is without CUDA: install one that is built for CUDA {cuda_major()}"
    return None


class TorchSymmetric:
    """A `Peer`: PyTorch's operations on tensors that all ranks have mapped."""

    exact = False
    capturable = True
    result_at_front = True

    def __init__(self, comm: Communicator, machine: Machine) -> None:
        import torch
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric_memory

        self._torch, self._dist, self._memory = torch, dist, symmetric_memory
        self.version = str(torch.__version__)
        assert isinstance(comm.device, int)
        self._device = torch.device("cuda", comm.device)
        torch.cuda.set_device(self._device)
        # The group serves only for its store. NCCL starts with the first collective of a group, and there is no
        # collective.
        begin_group(comm)
        self._group = dist.group.WORLD.group_name
        torch.cuda.set_stream(torch.cuda.ExternalStream(machine.stream.ptr, device=self._device))
        self._tensors: list[Any] = []

    def allocate(self, nbytes: int) -> Any:
        tensor = self._memory.empty(nbytes, dtype=self._torch.uint8, device=self._device)
        self._memory.rendezvous(tensor, self._group)
        self._tensors.append(tensor)
        return view_bytes(tensor.data_ptr(), nbytes, tensor)

    def prepare(self, case: Case, buffers: CaseBuffers) -> Mapping[str, Call]:
        """Return one-shot and two-shot; in place only two-shot."""
        if case.name != "allreduce" or case.op != "sum" or case.dtype.name not in ("float32", "bfloat16"):
            raise UnsupportedError("its kernels are for the sum of float32 and bfloat16 in allreduce")
        operations, group = self._torch.ops.symm_mem, self._group
        send, receive = self._tensor(case, buffers.send), self._tensor(case, buffers.receive)
        if case.in_place:
            return {"two_shot": lambda: operations.two_shot_all_reduce_(send, "sum", group)}
        calls: dict[str, Call] = {
            "one_shot": lambda: operations.one_shot_all_reduce_out(send, "sum", group, receive),
        }
        if case.size in (2, 4, 8):  # PyTorch compiles two-shot only for these sizes
            calls["two_shot"] = lambda: operations.two_shot_all_reduce_out(send, "sum", group, receive)
        return calls

    def close(self) -> None:
        self._tensors.clear()
        self._torch.cuda.set_stream(self._torch.cuda.default_stream(self._device))
        self._dist.destroy_process_group()

    def _tensor(self, case: Case, array: Any) -> Any:
        """Return the part of a tensor with these bytes."""
        offsets = ((tensor, int(array.data.ptr) - tensor.data_ptr()) for tensor in self._tensors)
        tensor, start = next((tensor, start) for tensor, start in offsets if 0 <= start < tensor.nbytes)
        return tensor[start : start + array.nbytes].view(getattr(self._torch, case.dtype.name))
