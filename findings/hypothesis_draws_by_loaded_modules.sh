#!/usr/bin/env bash
# hypothesis 6.170.17: with derandomize=True and no database a test still draws other values if another module of the
# project has been imported, because the constants in its source are among the values that are drawn.
#
# So MPI ranks that draw the same calls from one seed do not draw the same calls if one rank alone has imported a module,
# for example to report that it waits. From then on the ranks wait for each other in different calls.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check hypothesis==6.170.17
cd "$folder"
echo 'PLACE = 987654321' >report.py
cat >program.py <<'PROGRAM'
import hashlib
import sys

from hypothesis import given, settings, strategies

if len(sys.argv) > 1:
    import report
drawn = []


@settings(derandomize=True, database=None, max_examples=500)
@given(strategies.integers(0, 1 << 40))
def draw(number):
    drawn.append(number)


draw()
print(hashlib.sha256(repr(drawn).encode()).hexdigest()[:16])
PROGRAM
for arguments in "" "" import import; do
  # shellcheck disable=SC2086 # no word is no argument
  venv/bin/python program.py $arguments
done | tee lines
test "$(sed -n 1,2p lines | sort -u | wc -l)" = 1 && test "$(sed -n 3,4p lines | sort -u | wc -l)" = 1 &&
  test "$(sort -u lines | wc -l)" = 2 || { echo "the behaviour has changed"; exit 1; }
