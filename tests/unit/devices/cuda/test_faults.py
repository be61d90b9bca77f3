from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings", reason="the page is of a GPU's driver")

from mpicomm.devices.cuda.faults import FaultPage
from mpicomm.errors import CollectiveTimeoutError, PeerError


@pytest.mark.parametrize("kind", [CollectiveTimeoutError, PeerError])
def test_an_error_is_raised_by_every_check_and_keeps_no_frames(
    kind: type[CollectiveTimeoutError] | type[PeerError],
) -> None:
    page = object.__new__(FaultPage)  # without a device
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
