"""A part of an object that is made at its first use."""

from __future__ import annotations

import threading
import time

from mpicomm.api.lifetime import AtFirstUse


class Owner:
    @AtFirstUse
    def part(self) -> object:
        time.sleep(0.01)  # so that all threads come meanwhile
        return object()


def test_threads_that_come_at_once_get_the_same_part() -> None:
    owner, found = Owner(), set[object]()
    begin = threading.Barrier(8)

    def look() -> None:
        begin.wait()
        found.add(owner.part)

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {owner.part} != {Owner().part}
