"""Feed strangers' messages to the descriptor exchange: `python scripts/testing/fuzz.py [--packets 1000000]`.

It starts in the project's root. The first inputs are random. If atheris is installed, it then chooses as many inputs by
the code that they reach. A dropped message is the right answer; anything else ends the program with a traceback. An
accepted message must have the secret. ``--json FILE`` adds a row of the random inputs to a result file.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
from pathlib import Path

from mpicomm.cli.arguments import output_file
from mpicomm.sharing import fd_exchange
from mpicomm.sharing.fd_exchange import Address, FdExchange

sys.path.append(str(Path(__file__).parents[1] / "measuring"))
from result_file import LONG_RUNS, Table, add_tables, hardware, today

SECRET = bytes(range(32))
HELLO = fd_exchange._HELLO.pack(fd_exchange._MAGIC, 1, 0, 0, SECRET)
OTHERS = {1: Address(b"", SECRET)}


def feed(content: bytes) -> None:
    """Read bytes as the exchange does."""
    if EXCHANGE._message(content, OTHERS, {(1, 0): 1}) is not None and content != HELLO:
        raise AssertionError(f"accepted: {content.hex()}")


EXCHANGE = FdExchange(0, 1)


def mutated(rng: random.Random) -> bytes:
    """Return random bytes, or a good message with bytes changed, missing or added."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(2 * len(HELLO)))
    content = bytearray(HELLO)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(content))
        content[at : at + rng.choice((1, 1, 1, 0, 2, 8))] = rng.randbytes(rng.choice((1, 1, 1, 0, 2, 8)))
    return bytes(content)


def main() -> None:
    """Feed as many inputs as the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packets", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    for _ in range(options.packets):
        feed(mutated(rng))
    sys.stdout.write(f"{options.packets} inputs: nothing but dropped messages\n")
    if options.json is not None:
        row = ["random damaged messages", today(), f"{options.packets:,}", "nothing but dropped messages"]
        add_tables(options.json, [Table("Reliability", "Long runs on the host", hardware([]), LONG_RUNS, [row])])
    if importlib.util.find_spec("atheris"):
        import atheris

        atheris.instrument_func(FdExchange._message)
        atheris.Setup([sys.argv[0], f"-runs={options.packets}", f"-seed={options.seed}", "-max_len=300"], feed)
        atheris.Fuzz()  # it ends the process


main()
