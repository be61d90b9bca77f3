#!/usr/bin/env bash
# MPICH 5.0.2 with mpi4py 4.1.2 and NumPy 2.4.6: the status of Isendrecv and Isendrecv_replace, two ranks.
#
# The data is right, but MPI does not write the source, the tag and the count of the received message into the status of
# the request. It has those of an earlier message: here of the Sendrecv before, whose 8 elements had another tag. The
# status of a blocking Sendrecv is right. So a program that takes the length of what it received from this status works
# on a wrong number of elements.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mpi4py==4.1.2 mpich==5.0.2 numpy==2.4.6
cat >"$folder/program.py" <<'PROGRAM'
import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, peer = comm.rank, 1 - comm.rank
found = []


def note(name, status, buffer):
    right = bool((buffer == peer).all())
    found.append((name, status.source, status.tag, status.Get_count(MPI.INT32_T), "right" if right else "wrong"))


def data(count):
    return np.full(count, rank, np.int32), np.empty(count, np.int32)


for name, tag, count in (("Sendrecv", 3, 8), ("Isendrecv", 5, 1000), ("Isendrecv_replace", 5, 1000), ("Sendrecv", 7, 20)):
    status, (sent, received) = MPI.Status(), data(count)
    if name == "Isendrecv":
        comm.Isendrecv(sent, peer, tag, received, peer, tag).Wait(status)
    elif name == "Sendrecv":
        comm.Sendrecv(sent, peer, tag, received, peer, tag, status)
    else:
        received = sent
        comm.Isendrecv_replace(received, peer, tag, peer, tag).Wait(status)
    note(name, status, received)
everyone = comm.gather(found)
if comm.rank == 0:
    for number, each in enumerate(everyone):
        for name, source, tag, count, data_is in each:
            print(f"rank {number}  {name:17}  source {source}  tag {tag}  count {count}  data {data_is}")
        stale = (1 - number, 3, 8, "right")
        expected = [
            ("Sendrecv", *stale),
            ("Isendrecv", *stale),
            ("Isendrecv_replace", *stale),
            ("Sendrecv", 1 - number, 7, 20, "right"),
        ]
        if each != expected:
            sys.exit("the behaviour has changed")
PROGRAM
"$folder/venv/bin/mpiexec" -n 2 "$folder/venv/bin/python" "$folder/program.py" </dev/null
