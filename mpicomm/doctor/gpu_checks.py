"""Checks of GPUs: whether ranks see them, share them, and open each other's memory."""

from __future__ import annotations

from mpicomm.doctor.check import Check, Job, by_machine, having
from mpicomm.errors import name_ranks


def driver(job: Job) -> list[str]:
    """There is an NVIDIA driver, but a rank cannot use its GPUs."""
    reasons: dict[str, list[int]] = {}
    for one in job:
        newer = [name for name in one.cupy if one.driver_cuda and _cuda_of(name) > one.driver_cuda]
        if len(one.cupy) > 1:
            reason = f"several CuPys are installed and overwrite each other: {', '.join(one.cupy)}"
        elif newer:
            reason = f"{newer[0]} needs a newer driver than this one, which is for CUDA {one.driver_cuda}"
        elif one.driver and not one.gpus:
            reason = one.no_gpu_reason
        else:
            continue
        reasons.setdefault(reason, []).append(one.rank)
    return [f"{name_ranks(found)}: {reason}" for reason, found in reasons.items()]


def _cuda_of(cupy: str) -> int:
    """Return the CUDA that a distribution of CuPy is for, or 0 for a build from source."""
    return int(cupy.removeprefix("cupy-cuda").removesuffix("x")) if cupy.startswith("cupy-cuda") else 0


def visible(job: Job) -> list[str]:
    """A rank does not see the GPU of another rank of its machine."""
    found = []
    for machine in by_machine(job):
        for one in machine:
            seen = {gpu.uuid for gpu in one.gpus}
            hidden = [peer.rank for peer in machine if peer.memory.uuid and peer.memory.uuid not in seen]
            if seen and hidden:
                mask = one.variables.get("CUDA_VISIBLE_DEVICES")
                how = "the launcher hides it" if mask is None else f"CUDA_VISIBLE_DEVICES={mask} hides it"
                found.append(f"rank {one.rank} does not see the GPU of {name_ranks(hidden)}, because {how}")
    return found


def shared(job: Job) -> list[str]:
    """Ranks share a GPU without the multi-process service."""
    users: dict[str, list[int]] = {}
    for one in job:
        if one.memory.uuid and not one.shared_service:
            users.setdefault(one.memory.uuid, []).append(one.rank)
    return [
        f"{name_ranks(found)} share a GPU, and NVIDIA's multi-process service does not run, so their kernels take turns"
        for found in users.values()
        if len(found) > 1
    ]


def instances(job: Job) -> list[str]:
    """Ranks are on several MIG instances."""
    found = []
    for machine in by_machine(job):
        users = {
            one.memory.uuid: one.rank
            for one in machine
            if any(gpu.uuid == one.memory.uuid and " MIG " in gpu.name for gpu in one.gpus)
        }
        if len(users) > 1:
            found.append(f"{name_ranks(list(users.values()))} use different MIG instances, which share no memory")
    return found


def windows(job: Job) -> list[str]:
    """WSL2 does not share GPU memory."""
    found = having(job, lambda one: "microsoft" in one.kernel.lower() and bool(one.memory.rejected or one.memory.error))
    return [f"{name_ranks(found)}: the driver of Windows below WSL2 refuses to share GPU memory"] if found else []


def access(job: Job) -> list[str]:
    """GPUs of ranks cannot address each other's memory."""
    found = []
    for machine in by_machine(job):
        for one in machine:
            for own in one.gpus:
                peers = [peer.rank for peer in machine if peer.memory.uuid in own.unreachable]
                if own.uuid == one.memory.uuid and peers:
                    found.append(
                        f"the GPU of rank {one.rank}, {own.name}, has no peer access to the GPU of {name_ranks(peers)}"
                    )
    return found


def memory(job: Job) -> list[str]:
    """Ranks cannot open each other's memory, or not in the best way."""
    explained = any(check(job) for check in (visible, instances, windows, access))
    reasons: dict[str, list[int]] = {}
    for one in job:
        if one.memory.error:
            reasons.setdefault(one.memory.error, []).append(one.rank)
        elif "ipc" in one.memory.rejected and not explained:
            differ = [name for name in ("ipc", "pid") if len({peer.namespaces.get(name) for peer in job}) > 1]
            why = f" (the ranks are in different {' and '.join(differ)} namespaces)" if differ else ""
            reasons.setdefault(f"CUDA IPC is refused{why}: {one.memory.rejected['ipc']}", []).append(one.rank)
    return [f"{name_ranks(found)}: {reason}" for reason, found in reasons.items()]


def pytorch(job: Job) -> list[str] | None:
    """PyTorch allocates memory that no peer can open."""
    found, setting, names = [], "backend:cudaMallocAsync", ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    if not any(one.torch or any(name in one.variables for name in names) for one in job):
        return None
    for name in names:
        having_it = having(job, lambda one, n=name: setting in one.variables.get(n, "").replace(" ", ""))  # type: ignore[misc]
        if having_it:
            found.append(f"{name} on {name_ranks(having_it)} has {setting}: no peer can open such memory")
    return found


CHECKS = (
    Check(
        "driver",
        "no GPU is unused because a driver or package is missing",
        '`pip uninstall cupy-cuda12x cupy-cuda13x`, then `pip install -e ".[cuda13]"` (or cuda12, as `nvidia-smi` '
        "shows); `docker run --gpus all ...`",
        driver,
    ),
    Check(
        "visible",
        "each rank sees the GPUs of its peers",
        "`unset CUDA_VISIBLE_DEVICES`; in Slurm `--gpus-per-node` in place of `--gpus-per-task` and `--gpu-bind`",
        visible,
    ),
    Check(
        "shared",
        "no ranks take turns on a GPU",
        "`mpirun -np` with one rank per GPU, or `nvidia-cuda-mps-control -d`",
        shared,
    ),
    Check(
        "mig",
        "no ranks are on different MIG instances",
        "`sudo nvidia-smi -i GPU -mig 0`, or all ranks on one instance",
        instances,
    ),
    Check(
        "wsl",
        "no driver of Windows keeps GPU memory from ranks",
        "Linux itself, or `MPICOMM_HANDLE=staged`",
        windows,
    ),
    Check(
        "access",
        "each GPU has access to the GPUs of its peers",
        "`nvidia-smi topo -p2p r` shows the reason; switch ACS and the IOMMU off in the BIOS (`iommu=off`), or use "
        "`MPICOMM_HANDLE=staged`",
        access,
    ),
    Check(
        "memory",
        "ranks open each other's memory in the best way",
        "`docker run --ipc=host --pid=host ...`, or `MPICOMM_HANDLE=fd`; `python -m mpicomm.info` shows all reasons",
        memory,
    ),
    Check(
        "pytorch",
        "PyTorch allocates memory that peers can open",
        "`export PYTORCH_CUDA_ALLOC_CONF=backend:native`",
        pytorch,
        nothing="no rank has PyTorch, or a setting for it",
    ),
)
