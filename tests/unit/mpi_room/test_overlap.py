from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from mpicomm import InvalidUsageError
from mpicomm.mpi.arguments import Operand, overlaps, parse, require_separate


def operand_of(spec: Any, size: int | None = None) -> Operand:
    if size is None:
        return parse(spec, writable=True, name="recvbuf")
    return parse(spec, shape="vector", blocks=size, writable=True, name="sendbuf")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_only_elements_overlap(data: st.DataObject) -> None:
    a = np.zeros(12, "i4")
    touched, operands = [], []
    for _ in range(2):
        counts = data.draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))
        displs = [data.draw(st.integers(0, 12 - count)) for count in counts]
        touched.append({place + i for count, place in zip(counts, displs, strict=True) for i in range(count)})
        operands.append(operand_of([a, (counts, displs)], 3))
    assert overlaps(*operands) == bool(touched[0] & touched[1])


def test_overlap_of_plain_operands() -> None:
    a = np.zeros(10)
    assert overlaps(operand_of(a[:6]), operand_of(a[5:]))
    assert not overlaps(operand_of(a[:5]), operand_of(a[5:]))
    assert not overlaps(operand_of(a[3:3]), operand_of(a))
    assert not overlaps(operand_of([a, 1, MPI.FLOAT_INT]), operand_of(a))


def test_send_and_receive_memory_are_separate() -> None:
    a = np.zeros(10)
    require_separate(operand_of(a[:5]), operand_of(a[5:]))
    require_separate(operand_of(a), operand_of(a), reduction=True)
    for send, receive, reduction in ((a, a, False), (a[:6], a[4:], True), (a[:6], a, True), (a, a.view("i8"), True)):
        with pytest.raises(InvalidUsageError, match=r"recvbuf and recvbuf overlap: pass MPI\.IN_PLACE"):
            require_separate(operand_of(send), operand_of(receive), reduction=reduction)
