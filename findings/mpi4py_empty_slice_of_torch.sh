#!/usr/bin/env bash
# mpi4py 4.1.2 with PyTorch 2.13.0: a tensor without elements that PyTorch calls contiguous is refused as a buffer.
#
# `torch.zeros(4, 5)[:, :0]` keeps the strides (5, 1). mpi4py compares them with those of shape (4, 0) and raises
# "dlpack: buffer is not contiguous". It takes `[:0]`, and the same slice as an array of NumPy. So a rank with an empty
# part of a tensor that is split by columns fails alone, where ranks with elements, or with rows, go on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 mpi4py==4.1.2 mpich==5.0.2
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check typing-extensions==4.16.0 sympy==1.14.0 networkx==3.6.1 \
  jinja2==3.1.6 fsspec==2026.9.0 filelock==4.3.1
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps torch==2.13.0+cpu \
  --extra-index-url https://download.pytorch.org/whl/cpu
cat >"$folder/program.py" <<'PROGRAM'
import torch
from mpi4py import MPI

whole = torch.zeros(4, 5)
for name, part in (("rows", whole[:0]), ("columns", whole[:, :0]), ("columns in NumPy", whole.numpy()[:, :0])):
    told = part.is_contiguous() if isinstance(part, torch.Tensor) else part.flags.c_contiguous
    try:
        MPI.COMM_SELF.Bcast(part)
        outcome = "taken"
    except BufferError as error:
        outcome = f"BufferError: {error}"
    print(f"{name}: shape {tuple(part.shape)}, contiguous {told}, {outcome}")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" | tee "$folder/lines"
diff "$folder/lines" - <<'EXPECTED' || { echo "the behaviour has changed"; exit 1; }
rows: shape (0, 5), contiguous True, taken
columns: shape (4, 0), contiguous True, BufferError: dlpack: buffer is not contiguous
columns in NumPy: shape (4, 0), contiguous True, taken
EXPECTED
