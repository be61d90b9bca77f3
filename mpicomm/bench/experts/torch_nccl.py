"""NCCL through PyTorch: ``all_to_all_single`` of rows, with counts that the host learns first, and with even counts."""

from __future__ import annotations

from mpicomm.api.communicator import Communicator
from mpicomm.bench.experts.routes import Routes
from mpicomm.bench.machine import Call
from mpicomm.bench.peers.torch_group import begin_group


class TorchNccl:
    """A process group of NCCL. The rows of a rank lie in its buffer by their target, so nothing is packed or sorted."""

    def __init__(self, comm: Communicator, stream: int) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        assert isinstance(comm.device, int)
        self._device = torch.device("cuda", comm.device)
        torch.cuda.set_device(self._device)
        begin_group(comm, device_id=self._device)
        torch.cuda.set_stream(torch.cuda.ExternalStream(stream, device=self._device))
        self.version = f"torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        self._size = comm.size

    def calls(self, routes: Routes) -> dict[str, Call]:
        """Return a dispatch with counts through the host, a combine with known counts, and an even exchange."""
        torch, dist = self._torch, self._dist
        counts = [int(routes.goes_to(rank).sum()) for rank in range(self._size)]
        most = routes.tokens
        shape = (self._size * most, routes.hidden)
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

        def even() -> None:
            dist.all_to_all_single(taken, sent)

        return {"dispatch": dispatch, "combine": combine, "even": even}

    def close(self) -> None:
        """End the process group."""
        self._torch.cuda.set_stream(self._torch.cuda.default_stream(self._device))
        self._dist.destroy_process_group()
