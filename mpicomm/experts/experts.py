"""Experts: the dispatch and the combine of a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import numpy as np

from mpicomm.api.communicator import Communicator
from mpicomm.cluster.agreement import require_same
from mpicomm.cluster.process import close_after
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.devices.host import HostBackend
from mpicomm.errors import InvalidUsageError
from mpicomm.experts import arrays
from mpicomm.experts.arrays import BY_EXPERT, BY_TOKEN, DTYPES, FLOAT32, WIRE, ExpertsConfig, Received
from mpicomm.experts.on_gpu import ExpertsLaunches, open_on_gpus
from mpicomm.experts.on_host import CombineArrays, DispatchArrays, HostExperts
from mpicomm.kernels.team import PACKET_NBYTES
from mpicomm.kernels.variant import Launch
from mpicomm.mpi.arguments import refuse_stream, require_same_device
from mpicomm.mpi.buffers import new_array, read, read_in_order
from mpicomm.mpi.types import name_of
from mpicomm.sharing.segments import SharedMemory
from mpicomm.windows.access_order import AccessOrder

_ID_TYPES = ("int64", "int32")


class Experts(AbstractContextManager["Experts"]):
    """Sends the tokens of all ranks to the ranks of their experts, and brings the results back.

    Construction is *collective* and blocking. All ranks pass the same arguments:

    - ``comm`` is a `Communicator`. On a GPU its ranks must map each other's memory, so they are on one node.
    - ``num_experts`` is the number of experts, at most 512. Each rank has a contiguous range of them. The first ranks
      have one more if the number does not divide evenly. A list gives the number of experts of each rank.
    - ``hidden`` is the length of a token, ``top_k`` the number of experts of a token, at most 32. A rank dispatches up
      to ``max_tokens`` tokens at once. ``dtype`` is ``bfloat16``, ``float16`` or ``float32``.
    - ``capacity`` is the most rows that a rank can receive. The default is the maximum: ``size * max_tokens * top_k``
      rows and the padding, or ``size * max_tokens`` rows in the layout ``"tokens"``. More rows are an error on all
      ranks.
    - The places of each expert begin at a multiple of ``alignment``.
    - ``layout`` is the layout of received tokens. In ``"experts"`` a token has a row for each of its experts on a rank,
      sorted by expert for a grouped GEMM. In ``"tokens"`` it has one row on a rank, with the experts and weights of its
      slots, and with indices of rows by expert. The second layout moves less memory, so large dispatches and combines
      are faster. With ``max_tokens`` of 256 or less it also has the lowest latency on GPUs.
    - With ``wire_dtype="float8_e4m3fn"`` tokens travel as fp8, with a scale in float32 for each 128 elements.
      `dispatch` quantizes them, or takes fp8 tokens with their scales. The sums of `combine` travel as ``dtype``. Then
      ``hidden`` is a multiple of 512.
    - On a GPU a launch has at most ``blocks`` blocks, each of at most 384 threads. `blocks` says how many it has.

    A dispatch and a combine each send a token once to each rank. On a GPU both are stream-ordered. They can be captured
    in CUDA graphs, and the routes may change between replays. Arrays of NumPy, or tensors in host memory, go through
    MPI, and the calls block. All ranks make the same calls in the same order.

    The memory lives until `close` or the communicator's ``Free``. ``comm.describe()`` shows it as "experts".

    The constructor raises the same error on all ranks: `InvalidUsageError` for bad arguments, or if the ranks differ in
    them; `HandleError` if memory cannot be allocated or opened; `CollectiveTimeoutError` if a rank does not come.

        x, ids = cp.ones((4, 8), "float32"), cp.zeros((4, 2), "int64")
        weights = cp.full((4, 2), 0.5, "float32")
        with mpicomm.Experts(comm, 2 * comm.size, hidden=8, max_tokens=4, top_k=2, dtype="float32") as experts:
            received = experts.dispatch(x, ids, weights)
            y = experts.combine(received.x, received)
    """

    def __init__(
        self,
        comm: Communicator,
        num_experts: int | Sequence[int],
        hidden: int,
        max_tokens: int,
        top_k: int,
        dtype: Any = "bfloat16",
        *,
        capacity: int | None = None,
        alignment: int = 1,
        blocks: int | None = None,
        layout: str = BY_EXPERT,
        wire_dtype: Any = None,
    ) -> None:
        if not isinstance(comm, Communicator):
            raise InvalidUsageError(f"Experts: comm={comm!r} is no mpicomm.Communicator: create one from it")
        self._session = session = comm._session.set_up("Experts")

        def describe() -> ExpertsConfig:
            numbers = num_experts, hidden, max_tokens, top_k, dtype, capacity, alignment, blocks
            return arrays.checked_config(comm.size, *numbers, layout, wire_dtype)

        configs = session.group.allgather("Experts", describe)
        for each in fields(ExpertsConfig):
            require_same(f"Experts: {each.name}", [getattr(config, each.name) for config in configs])
        self._config = configs[0]
        self._rank = comm.rank
        self._gpu: GpuBackend | None = None
        self._arena: SharedMemory | None = None
        self._launches: ExpertsLaunches | None = None
        if not isinstance(session.backend, HostBackend):
            self._gpu = session.backend
            self._arena, self._launches = open_on_gpus(session, self._config, self._gpu)
        self._streams = None if self._gpu is None else AccessOrder(self._gpu)
        self._host = HostExperts(session, self._config)
        self.closed = False

    def __repr__(self) -> str:
        config = self._config
        state = " closed" if self.closed else ""
        return (
            f"<mpicomm.Experts num_experts={list(config.experts_per_rank)} hidden={config.hidden} "
            f"max_tokens={config.max_tokens} top_k={config.top_k} dtype={config.dtype.name}{state}>"
        )

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        close_after(error, self.close)

    @property
    def local_experts(self) -> range:
        """The numbers of this rank's experts."""
        return range(*self._config.firsts[self._rank : self._rank + 2])

    @property
    def capacity(self) -> int:
        """The most rows that a rank can receive."""
        return self._config.capacity

    @property
    def layout(self) -> str:
        """The layout of received tokens: "experts" or "tokens"."""
        return BY_TOKEN if self._config.by_token else BY_EXPERT

    @property
    def wire_dtype(self) -> str | None:
        """The dtype in which tokens travel, with scales; None for the dtype of this object."""
        return None if self._config.wire is None else name_of(self._config.wire)

    @property
    def blocks(self) -> dict[str, int]:
        """The blocks of each kind of launch on a GPU: of "dispatch" and "combine", and of both with few tokens.

        Ranks with at most 256 tokens use the low-latency kernels.
        """
        return {} if self._launches is None else {name: sum(each) for name, each in self._launches.blocks.items()}

    def dispatch(
        self,
        x: Any,
        topk_ids: Any,
        topk_weights: Any = None,
        *,
        scales: Any = None,
        out: Received | None = None,
        stream: Any = None,
    ) -> Received:
        """Send each token once to each rank that has one of its experts, in the layout of this object.

        Collective; stream-ordered on a GPU, blocking on the host. ``x`` has shape ``[tokens, hidden]``, ``topk_ids``
        and ``topk_weights`` have shape ``[tokens, top_k]``. The number of tokens may differ between ranks, and may be
        0. Ids are int64 or int32, and -1 stands for no expert. An id that occurs twice in a token gives two places.
        Weights are float32, and 1 by default.

        With ``wire_dtype`` an ``x`` of fp8, or of bytes, comes with ``scales``: float32 of shape
        ``[tokens, hidden // 128]``. Otherwise each group of 128 elements is scaled so that its largest magnitude, at
        least 1e-4, becomes 448, the largest fp8 value.

        Tokens arrive unchanged, but between GPUs a NaN may change its sign in the layout by token, if ``max_tokens`` is
        256 or less.

        The result has new arrays, unless ``out`` is a result of this object, which is overwritten. A captured graph
        writes into the same arrays at each replay.

        Raises `InvalidUsageError` for bad arguments. An id that is no expert, and too many rows for ``capacity``, are
        errors on all ranks: on a GPU the next call or ``comm.check()`` raises `InvalidUsageError`, and the communicator
        is unusable. If a rank does not come, the others raise `CollectiveTimeoutError`, which names it.
        """
        what, config = "Experts.dispatch", self._config
        self._require_usable(what)
        on_device = self._is_on_gpu(x, "x")

        def read_arguments() -> DispatchArrays:
            kinds = (name_of(config.dtype),) if scales is None else (WIRE, "uint8")
            if scales is not None and not config.scales:
                raise InvalidUsageError("scales is for an Experts object with wire_dtype: leave scales out")
            tokens = self._read(x, "x", kinds, (None, config.hidden), on_device)
            count = x.shape[0]
            if count > config.max_tokens:
                raise InvalidUsageError(f"x has {count} tokens, more than max_tokens={config.max_tokens}: pass fewer")
            ids = self._read(topk_ids, "topk_ids", _ID_TYPES, (count, config.top_k), on_device)
            weights = self._read(topk_weights, "topk_weights", ("float32",), (count, config.top_k), on_device)
            numbers = self._read(scales, "scales", ("float32",), (count, config.scales), on_device)
            if out is not None:
                self._require_ours(out, "out", on_device=on_device)
            received = Received.empty(config, self._rank, x, on_device=on_device) if out is None else out
            received.num_tokens = count
            return DispatchArrays(received, tokens, ids, weights, numbers)

        if not on_device:
            refuse_stream(what, stream)
            return self._host.dispatch(read_arguments)
        assert self._launches is not None
        received, tokens, ids, weights, numbers = read_arguments()
        x_and_scales = tokens.pointer, 0 if numbers is None else numbers.pointer
        steps: list[Launch] = []
        if config.scales and numbers is None:
            quantize, x_and_scales = self._launches.quantize(tokens.pointer, received.num_tokens)
            steps.append(quantize)
        routes = ids.pointer, 0 if weights is None else weights.pointer
        result = received.pointers, received.num_tokens
        steps.append(self._launches.dispatch(x_and_scales, *routes, *result, wide_ids=ids.dtype.itemsize == 8))
        self._enqueue(steps, x, stream)
        return received

    def combine(
        self,
        z: Any,
        received: Received,
        *,
        out: Any = None,
        dtype: Any = None,
        weighted: bool = True,
        values: Any = None,
        stream: Any = None,
    ) -> Any:
        """Return for each token of this rank the weighted sum of the rows of its experts.

        Collective; stream-ordered on a GPU, blocking on the host. ``z`` has shape ``[capacity, hidden]``: the rows of
        ``received.x`` after the experts. With ``weighted`` each row counts by its weight of `dispatch`. In the layout
        by token the caller has added the experts of a row with their weights, and the row counts as it is. The result
        has shape ``[tokens, hidden]``, and the ``dtype`` of ``out`` or ``dtype``, by default the dtype of this object.
        A token without experts gets zeros.

        ``values`` are numbers of the places, float32, such as the gradients of weights: of shape ``[capacity]``, or
        ``[capacity, top_k]`` for the slots of rows in the layout by token. Then the result is a pair. Its second item
        has shape ``[tokens, top_k]``: the value of each slot, and 0 in slots without an expert. All ranks pass values,
        or none does.

        Each rank adds its rows of a token in the order of slots, in float32, and rounds the sum to the dtype of this
        object. The rank of the token adds these sums in the order of ranks, in float32, and rounds once more. So the
        bits are the same in every run.

        Raises as `dispatch`.
        """
        what, config = "Experts.combine", self._config
        self._require_usable(what)
        on_device = self._is_on_gpu(z, "z")

        def read_arguments() -> CombineArrays:
            self._require_ours(received, "received", on_device=on_device)
            rows = self._read(z, "z", (name_of(config.dtype),), (config.capacity, config.hidden), on_device)
            of_result = received.num_tokens, config.hidden
            if out is not None and dtype is not None:
                raise InvalidUsageError("out has a dtype: leave dtype out")
            kind = config.dtype if dtype is None else arrays.checked_dtype(dtype, what)
            result = new_array(z, of_result, kind, on_device=on_device) if out is None else out
            output = self._read(result, "out", DTYPES, of_result, on_device)
            if values is None:
                return CombineArrays(received, rows, result, output)
            of_rows = (config.capacity, config.top_k) if config.by_token else (config.capacity,)
            numbers = self._read(values, "values", ("float32",), of_rows, on_device)
            slot_values = new_array(z, (received.num_tokens, config.top_k), FLOAT32, on_device=on_device)
            return CombineArrays(received, rows, result, output, numbers, slot_values)

        if not on_device:
            refuse_stream(what, stream)
            combined = self._host.combine(read_arguments, weighted=weighted)
        else:
            assert self._launches is not None
            combined = read_arguments()
            numbers = (
                (0, 0)
                if combined.values is None
                else (combined.values.pointer, arrays.pointer_of(combined.slot_values))
            )
            result = received.pointers, received.num_tokens
            output = combined.output.pointer, name_of(combined.output.dtype)
            made = self._launches.combine(combined.rows.pointer, *result, *output, numbers, weighted=weighted)
            self._enqueue([made], z, stream)
        return combined.result if values is None else (combined.result, combined.slot_values)

    def close(self) -> None:
        """Free the memory, after a wait for this rank's device. Collective, blocking. A second call does nothing."""
        if not self.closed:
            self.closed = True
            if self._arena is not None and not self._arena.closed:
                self._session.close_shared(self._arena, "Experts")

    def _require_usable(self, what: str) -> None:
        if self.closed or (self._arena is not None and self._arena.closed):
            raise InvalidUsageError(f"{what}: this Experts object is closed: create another")
        self._session.require_usable(what)

    def _is_on_gpu(self, array: Any, name: str) -> bool:
        # Without a GPU `HostExperts` reads the array, so that an error of one rank is an error of all.
        return self._gpu is not None and read(array, False, name).on_device

    def _enqueue(self, steps: Sequence[Launch], array: Any, stream: Any) -> None:
        """Enqueue launches after the launches before them, on whichever streams they are."""
        assert self._gpu is not None and self._streams is not None
        where, captures = self._streams.resolve(stream, array)
        self._streams.before_synchronisation(where, captures=captures)
        for each in steps:
            self._gpu.launch(each.variant, each.arguments, where, blocks=each.blocks, threads=each.threads)
        self._streams.after_synchronisation(where, captures=captures)

    def _read(
        self, array: Any, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...], on_device: bool
    ) -> Any:
        """Return the argument ``name`` as an `ArrayMemory` on a GPU, else as a NumPy array. None stays None.

        It must have one of the dtypes, the shape, and lie where the call works. None as the first length of ``shape``
        stands for any length. NumPy's input is copied if it is not C-contiguous. Raises `InvalidUsageError`.
        """
        if array is None and name in ("topk_weights", "scales"):
            return None
        writable = name == "out"
        if type(array) is np.ndarray and not writable:
            array = np.ascontiguousarray(array)
        memory = read_in_order(array, writable, name)
        found = tuple(array.shape)
        if found != shape and (shape[0] is not None or found[1:] != shape[1:] or not found):
            wanted = ", ".join("tokens" if length is None else str(length) for length in shape)
            raise InvalidUsageError(f"{name} has shape {found}: pass one of shape ({wanted}{',' * (len(shape) == 1)})")
        if memory.dtype is None or name_of(memory.dtype) not in dtypes:
            raise InvalidUsageError(f"{name} has dtype {memory.dtype or array.dtype}: pass one of {', '.join(dtypes)}")
        require_same_device(name, memory.device, self._session.placement.here.device)
        if memory.on_device != on_device:
            here, there = ("a GPU", "host memory") if memory.on_device else ("host memory", "a GPU")
            raise InvalidUsageError(f"{name} is in {here}, and another array of the call in {there}: pass all in one")
        if on_device and memory.pointer % PACKET_NBYTES and name in ("x", "scales", "z", "out"):
            raise InvalidUsageError(
                f"{name} begins at address {memory.pointer:#x}, which is no multiple of {PACKET_NBYTES}: copy it first"
            )
        return memory if on_device else arrays.host_view(array)

    def _require_ours(self, received: Received, name: str, *, on_device: bool) -> None:
        config = self._config
        if not isinstance(received, Received):
            raise InvalidUsageError(f"{name}={received!r} is no result of dispatch")
        same = tuple(received.x.shape) == (config.capacity, config.hidden) and received.on_device == on_device
        if not same or (received.rows is not None) != config.by_token:
            raise InvalidUsageError(f"{name} is the result of another Experts object, or lies in other memory")
