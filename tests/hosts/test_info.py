"""``python -m mpicomm.info`` over two hosts."""

from __future__ import annotations

import json

import pytest

from tests.helpers.jobs.hosts import Hosts


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 0, 1), (0, 1, 0, 1)])
def test_info_shows_the_hosts_and_which_memory_is_out_of_reach(two_hosts: Hosts, placement: tuple[int, ...]) -> None:
    found = json.loads(two_hosts.run(placement, "-m", "mpicomm.info", "--device", "cpu", "--json"))
    assert [info["host"] for info in found["ranks"]] == [f"host{host}" for host in placement]
    assert [info["node"] for info in found["ranks"]] == list(placement)
    for rank, info in enumerate(found["ranks"]):
        here = placement[rank]
        expected = ["host memory" if host == here else "other node" for host in placement]
        expected[rank] = "self"
        assert [link["path"] for link in info["links"]] == expected
