"""Experts: random routings on both devices against the reference, streams and graphs, and refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import Experts, InvalidUsageError
from tests.helpers.inputs.routings import Routing, require_laid_by_token, require_laid_out, require_same
from tests.helpers.references.reductions import dtype_or_skip
from tests.helpers.rigs.communicators import array_module, communicator, patience_s, to_host

HIDDEN, MAX_TOKENS, TOP_K = 24, 40, 4
TYPES = ("float32", "float16", "bfloat16")
WIRE = "float8_e4m3fn"


def experts_of(size: int) -> list[int]:
    """Return numbers that differ: rank 1 has no experts."""
    return [(3, 0, 2, 5)[rank % 4] for rank in range(size)]


def require_received(received: mpicomm.Received, routing: Routing, alignment: int, rank: int) -> None:
    names = ("x", "counts", "offsets", "sources", "weights")
    require_laid_out(routing.laid(alignment)[rank], *(to_host(getattr(received, name)) for name in names))


@pytest.fixture
def routing(comm: mpicomm.Communicator) -> Routing:
    return Routing(np.random.default_rng(1), experts_of(comm.size), HIDDEN, MAX_TOKENS, TOP_K, np.dtype(np.float32))


@pytest.fixture
def experts(comm: mpicomm.Communicator) -> Iterator[Experts]:
    with Experts(comm, experts_of(comm.size), HIDDEN, MAX_TOKENS, TOP_K, "float32") as made:
        yield made


# On GPUs rows travel as packets if no rank ever has many tokens.
@pytest.mark.parametrize(("layout", "most"), [("experts", MAX_TOKENS), ("tokens", MAX_TOKENS), ("tokens", 300)])
@pytest.mark.parametrize("name", TYPES)
def test_random_routings(comm: mpicomm.Communicator, xp: Any, name: str, layout: str, most: int) -> None:
    if comm.device == "cpu" and most > MAX_TOKENS:
        pytest.skip("on the host the number of tokens decides nothing")
    dtype, rng, by_token = dtype_or_skip(name, xp), np.random.default_rng(len(name)), layout == "tokens"
    counts, alignment, rank = experts_of(comm.size), 8, comm.rank
    with Experts(comm, counts, HIDDEN, most, TOP_K, name, alignment=alignment, layout=layout) as experts:
        assert experts.layout == layout and (not by_token or experts.capacity == comm.size * most)
        received = None
        for number in range(6):
            routing = Routing(rng, counts, HIDDEN, most, TOP_K, dtype, none=0.3)
            x, ids, weights = (xp.asarray(each[rank]) for each in (routing.xs, routing.ids, routing.weights))
            if number == 4:  # all weights are 1
                routing.weights, weights = [np.ones_like(each) for each in routing.weights], None
            received = experts.dispatch(x, ids, weights, out=received if number % 2 else None)
            z = xp.zeros_like(received.x)
            by_expert = routing.laid(alignment)
            laid: Any = routing.laid_by_token() if by_token else by_expert
            outputs = [(each.rows * dtype.type(2)).astype(dtype) for each in laid]
            z[: len(outputs[rank])] = xp.asarray(outputs[rank])
            shape = (experts.capacity, TOP_K) if by_token else (experts.capacity,)
            values = [rng.random(shape, dtype="float32") for _ in counts]
            plain, of_slots = experts.combine(z, received, weighted=False, values=xp.asarray(values[rank]))
            result = dtype_or_skip(TYPES[number % 3], xp)
            sums = experts.combine(z, received, dtype=result)
            into = experts.combine(z, received, out=xp.empty(x.shape, result))
            comm.check()
            for found in (to_host(sums), to_host(into)):
                if by_token:
                    require_same("sums", found, routing.sums_by_token(laid, outputs, rank, result))
                else:
                    require_same("sums", found, routing.sums(laid, outputs, rank, result, weighted=True))
            if by_token:
                fields = {key: to_host(array) for key, array in vars(received).items() if hasattr(array, "shape")}
                require_laid_by_token(laid[rank], by_expert[rank], fields)
                require_same("values", to_host(of_slots), routing.slots_by_token(laid, values, rank))
            else:
                require_received(received, routing, alignment, rank)
                require_same("values", to_host(of_slots), routing.of_slots(laid, values, rank))
                require_same("plain sums", to_host(plain), routing.sums(laid, outputs, rank, dtype, weighted=False))


@pytest.mark.parametrize("layout", ["experts", "tokens"])
@pytest.mark.parametrize("wire", [None, WIRE])
@pytest.mark.parametrize("empty", ["last", "all"])
def test_ranks_without_tokens_take_part(
    comm: mpicomm.Communicator, xp: Any, layout: str, wire: str | None, empty: str
) -> None:
    if wire:
        pytest.importorskip("ml_dtypes")
    tokens = 0 if empty == "all" or comm.rank == comm.size - 1 else 3
    counts = [2, *[0] * (comm.size - 1)]
    with Experts(comm, counts, 512, 3, 2, "float32", layout=layout, wire_dtype=wire) as experts:
        received = experts.dispatch(xp.ones((tokens, 512), "float32"), xp.zeros((tokens, 2), "int64"))
        sums = experts.combine(xp.ones((experts.capacity, 512), "float32"), received, weighted=False)
        comm.check()
        expected = 0 if comm.rank or empty == "all" else 6 * (comm.size - 1)
        assert to_host(received.counts).tolist() == [expected, 0][: counts[comm.rank]]
        assert (to_host(sums) == (2 if layout == "experts" else 1)).all()
        assert sums.shape == (tokens, 512)


def test_memory_is_described_and_given_back(comm: mpicomm.Communicator) -> None:
    def nbytes() -> int:
        return sum(each.device_nbytes for each in comm.describe().memory if each.purpose == "experts")

    with Experts(comm, 8, 64, 100, 2, "float32") as experts:
        if comm.device != "cpu":
            assert nbytes() >= 2 * (comm.size - 1) * 100 * 64 * 4
            assert set(experts.blocks) == {"dispatch", "combine", "dispatch of few", "combine of few"}
            with Experts(comm, 8, 64, 100, 2, "float32", blocks=3) as small:
                assert set(small.blocks.values()) == {3}
    assert nbytes() == 0
    with pytest.raises(InvalidUsageError, match=r"Experts\.dispatch: this Experts object is closed"):
        experts.dispatch(None, None)


def test_numbers_of_experts(comm: mpicomm.Communicator) -> None:
    with Experts(comm, comm.size + 1, 4, 1, 1, np.float32, capacity=17) as experts:
        assert comm.allgather(list(experts.local_experts)) == [[0, 1], *([rank + 1] for rank in range(1, comm.size))]
        assert experts.capacity == 17


BAD: dict[str, dict[str, Any]] = {
    "num_experts=0": {"num_experts": 0},
    "num_experts=513": {"num_experts": 513},
    r"num_experts=\[1, 2, 3, 4, 5, 6, 7\] has 7 numbers": {"num_experts": [1, 2, 3, 4, 5, 6, 7]},
    "num_experts='a' is no int": {"num_experts": "a"},
    "a row of hidden=3 elements of float32 has 12 bytes": {"hidden": 3},
    "max_tokens=0: pass 1 or more": {"max_tokens": 0},
    "top_k=33: pass 32 or less": {"top_k": 33},
    "dtype='int8'": {"dtype": "int8"},
    "capacity=0": {"capacity": 0},
    "alignment=-1": {"alignment": -1},
    "blocks=1: pass 2 or more": {"blocks": 1},
    "wire_dtype='int8': pass float8_e4m3fn": {"wire_dtype": "int8"},
    "hidden=4 with wire_dtype=float8_e4m3fn: pass a multiple of 512": {"wire_dtype": "float8_e4m3fn"},
    "more than 2147483647 rows": {"max_tokens": 2**30},
}


def test_bad_arguments_of_one_rank_are_an_error_on_all(comm: mpicomm.Communicator) -> None:
    good = {"num_experts": 4, "hidden": 4, "max_tokens": 4, "top_k": 2, "dtype": "float32"}
    for text, bad in BAD.items():
        arguments: dict[str, Any] = {**good, **(bad if comm.rank == comm.size - 1 else {})}
        with pytest.raises(InvalidUsageError, match=text):
            Experts(comm, **arguments)
    assert comm.allreduce(1) == comm.size


def test_ranks_that_differ_raise(comm: mpicomm.Communicator) -> None:
    if comm.size == 1:
        pytest.skip("one rank does not differ")
    with pytest.raises(InvalidUsageError, match="max_tokens differs between ranks: 4 on rank 0, 5 on rank 1"):
        Experts(comm, 4, 4, 4 + comm.rank, 2, "float32")
    with pytest.raises(InvalidUsageError, match=r"is no mpicomm\.Communicator"):
        Experts(MPI.COMM_WORLD, 4, 4, 4, 2)  # type: ignore[arg-type]


def test_arrays_of_numpy_may_be_parts_of_others(comm: mpicomm.Communicator, xp: Any) -> None:
    if xp is not np:
        pytest.skip("on GPUs a copy would be in the order of another stream")
    with Experts(comm, num_experts=4, hidden=4, max_tokens=4, top_k=2, dtype="float32") as experts:
        x, sorted_ids = np.ones((4, 4), "float32").T, np.arange(4, dtype="int64")[:, None] + np.arange(4)
        received = experts.dispatch(x, sorted_ids[:, :2] % 4, np.ones((4, 4), "float32")[:, ::2])
        assert (experts.combine(received.x, received) == 2).all()


def test_bad_arrays_are_refused_before_anything_is_sent(
    comm: mpicomm.Communicator, xp: Any, experts: Experts, routing: Routing
) -> None:
    x, ids = xp.zeros((2, HIDDEN), "float32"), xp.zeros((2, TOP_K), "int64")
    bad: dict[str, tuple[Any, ...]] = {
        r"x has shape \(2, 23\)": (x[:, 1:].copy(), ids),
        "x has dtype float64: pass one of float32": (x.astype("float64"), ids),
        "x has 41 tokens, more than max_tokens=40": (xp.zeros((41, HIDDEN), "float32"), xp.zeros((41, TOP_K), "i8")),
        r"topk_ids has shape \(1, 4\): pass one of shape \(2, 4\)": (x, ids[:1]),
        "topk_ids has dtype uint64": (x, ids.astype("uint64")),
        "topk_weights has dtype float64": (x, ids, xp.zeros((2, TOP_K))),
        "scales is for an Experts object with wire_dtype": (x, ids, None, None, ids),
        "out='here' is no result of dispatch": (x, ids, None, "here"),
    }
    if xp is not np:
        wide, turned = xp.zeros((2, 8), "int64")[:, :TOP_K], xp.zeros((HIDDEN, 2), "float32").T
        bad[r"topk_ids of shape \(2, 4\) with strides .* is neither C- nor Fortran-contiguous: copy it"] = (x, wide)
        bad[r"x of shape \(2, 24\) is not C-contiguous"] = (turned, ids)
    for text, arguments in bad.items():
        with pytest.raises(InvalidUsageError, match=text):
            options = dict(zip(("out", "scales"), arguments[3:], strict=False))
            experts.dispatch(*arguments[:3], **options)
    received = experts.dispatch(*(xp.asarray(each[comm.rank]) for each in (routing.xs, routing.ids, routing.weights)))
    tokens = len(routing.xs[comm.rank])
    for text, (z, options) in {
        rf"z has shape \(2, 24\): pass one of shape \({experts.capacity}, 24\)": (x, {}),
        "dtype='int8': pass one of": (received.x, {"dtype": "int8"}),
        "out has a dtype: leave dtype out": (received.x, {"dtype": "float16", "out": x}),
        "values has dtype float64": (received.x, {"values": xp.zeros(experts.capacity)}),
        rf"values has shape \(1,\): pass one of shape \({experts.capacity},\)": (
            received.x,
            {"values": xp.zeros(1, "float32")},
        ),
        rf"out has shape \({tokens + 1}, 24\)": (received.x, {"out": xp.zeros((tokens + 1, HIDDEN), "float32")}),
    }.items():
        with pytest.raises(InvalidUsageError, match=text):
            experts.combine(z, received, **options)
    with pytest.raises(InvalidUsageError, match=r"received=None is no result"):
        experts.combine(received.x, None)  # type: ignore[arg-type]
    experts.combine(received.x, received)
    comm.check()
    require_received(received, routing, 1, comm.rank)


def test_error_of_one_rank_on_the_host_is_an_error_of_all(host_comm: mpicomm.Communicator) -> None:
    comm = host_comm
    with Experts(comm, 4, 4, 4, 2, "float32", capacity=comm.size * 2) as experts:
        x, ids = np.ones((2, 4), np.float32), np.array([[0, -1], [0, -1]])
        last = comm.rank == comm.size - 1
        with pytest.raises(InvalidUsageError, match=r"topk_ids of rank \d has the id 4 at token 1: pass 0 to 3"):
            experts.dispatch(x, np.array([[0, 1], [2, 4]]) if last else ids)
        with pytest.raises(InvalidUsageError, match=r"x has shape"):
            experts.dispatch(x[:, :2].copy() if last else x, ids)
        with pytest.raises(InvalidUsageError, match=rf"rank 0 gets {2 * comm.size + 1} rows, more than capacity="):
            experts.dispatch(x, np.array([[0, 0], [0, -1]]) if last else ids)
        with pytest.raises(InvalidUsageError, match="stream=1 is for device arrays"):
            experts.dispatch(x, ids, stream=1)
        received = experts.dispatch(x, ids)
        if comm.size > 1:
            values = np.ones(experts.capacity, np.float32)
            with pytest.raises(InvalidUsageError, match="values differs between ranks: "):
                experts.combine(received.x, received, values=values if last else None)
        assert (experts.combine(received.x, received) == 1).all()


def test_host_arrays_go_through_mpi_on_every_device(
    comm: mpicomm.Communicator, experts: Experts, routing: Routing
) -> None:
    rank = comm.rank
    received = experts.dispatch(routing.xs[rank], routing.ids[rank], routing.weights[rank])
    assert type(received.x) is np.ndarray
    sums = experts.combine(received.x, received)
    require_received(received, routing, 1, rank)
    expected = routing.sums(routing.laid(1), [each.rows for each in routing.laid(1)], rank, "float32", weighted=True)
    require_same("sums", sums, expected)


@pytest.mark.parametrize("name", TYPES)
def test_tensors_of_pytorch(comm: mpicomm.Communicator, name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = dtype_or_skip(name)
    routing = Routing(np.random.default_rng(7), experts_of(comm.size), HIDDEN, MAX_TOKENS, TOP_K, dtype)
    where = "cpu" if comm.device == "cpu" else f"cuda:{comm.device}"
    rank, laid = comm.rank, routing.laid(1)
    with Experts(comm, experts_of(comm.size), HIDDEN, MAX_TOKENS, TOP_K, getattr(torch, name)) as experts:
        x = torch.from_numpy(routing.xs[rank].astype("float32")).to(where, getattr(torch, name))
        ids, weights = (torch.from_numpy(each[rank]).to(where) for each in (routing.ids, routing.weights))
        received = experts.dispatch(x, ids, weights)
        assert received.x.dtype == x.dtype and received.x.device == x.device
        sums = experts.combine(received.x, received, dtype=torch.float32)
        expected = routing.sums(laid, [each.rows for each in laid], rank, "float32", weighted=True)
        require_same("sums", sums.cpu().numpy(), expected)
        with pytest.raises(InvalidUsageError, match=r"requires a gradient"):
            experts.dispatch(x.float().requires_grad_(), ids, weights)
        comm.check()


@pytest.mark.parametrize("given", ["numbers", "fp8"])
def test_tokens_travel_as_floats_of_8_bits(comm: mpicomm.Communicator, given: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("ml_dtypes")
    hidden, rank, size = 512, comm.rank, comm.size
    where = torch.device("cpu" if comm.device == "cpu" else f"cuda:{comm.device}")
    routing = Routing(np.random.default_rng(9), experts_of(size), hidden, MAX_TOKENS, TOP_K, np.dtype(np.float32))
    # Powers of two and zeros, which fp8 has exactly.
    routing.xs = [np.ldexp(1, (each * 2).astype(int).clip(-6, 6)).astype("float32") for each in routing.xs]
    with Experts(comm, experts_of(size), hidden, MAX_TOKENS, TOP_K, "float32", wire_dtype=WIRE) as experts:
        ids = torch.from_numpy(routing.ids[rank]).to(where)
        x = torch.from_numpy(routing.xs[rank])
        if given == "numbers":
            received = experts.dispatch(x.to(where), ids)
        else:
            scales = torch.full((len(x), 4), 0.5, device=where)
            received = experts.dispatch((x * 2).to(torch.float8_e4m3fn).to(where), ids, scales=scales)
        comm.check()
        laid = routing.laid(1)[rank]
        used = laid.offsets[-1]
        assert received.x.dtype == torch.float8_e4m3fn
        rows, scales = received.x[:used].float().cpu().numpy(), received.scales[:used].cpu().numpy()
        found = (rows.reshape(used, 4, 128) * scales[:, :, None]).reshape(used, hidden)
        np.testing.assert_allclose(found, laid.rows, rtol=0.07)
        if given != "numbers":
            require_same("rows", found.astype("float32"), laid.rows)
        require_same("sources", received.sources[:used].cpu().numpy(), np.array(laid.sources).reshape(-1, 3))
        z = torch.ones(experts.capacity, hidden, device=where)
        sums = experts.combine(z, received, weighted=False)
        comm.check()
        expected = (routing.ids[rank] >= 0).sum(axis=1, keepdims=True) * np.ones((1, hidden))
        require_same("sums", sums.cpu().numpy(), expected)
        with pytest.raises(InvalidUsageError, match=r"scales has shape"):
            experts.dispatch((x * 2).to(torch.float8_e4m3fn).to(where), ids, scales=torch.ones(1, 1, device=where))


@pytest.mark.gpu_alone  # the host sees them before it sends
@pytest.mark.parametrize("wrong", ["id", "room"])
def test_faults_that_only_the_gpu_sees_are_errors_of_all_ranks(own_comm: mpicomm.Communicator, wrong: str) -> None:
    import cupy

    experts = Experts(own_comm, 4, 4, 4, 2, "float32", capacity=2 * own_comm.size)
    ids = cupy.array([[0, -1], [0, -1]])
    if own_comm.rank == own_comm.size - 1:
        ids[1, 1] = 4 if wrong == "id" else 0
    experts.dispatch(cupy.ones((2, 4), "float32"), ids)
    texts = {"id": "an id that is no expert at token 1", "room": f"rank 0 gets {2 * own_comm.size + 1} rows"}
    with pytest.raises(InvalidUsageError, match=texts[wrong]) as error:
        own_comm.check()
    assert error.value.ranks == (own_comm.size - 1 if wrong == "id" else 0,)


def test_rank_that_does_not_come_is_named(device: str) -> None:
    comm = communicator(device, timeout_s=patience_s(device))
    if comm.size == 1:
        comm.Free()
        pytest.skip("one rank waits for no other")
    late = comm.size - 1
    experts = Experts(comm, comm.size, 4, 4, 1, "float32")
    if comm.rank != late:
        with array_module(comm) as xp, pytest.raises(mpicomm.CollectiveTimeoutError) as error:
            experts.dispatch(xp.ones((1, 4), "float32"), xp.array([[late]]))
            comm.check()
        assert error.value.ranks == (late,)
        assert "Experts.dispatch" in str(error.value)
    MPI.COMM_WORLD.Barrier()
    with contextlib.suppress(mpicomm.CollectiveTimeoutError):
        comm.Free()


@pytest.mark.gpu_alone  # streams are a GPU's
def test_calls_on_several_streams_keep_their_order(
    comm: mpicomm.Communicator, xp: Any, experts: Experts, routing: Routing
) -> None:
    x, ids, weights = (xp.asarray(each[comm.rank]) for each in (routing.xs, routing.ids, routing.weights))
    streams = [xp.cuda.Stream(non_blocking=True) for _ in range(3)]
    xp.cuda.Device().synchronize()
    laid = routing.laid(1)
    for number in range(30):
        one, other = streams[number % 3], streams[(number + 1) % 3]
        with one:
            received = experts.dispatch(x, ids, weights)
        sums = experts.combine(received.x, received, stream=other)
        comm.check(other)
        expected = routing.sums(laid, [each.rows for each in laid], comm.rank, "float32", weighted=True)
        require_same("sums", to_host(sums), expected)


@pytest.mark.gpu_alone  # graphs are a GPU's
def test_routes_change_between_replays_of_a_graph(comm: mpicomm.Communicator, xp: Any) -> None:
    rng, counts, rank = np.random.default_rng(5), experts_of(comm.size), comm.rank
    tokens = 11
    with Experts(comm, counts, HIDDEN, MAX_TOKENS, TOP_K, "float32", alignment=4) as experts:
        x = xp.zeros((tokens, HIDDEN), "float32")
        ids, weights = xp.zeros((tokens, TOP_K), "int64"), xp.zeros((tokens, TOP_K), "float32")
        received = experts.dispatch(x, ids, weights)
        sums = experts.combine(received.x, received)
        comm.check()
        stream = xp.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            experts.dispatch(x, ids, weights, out=received)
            experts.combine(received.x, received, out=sums)
            graph = stream.end_capture()
        for _ in range(20):
            routing = Routing(rng, counts, HIDDEN, MAX_TOKENS, TOP_K, np.dtype(np.float32))
            routing.xs = [rng.standard_normal((tokens, HIDDEN)).astype("float32") for _ in counts]
            routing.ids = [rng.integers(-1, sum(counts), (tokens, TOP_K)) for _ in counts]
            routing.weights = [rng.random((tokens, TOP_K), dtype="float32") for _ in counts]
            for array, content in ((x, routing.xs), (ids, routing.ids), (weights, routing.weights)):
                array.set(content[rank], stream=stream)
            graph.launch(stream)
            comm.check(stream)
            require_received(received, routing, 4, rank)
            laid = routing.laid(4)
            expected = routing.sums(laid, [each.rows for each in laid], rank, "float32", weighted=True)
            require_same("sums", to_host(sums), expected)
