"""Errors with mpicomm's class and with the class that mpi4py raises."""

from __future__ import annotations

import pickle

import pytest
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.faults import BufferRefusedError, RefusedByMpiError, UnknownElementsError, UnknownTypeError


@pytest.mark.parametrize("error_class", [MPI.ERR_OP, MPI.ERR_TYPE, MPI.ERR_ROOT])
def test_an_error_for_mpis_has_its_words_and_mpis_class(error_class: int) -> None:
    error = RefusedByMpiError("root=9 is no rank", error_class)
    assert isinstance(error, InvalidUsageError) and isinstance(error, MPI.Exception)
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert str(each) == "root=9 is no rank" and each.ranks == ()
        assert each.Get_error_class() == each.Get_error_code() == int(each) == error_class


@pytest.mark.parametrize("cls", [UnknownTypeError, UnknownElementsError])
def test_an_error_for_an_unknown_type_is_a_key_error_without_quotes(cls: type[UnknownTypeError]) -> None:
    error = cls("no such 'type'")
    assert isinstance(error, KeyError) and isinstance(error, InvalidUsageError)
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == "no such 'type'"
    assert isinstance(error, BufferRefusedError) == (cls is UnknownElementsError)
