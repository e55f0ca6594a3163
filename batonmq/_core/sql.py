"""Conditions on the properties of a message, as in SQL92: their text and their evaluation.

`sql_parser` creates them from text. This module does not depend on messages: a test gets a function
from the name of a property to its text, None if the message has no such property.

Logic has three values. A comparison is unknown if the property is missing, or if its text is not a
number where a number is needed. A message is accepted if the whole condition is true. Tests return
a bool: NOT is moved down to the comparisons, and below AND and OR alone unknown is equal to false.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import eq, ge, gt, le, lt, ne
from typing import Any, Final, Protocol

Get = Callable[[str], str | None]
Test = Callable[[Get], bool]
Value = int | float | str | bool

NUMBER_CHARACTERS_MAX = 64
"""Longer text is not a number, because parsing it would take too long."""
_NUMBER = re.compile(
    r"[+-]?(?:(\d+)|(?:\d+\.\d*|\.\d+)(?:e[+-]?\d+)?|\d+e[+-]?\d+)", re.ASCII | re.I
)
_WORDS = "AND|BETWEEN|CONTAINS|ENDSWITH|FALSE|IN|IS|NOT|NULL|OR|STARTSWITH|TRUE"
_NAME = re.compile(rf"(?!(?:{_WORDS})\Z)[a-z_$][a-z0-9_$]*", re.ASCII | re.I)
_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": eq, "<>": ne, ">": gt, ">=": ge, "<": lt, "<=": le
}  # fmt: skip
_OPPOSITE: Final = {"=": "<>", "<>": "=", ">": "<=", "<=": ">", ">=": "<", "<": ">="}
_MIRRORED: Final = {"=": "=", "<>": "<>", ">": "<", "<": ">", ">=": "<=", "<=": ">="}
_MATCH: Final[dict[str, Callable[[str, str], bool]]] = {
    "CONTAINS": str.__contains__, "STARTSWITH": str.startswith, "ENDSWITH": str.endswith
}  # fmt: skip


def number(text: str) -> int | float | None:
    """Return the decimal number in `text`; None if the text is not a number.

    Integers of any size are exact. White space, `_`, `inf`, `nan` and numbers too large for a
    double are not accepted.
    """
    if len(text) > NUMBER_CHARACTERS_MAX:
        return None
    if text.isdecimal() and text.isascii():
        return int(text)
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    if match[1]:
        return int(text)
    value = float(text)
    return value if isfinite(value) else None


def truth(text: str) -> bool | None:
    """Return the value of `true` or `false`, in any case; None for other text."""
    lower = text.lower()
    return lower == "true" if lower in ("true", "false") else None


@dataclass(frozen=True, slots=True)
class Property:
    """The value of a property as an operand."""

    name: str


Operand = Property | Value


class Condition(Protocol):
    """A condition that is true, false or unknown for a message."""

    def text(self) -> str:
        """Return the condition in canonical form."""
        ...

    def test(self, *, negated: bool) -> Test:
        """Return a function that evaluates the condition, or with `negated` its negation."""
        ...

    def names(self) -> Iterator[str]:
        """Yield the name of each property, once for each use."""
        ...


def count_comparisons(condition: Condition) -> int:
    """Return the number of comparisons at all depths; TRUE and FALSE count too."""
    left, count = [condition], 0
    while left:
        part = left.pop()
        if isinstance(part, Not):
            left.append(part.part)
        elif isinstance(part, Joined):
            left += part.parts
        else:
            count += 1
    return count


@dataclass(frozen=True, slots=True)
class Constant:
    """TRUE or FALSE."""

    value: bool

    def text(self) -> str:
        """As in `Condition`."""
        return written(self.value)

    def test(self, *, negated: bool) -> Test:
        """As in `Condition`."""
        return _constant(self.value != negated)

    def names(self) -> Iterator[str]:
        """As in `Condition`."""
        return iter(())


@dataclass(frozen=True, slots=True)
class Compare:
    """`left operator right`.

    Values are compared as booleans if one side is TRUE or FALSE, as numbers if one side is a number
    or the operator is an order, and as text otherwise.
    """

    left: Operand
    operator: str
    right: Operand

    def text(self) -> str:
        """As in `Condition`."""
        return f"{written(self.left)} {self.operator} {written(self.right)}"

    def test(self, *, negated: bool) -> Test:
        """As in `Condition`."""
        operator = _OPPOSITE[self.operator] if negated else self.operator
        convert = self._convert()
        left, right = self.left, self.right
        if not isinstance(left, Property):
            left, right, operator = right, left, _MIRRORED[operator]
        compare = _COMPARE[operator]
        if isinstance(right, Property):
            return _with_each_other(_operand(left, convert), _operand(right, convert), compare)
        value = _converted(right, convert)
        if value is None:
            return _constant(False)
        if isinstance(left, Property):
            return _with_value(left.name, convert, compare, value)
        other = _converted(left, convert)
        return _constant(other is not None and compare(other, value))

    def names(self) -> Iterator[str]:
        """As in `Condition`."""
        return _names(self.left, self.right)

    def _convert(self) -> Callable[[str], Value | None] | None:
        sides = (self.left, self.right)
        if any(isinstance(side, bool) for side in sides):
            return truth
        if self.operator not in ("=", "<>") or any(isinstance(s, int | float) for s in sides):
            return number
        return None


@dataclass(frozen=True, slots=True)
class Between:
    """`value BETWEEN low AND high`: numbers, bounds included."""

    value: Operand
    low: Operand
    high: Operand

    def text(self) -> str:
        """As in `Condition`."""
        return self.worded("")

    def test(self, *, negated: bool) -> Test:
        """As in `Condition`."""
        value, low, high = self.value, self.low, self.high
        if not isinstance(value, Property) or isinstance(low, Property | str | bool):
            return self._as_two().test(negated=negated)
        if isinstance(high, Property | str | bool):
            return self._as_two().test(negated=negated)
        name, least, most = value.name, low, high

        def test(get: Get) -> bool:
            text = get(name)
            parsed = None if text is None else number(text)
            return parsed is not None and (least <= parsed <= most) is not negated

        return test

    def names(self) -> Iterator[str]:
        """As in `Condition`."""
        return _names(self.value, self.low, self.high)

    def _as_two(self) -> Joined:
        return Joined(
            "AND", (Compare(self.value, ">=", self.low), Compare(self.value, "<=", self.high))
        )

    def worded(self, inverse: str) -> str:
        """Return the text with `inverse`, which is `NOT ` or empty, before the operator."""
        return (
            f"{written(self.value)} {inverse}BETWEEN {written(self.low)} AND {written(self.high)}"
        )


@dataclass(frozen=True, slots=True)
class In:
    """`name IN (texts)`."""

    name: str
    texts: frozenset[str]

    def text(self) -> str:
        """As in `Condition`."""
        return self.worded("")

    def test(self, *, negated: bool) -> Test:
        """As in `Condition`."""
        name, texts = self.name, self.texts
        if not negated:
            return lambda get: get(name) in texts
        return lambda get: (text := get(name)) is not None and text not in texts

    def names(self) -> Iterator[str]:
        """As in `Condition`."""
        yield self.name

    def worded(self, inverse: str) -> str:
        """Return the text with `inverse`, which is `NOT ` or empty, before the operator."""
        return (
            f"{_quoted_name(self.name)} {inverse}IN ({', '.join(map(written, sorted(self.texts)))})"
        )


@dataclass(frozen=True, slots=True)
class Matches:
    """`name CONTAINS part`, and likewise STARTSWITH and ENDSWITH."""

    name: str
    operator: str
    part: str

    def text(self) -> str:
        """As in `Condition`."""
        return self.worded("")

    def test(self, *, negated: bool) -> Test:
        """As in `Condition`."""
        name, matches, part = self.name, _MATCH[self.operator], self.part
        return lambda get: (text := get(name)) is not None and matches(text, part) is not negated

    def names(self) -> Iterator[str]:
        """As in `Condition`."""
        yield self.name

    def worded(self, inverse: str) -> str:
        """Return the text with `inverse`, which is `NOT ` or empty, before the operator."""
        return f"{_quoted_name(self.name)} {inverse}{self.operator} {written(self.part)}"


@dataclass(frozen=True, slots=True)
class IsNull:
    """`name IS NULL`, which is never unknown."""

    name: str

    def text(self) -> str:
        """As in `Condition`."""
        return self.worded("")

    def test(self, *, negated: bool) -> Test:
        """As in `Condition`."""
        name = self.name
        if negated:
            return lambda get: get(name) is not None
        return lambda get: get(name) is None

    def names(self) -> Iterator[str]:
        """As in `Condition`."""
        yield self.name

    def worded(self, inverse: str) -> str:
        """Return the text with `inverse`, which is `NOT ` or empty, before the operator."""
        return f"{_quoted_name(self.name)} IS {inverse}NULL"


@dataclass(frozen=True, slots=True)
class Not:
    """`NOT part`; written inside of the part where the syntax allows it, as in `a NOT IN (...)`."""

    part: Condition

    def text(self) -> str:
        """As in `Condition`."""
        part = self.part
        if isinstance(part, Between | In | Matches | IsNull):
            return part.worded("NOT ")
        text = part.text()
        return f"NOT ({text})" if isinstance(part, Joined | Compare) else f"NOT {text}"

    def test(self, *, negated: bool) -> Test:
        """As in `Condition`."""
        return self.part.test(negated=not negated)

    def names(self) -> Iterator[str]:
        """As in `Condition`."""
        return self.part.names()


@dataclass(frozen=True, slots=True)
class Joined:
    """Two or more parts joined by AND or by OR; no part is joined by the same word."""

    word: str
    parts: tuple[Condition, ...]

    @classmethod
    def of(cls, word: str, parts: Sequence[Condition]) -> Joined:
        """Return the joined parts; parts that are joined by the same word are flattened."""
        flat: list[Condition] = []
        for part in parts:
            flat += part.parts if isinstance(part, Joined) and part.word == word else (part,)
        return cls(word, tuple(flat))

    def text(self) -> str:
        """As in `Condition`."""
        texts = []
        for part in self.parts:
            text = part.text()
            texts.append(f"({text})" if isinstance(part, Joined) and part.word == "OR" else text)
        return f" {self.word} ".join(texts)

    def test(self, *, negated: bool) -> Test:
        """As in `Condition`."""
        tests = tuple(part.test(negated=negated) for part in self.parts)
        return _all(tests) if (self.word == "AND") is not negated else _any(tests)

    def names(self) -> Iterator[str]:
        """As in `Condition`."""
        for part in self.parts:
            yield from part.names()


def written(operand: Operand) -> str:
    """Return an operand as it is written in a condition."""
    if isinstance(operand, Property):
        return _quoted_name(operand.name)
    if isinstance(operand, bool):
        return str(operand).upper()
    if isinstance(operand, str):
        return "'" + operand.replace("'", "''") + "'"
    return repr(operand)


def _constant(value: bool) -> Test:
    return lambda _: value


def _with_value(
    name: str,
    convert: Callable[[str], Value | None] | None,
    compare: Callable[[Any, Any], bool],
    value: Value,
) -> Test:
    """Return a test of a property against a value: the frequent case, kept fast."""
    if convert is None:
        return lambda get: (text := get(name)) is not None and compare(text, value)

    def test(get: Get) -> bool:
        text = get(name)
        converted = None if text is None else convert(text)
        return converted is not None and compare(converted, value)

    return test


def _with_each_other(
    left: Callable[[Get], Value | None],
    right: Callable[[Get], Value | None],
    compare: Callable[[Any, Any], bool],
) -> Test:
    def test(get: Get) -> bool:
        first, second = left(get), right(get)
        return first is not None and second is not None and compare(first, second)

    return test


def _operand(
    operand: Operand, convert: Callable[[str], Value | None] | None
) -> Callable[[Get], Value | None]:
    if not isinstance(operand, Property):
        value = _converted(operand, convert)
        return lambda _: value
    name = operand.name
    if convert is None:
        return lambda get: get(name)
    return lambda get: None if (text := get(name)) is None else convert(text)


def _converted(operand: Operand, convert: Callable[[str], Value | None] | None) -> Value | None:
    assert not isinstance(operand, Property)
    return convert(operand) if convert is not None and isinstance(operand, str) else operand


def _all(tests: Sequence[Test]) -> Test:
    def test(get: Get) -> bool:
        for each in tests:  # noqa: SIM110  all() with a generator takes twice the time
            if not each(get):
                return False
        return True

    return test


def _any(tests: Sequence[Test]) -> Test:
    def test(get: Get) -> bool:
        for each in tests:  # noqa: SIM110  as above
            if each(get):
                return True
        return False

    return test


def _names(*operands: Operand) -> Iterator[str]:
    return (operand.name for operand in operands if isinstance(operand, Property))


def _quoted_name(name: str) -> str:
    return name if _NAME.fullmatch(name) else f'"{name}"'
