"""Options of command lines and their types, the sizes of a sweep, and JSON files. Imports no MPI."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from mpicomm import environment
from mpicomm.errors import InvalidUsageError
from mpicomm.sizes import format_size, nbytes_of


def add_communicator_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the options that `open_communicator` takes."""
    parser.add_argument("-D", "--device", choices=("auto", "cpu"), default="auto", help="default: auto")
    parser.add_argument(
        "--handle", choices=environment.HANDLES, default="auto", help="how memory is opened; default: auto"
    )


def measuring_parser(name: str, description: str, *, saves: bool = True) -> argparse.ArgumentParser:
    """Return the parser of a command, with the options that all measurements have."""
    parser = argparse.ArgumentParser(prog=f"python -m mpicomm.{name}", description=description)
    ranks = parser.add_argument_group("ranks and results")
    add_communicator_arguments(ranks)
    if saves:
        ranks.add_argument("-J", "--json", type=output_file, metavar="FILE", help="write the results there")
    return parser


def add_compare_argument(parser: argparse.ArgumentParser, peers: Collection[str]) -> None:
    """Add the option of the other libraries to compare with."""
    peer = names_from(peers, "peer")
    parser.add_argument("--compare", type=peer, default=[], metavar="PEER,...", help=", ".join(peers))


def add_sweep_arguments(
    parser: argparse.ArgumentParser, *, smallest: int, factor: int, largest: int | None = None
) -> None:
    """Add nccl-tests' options for the sizes to measure and the numbers of iterations."""
    parser.add_argument(
        "-b", "--minbytes", type=parse_size, default=smallest, metavar="SIZE", help=f"default: {format_size(smallest)}"
    )
    default = "64M on the cpu, 1G on GPUs" if largest is None else format_size(largest)
    parser.add_argument(
        "-e", "--maxbytes", type=parse_size, default=largest, metavar="SIZE", help=f"default: {default}"
    )
    parser.add_argument(
        "-f", "--stepfactor", type=count_from(2), default=factor, metavar="N", help=f"default: {factor}"
    )
    parser.add_argument(
        "-n", "--iters", type=count_from(1), default=20, metavar="N", help="timed iterations; default: 20"
    )
    parser.add_argument("-w", "--warmup_iters", type=count_from(0), default=5, metavar="N", help="default: 5")


def required_sizes(options: argparse.Namespace) -> list[int]:
    """Return the sizes from -b to -e. Raises `InvalidUsageError` if there is none."""
    found = sizes(options.minbytes, options.maxbytes, options.stepfactor)
    if not found:
        raise InvalidUsageError(
            f"no size to measure: -b {format_size(options.minbytes)} is above -e {format_size(options.maxbytes)}: "
            "pass a larger -e"
        )
    return found


def sizes(smallest: int, largest: int, factor: int) -> list[int]:
    """Return the sizes of a sweep, with the largest one if the steps reach it."""
    found = []
    while smallest <= largest:
        found.append(smallest)
        smallest *= factor
    return found


def parse_size(text: str) -> int:
    """Read a size in bytes, as `nbytes_of` does. An argparse type."""
    try:
        return nbytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count_from(smallest: int) -> Callable[[str], int]:
    """Return an argparse type that reads a whole number not below ``smallest``."""

    def parse_count(text: str) -> int:
        if not re.fullmatch(r"[0-9]+", text) or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text!r}: use a whole number from {smallest} up")
        return int(text)

    return parse_count


def name_from(known: Collection[str], what: str, *, aliases: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """Return an argparse type that reads one of the ``known`` names, or its alias. ``what`` says what they name."""

    def parse_name(text: str) -> str:
        name = (aliases or {}).get(text, text)
        if name not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}: use {', '.join(known)}")
        return name

    return parse_name


def counts_from(smallest: int) -> Callable[[str], list[int]]:
    """Return an argparse type that reads a list of whole numbers not below ``smallest``."""
    parse_count = count_from(smallest)

    def parse_counts(text: str) -> list[int]:
        try:
            return [parse_count(part) for part in text.split(",")]
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(f"{text!r}: use whole numbers from {smallest} up, as in 2,4,8") from None

    return parse_counts


def names_from(known: Collection[str], what: str) -> Callable[[str], list[str]]:
    """Return an argparse type that reads a list of ``known`` names, each of them once."""
    parse_name = name_from(known, what)
    return lambda text: list(dict.fromkeys(parse_name(name.strip()) for name in text.split(",")))


def output_file(text: str) -> Path:
    """Return a path, after a check that a file can be written there, because the run may be long. An argparse type."""
    path = Path(text).absolute()
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} exists and is no file: name another one")
    partial = _partial(path)
    try:
        partial.touch()
        partial.unlink()
    except OSError as error:
        reason = f"{path.parent} is no directory that can be written to ({error.strerror})"
        raise argparse.ArgumentTypeError(f"{text!r}: {reason}") from None
    return path


def _partial(path: Path) -> Path:
    """Return the file that becomes ``path`` when it is complete."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option of commands whose whole output may be JSON.

    Without the option its value is False. For standard output, which "-" also names, it is None.
    """
    parser.add_argument(
        "--json",
        nargs="?",
        const=None,
        default=False,
        type=lambda text: None if text == "-" else output_file(text),
        metavar="FILE",
        help="write one JSON object, by default to standard output",
    )


def write_json(path: Path, document: object) -> None:
    """Write a JSON file. It appears whole or not at all. Raises `InvalidUsageError` if it cannot be written."""
    partial = _partial(path)
    try:
        partial.write_text(json.dumps(document, indent=2) + "\n")
        partial.replace(path)
    except OSError as error:
        raise InvalidUsageError(f"{path} cannot be written: {error.strerror}: name a file on another disk") from error
    finally:
        with suppress(OSError):
            partial.unlink()
