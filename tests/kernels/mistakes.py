"""Several deliberate mistakes in one build of a kernel, of which the launcher switches on one.

Compiling a kernel takes longer than most runs, and the negative controls of a table differ in one expression or in one
statement each. So one build has both texts of each place, and asks ``cpu::mistake`` which of them it is to carry out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_WORD = re.compile(r"\w\w")  # two letters of one word
_COMMENT = re.compile(r"[ \t]*//[^\n]*")
_HEAD = re.compile(r"\s*(?:(?:if(?:\s+constexpr)?|for|while)\s*(?=\()|else\b)")
_DECLARATION = re.compile(r"\s*(?:const|constexpr|static|auto|using|struct|template|bool|[ui]\d+|[A-Z]\w*)[\s<*&]")


@dataclass(frozen=True)
class Change:
    """Replace ``old``, which must occur exactly once in a file of the kernels, by ``new``."""

    file: str
    old: str
    new: str
    alone: bool = False
    """Whether it needs its own build, because the types of two expressions differ."""

    @property
    def name(self) -> str:
        """The name of the file, which is that of one file only."""
        return Path(self.file).name

    def apply(self, text: str) -> str:
        # A change that fits nowhere would make no mistake, and a change that fits twice would make another mistake.
        if text.count(self.old) != 1:  # no AssertionError, which tests of changed kernels expect
            raise ValueError(f"{self.file} has {text.count(self.old)} of: {self.old}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Mistake:
    """The change at ``number``, counted from 1, of all changes that one build has."""

    number: int
    changes: tuple[Change, ...]


Changes = Sequence[Change | Mistake]


@dataclass(frozen=True)
class _Switch:
    """The place of an expression or a statement in a text without comments, as it is and with a mistake."""

    begin: int
    end: int
    right: str
    wrong: str
    is_expression: bool

    def text(self, number: int) -> str:
        if self.is_expression:
            return f"(cpu::mistake == {number} ? ({self.wrong}) : ({self.right}))"
        return f"{{ if (cpu::mistake == {number}) {{ {self.wrong} }} else {{ {self.right} }} }}"


def shared(changes: Iterable[Change], text_of: Callable[[Change], str]) -> list[Change | Mistake]:
    """Return each change as a part of a build of several, or as it is if it needs its own build.

    ``text_of`` returns the text of a change's file.
    """
    changes = list(changes)
    builds: list[dict[Change, _Switch]] = []
    for change in dict.fromkeys(changes):
        if switch := None if change.alone else _switch(text_of(change), change):
            free = (build for build in builds if _is_free(switch, change.name, build))
            build = next(free, None)
            if build is None:
                builds.append(build := {})
            build[change] = switch
    made: list[Change | Mistake] = []
    for change in changes:
        together = next((tuple(build) for build in builds if change in build), ())
        made.append(Mistake(together.index(change) + 1, together) if together else change)
    return made


def _is_free(switch: _Switch, name: str, build: dict[Change, _Switch]) -> bool:
    others = [each for change, each in build.items() if change.name == name]
    return all(switch.end <= each.begin or each.end <= switch.begin for each in others)


def with_mistakes(text: str, name: str, changes: Sequence[Change]) -> str:
    """Return the text of the file ``name`` with the mistakes that it can make, of all ``changes`` of a build."""
    switches: list[tuple[_Switch, int]] = []
    for number, change in enumerate(changes, 1):
        if change.name == name:
            switch = _switch(text, change)
            assert switch is not None
            switches.append((switch, number))
    text = _COMMENT.sub("", text)
    for switch, number in sorted(switches, key=lambda each: each[0].begin, reverse=True):
        text = text[: switch.begin] + switch.text(number) + text[switch.end :]
    return text


def _switch(text: str, change: Change) -> _Switch | None:
    """Return the smallest whole expression or statement around what a change changes; None if none is found."""
    right, wrong = (_COMMENT.sub("", each) for each in (text, change.apply(text)))
    begin = _alike(right, wrong)
    tail = min(_alike(right[::-1], wrong[::-1]), len(right) - begin, len(wrong) - begin)
    while begin and any(_WORD.match(each, begin - 1) for each in (right, wrong)):
        begin -= 1
    while tail and any(_WORD.match(each, len(each) - tail - 1) for each in (right, wrong)):
        tail -= 1
    end, end_wrong = len(right) - tail, len(wrong) - tail
    old, new = right[begin:end], wrong[begin:end_wrong]
    if not _is_whole(old) or not _is_whole(new):
        return None
    of_statements = ";" in old + new
    left = _scan(right, begin, -1, "" if of_statements else ",?:=")
    is_statement = right[left - 1] in ";{}" and not _is_in_parentheses(right, left)
    if is_statement and of_statements and old.rstrip().endswith((";", "}")):
        last = end
    else:
        last = _scan(right, end, 1, "" if is_statement else ",?:")
        if is_statement and right[last] == ";":
            last += 1
        elif is_statement:  # an element of a list
            is_statement, last = False, _scan(right, end, 1, ",?:")
    if is_statement:
        left = _after_heads(right, left, begin)
    elif of_statements or "constexpr" in right[_scan(right, begin, -1, "") : begin]:
        return None
    of_right, of_wrong = right[left:last], right[left:begin] + new + right[end:last]
    if "#" in of_right + of_wrong or any(map(_DECLARATION.match, (of_right + ";" + of_wrong).split(";"))):
        return None
    if not is_statement and not (of_right.strip() and of_wrong.strip()):
        return None
    return _Switch(left, last, of_right.strip(), of_wrong.strip(), not is_statement)


def _alike(one: str, other: str) -> int:
    """Return the length of the beginning that two texts share."""
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)


def _is_whole(text: str) -> bool:
    """Return whether each bracket has its partner."""
    depth = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _scan(text: str, at: int, step: int, ends: str) -> int:
    """Return where the text that encloses ``at`` begins, or ends: at a bracket, a semicolon, or one of ``ends``."""
    opening, closing = ("([{", ")]}")[::step]
    depth = 0
    while 0 < at < len(text):
        letter = text[at if step > 0 else at - 1]
        around = text[at - 2 : at + 2]
        is_end = letter in ends and not _is_other(letter, around, step)
        if depth == 0 and (is_end or letter in ";" + closing or (step < 0 and letter == "}")):
            break
        depth += (letter in opening) - (letter in closing)
        at += step
    return at


def _is_other(letter: str, around: str, step: int) -> bool:
    """Return whether a sign is a part of another one, as in ``::`` and ``==``."""
    before, after = (around[:2], around[1:3]) if step < 0 else (around[1:3], around[2:])
    if letter == ":":
        return "::" in (before, after)
    return letter == "=" and (before in ("==", "!=", "<=", ">=") or after == "==")


def _is_in_parentheses(text: str, at: int) -> bool:
    """Return whether a place lies in the head of a loop."""
    depth = 0
    for letter in reversed(text[:at]):
        depth += (letter in ")]}") - (letter in "([{")
        if depth < 0:
            return letter == "("
    return False


def _after_heads(text: str, left: int, begin: int) -> int:
    """Return where a statement begins after the conditions before it."""
    while (head := _HEAD.match(text, left)) and head.end() <= begin:
        left = head.end()
        if text[left] == "(":
            left = _scan(text, left + 1, 1, "") + 1
    return left
