"""Programs of others, as source packages and with the packages that they need; pip fetches them into .clients.

A folder of .clients that is there already stays as it is, so a machine without a network takes a copy of the folders.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
from importlib.metadata import version
from pathlib import Path

CLIENTS = Path(__file__).parents[2] / ".clients"
VERSIONS = {
    "mpi4py": version("mpi4py"),  # its tests belong to the version that is installed
    "mpi4py-fft": "2.0.6",
    "pylops-mpi": "0.8.0",
    "mpiarray": "0.2.1",
    "heat": "1.9.0",
    "fbpic": "0.27.1",
    "pySDC": "5.9",
    "torch-harmonics": "0.9.3",
    "qokit": "0.1.4",
}
OPTIONS = {
    "heat": ("--no-deps", "--ignore-requires-python", "torchvision"),  # it names an older PyTorch
    "fbpic": ("pyfftw",),
    "qokit": ("--no-deps", "numba-cuda"),  # it names fixed versions of 20 packages
}
"""What pip installs a package with."""


def source_of(package: str) -> Path:
    """Return the folder of a source package."""
    name = f"{package.replace('-', '_')}-{VERSIONS[package]}"
    folder = CLIENTS / name
    if not folder.exists():
        # mpi4py-fft looks for FFTW when pip asks for its metadata. Its pencils need no FFTW.
        library = CLIENTS / "fftw/lib/libfftw3.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        library.touch()
        options = ["-q", "--no-deps", "--no-binary", package, "--dest", str(CLIENTS), f"{package}=={VERSIONS[package]}"]
        environment = {**os.environ, "FFTW_ROOT": str(library.parents[1])}
        subprocess.run([sys.executable, "-m", "pip", "download", *options], check=True, env=environment)
        with tarfile.open(CLIENTS / f"{name}.tar.gz") as archive:
            archive.extractall(CLIENTS, filter="data")
        if package == "mpi4py":
            _repair_cupy_arrays(folder)
    return folder


def needs_of(package: str) -> Path:
    """Return a folder of packages: one that is named, and those that it needs and that this Python does not find."""
    environment = CLIENTS / "venv"
    packages = environment / f"lib/python{sysconfig.get_python_version()}/site-packages"
    if not packages.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
        found = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (packages / "found.pth").write_text(found)
    command = [str(environment / "bin/python"), "-m", "pip", "install", "-q", f"{package}=={VERSIONS[package]}"]
    subprocess.run([*command, *OPTIONS.get(package, ())], check=True)
    return packages


def _repair_cupy_arrays(folder: Path) -> None:
    # Its CuPy arrays begin with -1 in each element, and NumPy 2 refuses -1 for unsigned types.
    arrays = folder / "test" / "arrayimpl.py"
    cast = "cupy.asarray(numpy.asarray(arg).astype(typecode))"
    numpys, cupys = arrays.read_text().split("class GPUArrayCuPy")
    cupys = cupys.replace("fill(arg)", f"fill({cast})").replace("cupy.asarray(arg, typecode)", cast)
    arrays.write_text("class GPUArrayCuPy".join((numpys, cupys)))
