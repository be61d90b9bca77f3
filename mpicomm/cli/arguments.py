"""Options of command lines and their types, the sizes of a sweep, and JSON files. Imports no MPI."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

from mpicomm import environment
from mpicomm.errors import InvalidUsageError
from mpicomm.sizes import format_size, nbytes_of

T = TypeVar("T")


def command_parser(
    name: str,
    description: str,
    *,
    json: Literal["file", "output", ""] = "file",
    peers: Collection[str] = (),
    allow_abbrev: bool = True,
) -> argparse.ArgumentParser:
    """Return the parser of a command, with the options that `open_communicator` takes, and with these.

    ``json`` adds an option for a "file" of results, or for JSON in place of all "output"; without that option its value
    is False, and for standard output, which "-" also names, it is None. ``peers`` are other libraries to compare with.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m mpicomm.{name}", description=description, allow_abbrev=allow_abbrev
    )
    ranks = parser.add_argument_group("ranks and results")
    ranks.add_argument("-D", "--device", choices=("auto", "cpu"), default="auto", help="default: auto")
    ranks.add_argument(
        "--handle", choices=environment.HANDLES, default="auto", help="how memory is opened; default: auto"
    )
    if json == "file":
        ranks.add_argument("-J", "--json", type=output_file, metavar="FILE", help="write the results there")
    elif json == "output":
        ranks.add_argument(
            "--json",
            nargs="?",
            const=None,
            default=False,
            type=lambda text: None if text == "-" else output_file(text),
            metavar="FILE",
            help="write one JSON object, by default to standard output",
        )
    if peers:
        peer = names_from(peers, "peer")
        ranks.add_argument("--compare", type=peer, default=[], metavar="PEER,...", help=", ".join(peers))
    return parser


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


def list_of(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return an argparse type that reads a list, as in 2,4,8."""
    return lambda text: [parse(part.strip()) for part in text.split(",")]


def names_from(known: Collection[str], what: str) -> Callable[[str], list[str]]:
    """Return an argparse type that reads a list of ``known`` names, each of them once."""
    parse_names = list_of(name_from(known, what))
    return lambda text: list(dict.fromkeys(parse_names(text)))


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
