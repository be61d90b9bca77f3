from __future__ import annotations

from importlib.util import find_spec

# pytest of all of tests goes on without PyTorch. `scripts/test torch` installs it.
collect_ignore_glob = [] if find_spec("torch") else ["*"]
