from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings", reason="the page is of a GPU's driver")

from mpicomm.devices.cuda.faults import FaultPage, FaultRecord
from mpicomm.errors import CollectiveTimeoutError, InvalidUsageError, MpicommError, PeerError
from mpicomm.kernels.experts import COMBINE, DISPATCH, ROOM, ROUTES
from mpicomm.kernels.team import COUNTED_ROOM, COUNTS, EXCHANGE, MISMATCH, OF_RECEIVE
from mpicomm.kernels.window import COMES_FIRST, LOCK


def page_of(**record: int) -> FaultPage:
    """A page without a device."""
    page = object.__new__(FaultPage)
    page.error = page._calls = None
    page.record = FaultRecord(**{"state": 2, "peer": 1, "elapsed_ns": 10**9, **record})
    return page


@pytest.mark.parametrize("kind", [CollectiveTimeoutError, PeerError])
def test_an_error_is_raised_by_every_check_and_keeps_no_frames(
    kind: type[CollectiveTimeoutError] | type[PeerError],
) -> None:
    page = page_of()
    try:
        raise kind("what was said", ranks=[2])
    except kind as error:
        page.fail(error)
    caught = []
    for _ in range(2):
        with pytest.raises(kind, match="what was said") as info:
            page.check()
        assert info.value.ranks == (2,)
        caught.append(info.value)
    assert caught[0] is not caught[1]
    assert page.error is not None and page.error.__traceback__ is None


@pytest.mark.parametrize(("operation", "waits"), [(EXCHANGE, False), (MISMATCH, True)])
def test_only_data_of_another_call_lets_a_check_wait_for_the_calls_of_ranks(operation: int, waits: bool) -> None:
    page = page_of(operation=operation)
    asked: list[bool] = []

    def calls(*, wait: bool) -> list[str]:
        asked.append(wait)
        return []

    with pytest.raises(PeerError if waits else CollectiveTimeoutError) as info:
        page.check(calls)
    assert info.value.ranks == (1,) and asked == [waits]


def test_an_error_is_untold_until_a_check_raises_it() -> None:
    page = page_of(state=1, operation=EXCHANGE)
    assert page.untold() is None  # its kernel still runs
    page.check()
    page.record.state = 2
    for _ in range(2):
        assert "from rank 1 did not come within 1 s" in str(page.untold())
    with pytest.raises(CollectiveTimeoutError):
        page.check()
    assert page.untold() is None


LATE, WRONG = CollectiveTimeoutError, InvalidUsageError


@pytest.mark.parametrize(
    ("operation", "sequence", "kind", "text"),
    [
        (DISPATCH, 7, LATE, "Experts.dispatch: number 7 from rank 1 did not come within 1 s"),
        (COMBINE, 7, LATE, "Experts.combine: number 7 from rank 1 did not come within 1 s"),
        (ROUTES, 7, WRONG, "topk_ids of rank 1 has an id that is no expert at token 7: pass the number of"),
        (ROOM, 7, WRONG, "rank 1 gets 7 rows, more than the capacity: create the Experts with a larger"),
        (COUNTS, 7, WRONG, "rank 1 passed a count or displacement of sendbuf for rank 7, .* or goes beyond"),
        (COUNTED_ROOM, 7, WRONG, "recvbuf of rank 1 needs room for 7 elements, by the counts on the GPU"),
        (LOCK, 7, LATE, "Win.Lock: rank 1 holds the lock, and did not give it up within 1 s"),
        (99, 7, LATE, "operation 99: number 7 from rank 1 did not come within 1 s"),
        # The sequence number tells similar faults apart.
        (COUNTS, 7 | OF_RECEIVE, WRONG, "rank 1 passed a displacement of recvbuf for rank 7, on the GPU, that is neg"),
        (COUNTED_ROOM, 7 | OF_RECEIVE, WRONG, f"recvbuf of rank 1 needs room for {7 | OF_RECEIVE} elements"),
        (LOCK, COMES_FIRST, LATE, "Win.Lock: rank 1 has its turn to take the lock first, and did not take it within 1"),
    ],
)
def test_faults_name_the_rank(operation: int, sequence: int, kind: type[MpicommError], text: str) -> None:
    page = page_of(operation=operation, sequence=sequence)
    for _ in range(2):
        with pytest.raises(kind, match=text) as info:
            page.check()
        assert info.value.ranks == (1,)
