"""The nodes, the devices and the order of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from mpicomm import environment
from mpicomm.api.topologies import Edges, best_order, cost_of
from mpicomm.cluster import placement
from mpicomm.cluster.agreement import Group
from mpicomm.cluster.placement import Placement, RankPlace, assign_devices, find_placement, split_evenly
from mpicomm.cluster.process import group_by_node
from mpicomm.devices.base import DeviceInfo, Link
from mpicomm.devices.cuda import driver as cuda_driver
from mpicomm.devices.host import NO_DEVICE
from mpicomm.errors import BackendUnavailableError, InvalidUsageError
from mpicomm.log import logger

A, B, C, D = (bytes([letter]) * 16 for letter in b"ABCD")


def devices(*uuids: bytes) -> tuple[DeviceInfo, ...]:
    return tuple(DeviceInfo(n, "a GPU", uuid, f"0000:0{n}:00.0", -1, (9, 0)) for n, uuid in enumerate(uuids))


def place(node: str = "node", visible: Sequence[bytes] = (), device: int | str = "auto", pid: int = 1) -> RankPlace:
    reason = "no driver" if not visible else ""
    return RankPlace("host", pid, node, devices(*visible), reason, device, "auto", 30.0)


# ---- assign_devices


@pytest.mark.parametrize(
    ("visible", "given", "local_ids", "ordinals"),
    [
        ([], [], [], []),
        ([[A, B, C, D]] * 4, [b""] * 4, [0, 0, 0, 0], [0, 1, 2, 3]),  # without a launcher
        ([[A, B]] * 5, [b""] * 5, [0] * 5, [0, 1, 0, 1, 0]),
        ([[A], [B], [C], [D]], [b""] * 4, [0] * 4, [0, 0, 0, 0]),
        # The same devices in another order: each rank takes the first free one.
        ([[A, B], [A, B], [B, A], [B, A]], [b""] * 4, [0] * 4, [0, 1, 0, 1]),
        ([[A, B, C], [A, B], [A, B, C]], [b""] * 3, [0] * 3, [0, 1, 2]),
        ([[A], [A, B], [A, B, C]], [b""] * 3, [0] * 3, [0, 1, 2]),
        ([[A, B, C, D]] * 2, [b""] * 2, [2, 3], [2, 3]),  # the other half of the job
        ([[A, B, C, D]] * 2, [b""] * 2, [1, 5], [1, 2]),  # more processes than devices
        ([[A, B, C, D]] * 3, [b""] * 3, [3, 2, 1], [3, 2, 1]),  # in another order
        # Each rank sees its own device first, so the number of the device does not count.
        ([[A, B, C, D], [B, C, D, A], [C, D, A, B]], [b""] * 3, [0, 1, 2], [0, 0, 0]),
        ([[A, B, C, D]] * 2, [C, A], [0, 1], [2, 0]),
        ([[A, B]] * 2, [B, B], [0, 1], [1, 1]),  # a rank keeps the device of its arrays
        ([[A, B]] * 3, [b"", A, b""], [0, 1, 2], [1, 0, 0]),
        ([[A, B]] * 2, [D, b""], [0, 1], [0, 1]),  # a device that the rank does not see
    ],
)
def test_a_rank_keeps_its_device_and_takes_the_one_that_the_fewest_have(
    visible: list[list[bytes]], given: list[bytes], local_ids: list[int], ordinals: list[int]
) -> None:
    assert assign_devices(visible, given, local_ids) == ordinals


# ---- find_placement, on one rank


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    for name in ("DEVICE", "HANDLE", "BIND_CPU", "HOSTID"):
        monkeypatch.delenv(f"MPICOMM_{name}", raising=False)
    for name in environment._LOCAL_IDS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(placement, "_assigned", [])
    return Group(MPI.COMM_SELF, [0], 5.0)


def show(monkeypatch: pytest.MonkeyPatch, *uuids: bytes) -> None:
    """Let this process see these devices."""

    def visible_devices() -> list[DeviceInfo]:
        if not uuids:
            raise BackendUnavailableError("no NVIDIA driver: install it")
        return list(devices(*uuids))

    monkeypatch.setattr(cuda_driver, "visible_devices", visible_devices)


def test_a_rank_gets_its_device_and_auto_keeps_it_but_not_a_device_that_was_asked_for(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def device_of(asked: int | str) -> tuple[int | str, bytes]:
        found = find_placement(group, asked, "auto")
        assert (found.nodes, found.local_rank, found.here.timeout_s) == ([[0]], 0, 5.0)
        return found.here.device, found.here.device_uuid

    show(monkeypatch, A, B)
    assert (device_of("cpu"), device_of(1), device_of("auto")) == (("cpu", NO_DEVICE), (1, B), (0, A))
    monkeypatch.setenv("MPI_LOCALRANKID", "1")
    assert device_of("auto") == (0, A)
    monkeypatch.setattr(placement, "_assigned", [])
    assert device_of("auto") == (1, B)
    show(monkeypatch)
    assert device_of("auto") == device_of("cpu") == ("cpu", NO_DEVICE)
    show(monkeypatch, B, A)
    assert device_of("auto") == (0, B)


def test_a_device_that_is_not_there_is_refused_with_the_way_out(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, A, B)
    with pytest.raises(InvalidUsageError, match="device=2 on rank 0: it sees the devices 0 to 1; CUDA_VISIBLE_DEVICES"):
        find_placement(group, 2, "auto")
    show(monkeypatch)
    with pytest.raises(BackendUnavailableError, match="device=0 on rank 0: no NVIDIA driver: install it"):
        find_placement(group, 0, "auto")


@pytest.mark.parametrize(
    "setting", ["MPICOMM_DEVICE=gpu", "MPICOMM_HANDLE=gpu", "MPICOMM_BIND_CPU=2", "MPICOMM_INTERNODE=foo"]
)
def test_bad_variables_are_every_ranks_error(group: Group, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    name, _, value = setting.partition("=")
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidUsageError, match=f"^rank 0: {name}='{value}'"):
        find_placement(group, "auto", "auto")


def test_the_ranks_of_each_node_share_its_devices() -> None:
    places = [place("left", [A, B]), place("right", [C]), place("left", [A, B]), place("right", [C, D])]
    assert placement._choose_devices(places) == [0, 0, 1, 1]
    # One rank without a device takes all to the cpu.
    assert placement._choose_devices([place("left", [A]), place("right")]) == ["cpu", "cpu"]


SHARED = "ranks share a GPU and take turns on it, which is slow: [[0, 1]]; start"
ON_CPU = "using the cpu: rank 1 has no device: no driver"


@pytest.mark.parametrize(
    ("places", "rank", "said"),
    [
        ([place(visible=[A], device=0)] * 2, 0, [SHARED]),
        ([place(visible=[A], device=0)] * 2, 1, []),
        ([place(visible=[A, B], device=0), place(visible=[A, B], device=1)], 0, []),
        ([place(visible=[A, B], device=0), place(visible=[B, A], device=1)], 0, ["[[0, 1]]"]),
        ([place(device="cpu")] * 2, 0, []),
        ([place(visible=[A], device="cpu"), place(device="cpu")], 0, [ON_CPU]),
    ],
)
def test_what_is_slower_than_it_could_be_is_said_once(
    monkeypatch: pytest.MonkeyPatch, places: list[RankPlace], rank: int, said: list[str]
) -> None:
    warnings: list[str] = []

    def warning(message: str, *arguments: Any) -> None:
        warnings.append(message % arguments)

    monkeypatch.setattr(logger, "warning", warning)
    monkeypatch.setattr(Path, "exists", lambda path: False)  # whether there is an NVIDIA driver
    placement._log_choice(Placement(places, rank), automatic=True)
    assert len(warnings) == len(said)
    assert all(expected in warning for expected, warning in zip(said, warnings, strict=True))


# ---- Placement


@settings(deadline=None)
@given(keys=st.lists(st.sampled_from(["left", "right", "middle"]), min_size=1, max_size=10), data=st.data())
def test_a_subset_keeps_who_is_where(keys: list[str], data: st.DataObject) -> None:
    ranks = data.draw(st.lists(st.sampled_from(range(len(keys))), min_size=1, unique=True))
    rank = data.draw(st.sampled_from(ranks))
    whole = Placement([place(key, pid=pid) for pid, key in enumerate(keys)], rank)
    part = whole.subset(ranks)
    assert [each.pid for each in part.places] == ranks
    assert part.here is whole.here
    assert part.nodes == group_by_node([keys[rank] for rank in ranks])
    assert sorted(rank for node in part.nodes for rank in node) == list(range(len(ranks)))
    assert [keys[ranks[node[0]]] for node in part.nodes] == list(dict.fromkeys(keys[rank] for rank in ranks))
    assert all(node == sorted(node) and len({keys[ranks[each]] for each in node}) == 1 for node in part.nodes)
    assert part.nodes[part.node_index] == part.node_ranks
    assert part.node_ranks[part.local_rank] == part.rank
    assert {ranks[index] for index in part.node_ranks} == set(whole.node_ranks) & set(ranks)
    assert [each.pid for each in whole.subset(ranks[::-1]).places] == ranks[::-1]


def test_only_ranks_of_the_node_have_an_index_in_it() -> None:
    places = Placement([place("left"), place("right"), place("right")], 2)
    assert [places.node_index_of(rank) for rank in (1, 2)] == [0, 1]
    refusals: list[tuple[Any, str]] = [
        (0, r"peer=0 is on another node \(host\): only the ranks \[1, 2\]"),
        (3, "peer=3 is no rank of this communicator: use 0 to 2"),
        (-1, "peer=-1 is no rank of this communicator: use 0 to 2"),
        ("1", "peer='1' is no rank: use 0 to 2"),
    ]
    for rank, reason in refusals:
        with pytest.raises(InvalidUsageError, match=reason):
            places.node_index_of(rank)


# ---- groups of ranks


@pytest.mark.parametrize(
    ("size", "most", "parts"), [(8, 8, [8]), (9, 8, [4, 5]), (16, 8, [8, 8]), (17, 8, [5, 6, 6]), (3, 1, [1, 1, 1])]
)
def test_more_ranks_than_kernels_serve_are_few_parts_of_about_one_size(size: int, most: int, parts: list[int]) -> None:
    found = split_evenly(range(size), most)
    assert [rank for part in found for rank in part] == list(range(size))
    assert [len(part) for part in found] == parts


def test_ranks_of_gpus_are_domains_of_as_many_as_kernels_serve() -> None:
    places = [place(visible=[A], device=0) for _ in range(10)]
    assert [len(ranks) for ranks in Placement(places, 0).domains] == [5, 5]
    assert Placement(places, 7).domain_ranks == (5, 6, 7, 8, 9)
    on_the_cpu = [place(device="cpu") for _ in range(10)]
    assert [len(ranks) for ranks in Placement(on_the_cpu, 0).domains] == [10]


def test_ranks_of_several_nodes_may_share_a_gpu() -> None:
    def devices_of(*ranks: tuple[str, Sequence[bytes], int | str]) -> int:
        return Placement([place(node, visible, device) for node, visible, device in ranks], 0).max_ranks_per_device

    assert devices_of(("one", [A, B], 0), ("one", [A, B], 1), ("two", [B], 0), ("three", [A, B], 1)) == 3
    assert devices_of(("one", [A, B], 0), ("one", [A, B], 1)) == 1
    assert devices_of(("one", [], "cpu"), ("one", [], "cpu")) == 1


LINKS = (
    Link("self"),
    Link("NVLink", 0, True, True, 200.0),
    Link("NVLink", 0, True, True),
    Link("NVLink", 1, True, True, 50.0),
    Link("PCIe", 0, True, False, 25.0),
    Link("PCIe", 1, True, False, 25.0),
    Link("staged", gb_s=2.0),
)


def test_a_slower_link_costs_more() -> None:
    costs = [cost_of(link) for link in LINKS]
    assert costs == sorted(costs)
    assert cost_of(Link("same device")) == cost_of(Link("self")) == 0
    assert cost_of(Link("unknown")) > cost_of(Link("PCIe"))


def total(costs: Sequence[Sequence[float]], order: Sequence[int], edges: Edges) -> float:
    """The costs of the edges between ranks that exist, both ways."""
    places = range(len(costs))
    found = [(order[a], order[b], weight) for (a, b), weight in edges.items() if a in places and b in places and a != b]
    return sum(weight * (costs[a][b] + costs[b][a]) for a, b, weight in found)


@settings(max_examples=60)
@given(st.integers(1, 5), st.data())
def test_no_order_of_few_ranks_is_better(size: int, data: st.DataObject) -> None:
    numbers = st.lists(st.integers(0, 4), min_size=size, max_size=size)
    costs = data.draw(st.lists(numbers, min_size=size, max_size=size))
    place = st.integers(-1, size + 1)
    edges = data.draw(st.dictionaries(st.tuples(place, place), st.integers(0, 9), max_size=6))
    order = best_order(costs, edges)
    least = min(total(costs, each, edges) for each in itertools.permutations(range(size)))
    assert sorted(order) == list(range(size)) and total(costs, order, edges) == least
    assert order == list(range(size)) or total(costs, range(size), edges) > least


def test_no_exchange_of_two_of_many_ranks_is_better() -> None:
    size = 16
    ring = {(rank, (rank + 1) % size): 1.0 for rank in range(size)}
    costs = [[float(a != b) * (1 if a % 2 == b % 2 else 10) for b in range(size)] for a in range(size)]
    order = best_order(costs, ring)
    assert sorted(order) == list(range(size))
    assert total(costs, order, ring) < total(costs, range(size), ring) / 2
    for a, b in itertools.combinations(range(size), 2):
        other = list(order)
        other[a], other[b] = order[b], order[a]
        assert total(costs, other, ring) >= total(costs, order, ring)
    assert best_order([[1.0] * size] * size, ring) == list(range(size))
