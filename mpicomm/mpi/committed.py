"""Whether a datatype is committed. MPI has no inquiry for it, but refuses other datatypes in messages."""

from __future__ import annotations

from mpi4py import MPI


def is_committed(datatype: MPI.Datatype) -> bool:
    """Return whether MPI takes a datatype for communication. Local.

    It makes a request that it never starts. MPI need not check the datatype of a message without elements or without a
    receiver. So this message has an element and goes to this process.
    """
    own = MPI.Intracomm(MPI.COMM_SELF)
    handler = own.Get_errhandler()
    own.Set_errhandler(MPI.ERRORS_RETURN)  # the program may have chosen that errors end it
    try:
        own.Send_init([bytearray(1), 1, datatype], 0).Free()
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_TYPE:
            raise
        return False
    finally:
        own.Set_errhandler(handler)
        handler.Free()
    return True
