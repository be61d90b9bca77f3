"""The facts of a call as a hash and as text."""

from __future__ import annotations

from mpicomm.activity.layout import filled
from mpicomm.collectives.call_log import Signature, counted_hash


def test_each_count_has_another_hash() -> None:
    counts = [None, *range(2000), *(1 << bit for bit in range(11, 60)), (1 << 32) + 1, 3 << 32]
    hashes = {counted_hash(0xFFFFFFFF, count) for count in counts}
    assert len(hashes) == len(counts)
    assert all(0 <= each < 1 << 32 for each in hashes)


def test_the_text_without_a_count_takes_any_count() -> None:
    for op in ("sum", None):
        assert filled(Signature("Allreduce", "float32", 0, op).text_without_count(), 7, 0) == str(
            Signature("Allreduce", "float32", 7, op)
        )
    of_no_count = Signature("Allgatherv", "bytes", root=1)
    assert of_no_count.text_without_count() == str(of_no_count)
    assert "root=1" in str(of_no_count)
