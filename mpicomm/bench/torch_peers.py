"""PyTorch as a peer: symmetric memory, its fused products, and NCCL's ``all_to_all_single``."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpicomm.api.communicator import Communicator
from mpicomm.bench.measure import Call, Machine, UnsupportedError
from mpicomm.bench.operations import Case, CaseBuffers
from mpicomm.bench.peers import Peer, view_bytes
from mpicomm.cli import options as command_line
from mpicomm.devices.cuda.driver import cuda_major


class TorchGroup(Peer):
    """PyTorch's default group, with NCCL, over the ranks of ``comm``. Its calls go on the machine's stream.

    NCCL starts with the first collective of the group. ``options`` go to ``init_process_group``. If rank 0 cannot serve
    the store of the group, all ranks raise RuntimeError. Creation is collective, and blocks.
    """

    def __init__(self, comm: Communicator, machine: Machine, **options: Any) -> None:
        import torch
        import torch.distributed as dist

        super().__init__(comm, machine)
        self._torch, self._dist = torch, dist
        self.version = str(torch.__version__)
        assert isinstance(comm.device, int)
        self._device = torch.device("cuda", comm.device)
        torch.cuda.set_device(self._device)
        stores: list[Any] = []

        def serve() -> int:
            # The store must not wait for the other ranks, because they do not know its port yet.
            stores.append(dist.TCPStore("127.0.0.1", 0, comm.size, True, wait_for_workers=False))
            return int(stores[0].port)

        port = command_line.on_first_rank(comm, serve)
        store = stores[0] if stores else dist.TCPStore("127.0.0.1", port, comm.size, False)
        dist.init_process_group("nccl", store=store, rank=comm.rank, world_size=comm.size, **options)
        self._group = dist.group.WORLD.group_name
        torch.cuda.set_stream(torch.cuda.ExternalStream(machine.stream.ptr, device=self._device))

    @staticmethod
    def missing() -> str | None:
        if importlib.util.find_spec("torch") is None:
            return "not installed: pip install torch"
        import torch

        if torch.version.cuda is None:
            return f"torch {torch.__version__} is without CUDA: install one that is built for CUDA {cuda_major()}"
        return None

    def close(self) -> None:
        self._torch.cuda.set_stream(self._torch.cuda.default_stream(self._device))
        self._dist.destroy_process_group()


class TorchSymmetric(TorchGroup):
    """One-shot and two-shot all-reduce on tensors that all ranks have mapped. The faster one counts."""

    def __init__(self, comm: Communicator, machine: Machine) -> None:
        super().__init__(comm, machine)
        self._memory = importlib.import_module("torch.distributed._symmetric_memory")
        self._tensors: list[Any] = []

    def allocate(self, nbytes: int) -> Any:
        tensor = self._memory.empty(nbytes, dtype=self._torch.uint8, device=self._device)
        self._memory.rendezvous(tensor, self._group)
        self._tensors.append(tensor)
        return view_bytes(tensor.data_ptr(), nbytes, tensor)

    def prepare(self, case: Case, buffers: CaseBuffers) -> Mapping[str, Call]:
        """Return one-shot and two-shot; in place only two-shot."""
        if case.operation.name != "allreduce" or case.op != "sum" or case.dtype.name not in ("float32", "bfloat16"):
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
        super().close()

    def _tensor(self, case: Case, array: Any) -> Any:
        """Return the part of a tensor with these bytes."""
        offsets = ((tensor, int(array.data.ptr) - tensor.data_ptr()) for tensor in self._tensors)
        tensor, start = next((tensor, start) for tensor, start in offsets if 0 <= start < tensor.nbytes)
        return tensor[start : start + array.nbytes].view(getattr(self._torch, case.dtype.name))


class FusedTorch(TorchGroup):
    """The fused operators of PyTorch's symmetric memory."""

    def __init__(self, comm: Communicator, machine: Machine) -> None:
        super().__init__(comm, machine)
        importlib.import_module("torch.distributed._symmetric_memory")  # defines the operators

    def product(self, kind: str, a: Any, b: Any) -> tuple[Call, Callable[[], Any]]:
        """Return a call of a product with a collective, and a function that returns the result of the last call."""
        group, operators = self._group, self._torch.ops.symm_mem
        results: list[Any] = [None]

        def gather() -> None:
            results[0] = operators.fused_all_gather_matmul(a, [b], 0, group)[1][0]

        def scatter() -> None:
            results[0] = operators.fused_matmul_reduce_scatter(a, b, "sum", 0, group)

        calls = {"allgather_matmul": gather, "matmul_reduce_scatter": scatter}
        if kind not in calls:
            raise UnsupportedError("PyTorch has no such operator")
        return calls[kind], lambda: results[0]


class TorchNccl(TorchGroup):
    """NCCL's exchange of rows. The rows of a rank lie in its buffer by their target, so nothing is packed or sorted."""

    def __init__(self, comm: Communicator, machine: Machine) -> None:
        import torch

        os.environ["NCCL_NVLS_ENABLE"] = "0"  # PyTorch passes no configuration of it
        super().__init__(comm, machine, device_id=torch.device("cuda", comm.device))
        self.version = f"torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        self._size = comm.size

    def calls(self, counts: Sequence[int], tokens: int, hidden: int) -> dict[str, Call]:
        """Return a dispatch with counts through the host, a combine with known counts, and an even exchange.

        ``counts`` are the rows of this rank for each rank, at most ``tokens`` with ``hidden`` elements. Collective.
        """
        torch, dist = self._torch, self._dist
        shape = (self._size * tokens, hidden)
        sent, taken = (torch.zeros(shape, dtype=torch.bfloat16, device=self._device) for _ in range(2))
        mine = torch.tensor(counts, device=self._device)
        theirs = torch.empty_like(mine)

        def dispatch() -> None:
            dist.all_to_all_single(theirs, mine)
            out, back = theirs.tolist(), mine.tolist()
            dist.all_to_all_single(taken[: sum(out)], sent[: sum(back)], out, back)

        dispatch()
        known = theirs.tolist()

        def combine() -> None:
            dist.all_to_all_single(sent[: sum(counts)], taken[: sum(known)], counts, known)

        return {"dispatch": dispatch, "combine": combine, "even": lambda: dist.all_to_all_single(taken, sent)}
