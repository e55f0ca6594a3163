"""The grammar of conditions, and the errors for text that does not follow it.

Source: RocketMQ SelectorParser.jj. Deviations: NOT binds weaker than a comparison, as in SQL92;
names may be in double quotes; there are no comments; a property alone is not a condition.
docs/reference/filters.md has all of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from batonmq._core.sql import (
    NUMBER_CHARACTERS_MAX,
    Between,
    Compare,
    Condition,
    Constant,
    In,
    IsNull,
    Joined,
    Matches,
    Not,
    Operand,
    Property,
    count_comparisons,
    number,
    written,
)
from batonmq.errors import BadExpression

if TYPE_CHECKING:
    from lark import Lark, Token
    from lark.exceptions import UnexpectedInput

CONDITIONS_MAX = 64
"""Limit of comparisons in an expression: each costs time for every message that is tested."""
SHOWN_MAX = 140
HELP: Final = "Correct it; docs/reference/filters.md has the grammar."
_GRAMMAR: Final = r"""
    ?start: either
    ?either: both ("OR"i both)*
    ?both: single ("AND"i single)*
    ?single: "NOT"i single -> negated
        | "(" either ")"
        | (name | value) COMPARISON operand -> compare
        | (name | value) "BETWEEN"i operand "AND"i operand -> between
        | (name | value) "NOT"i "BETWEEN"i operand "AND"i operand -> not_between
        | name "IN"i "(" text ("," text)* ")" -> one_of
        | name "NOT"i "IN"i "(" text ("," text)* ")" -> none_of
        | name (CONTAINS | STARTSWITH | ENDSWITH) text -> matches
        | name "NOT"i (CONTAINS | STARTSWITH | ENDSWITH) text -> not_matches
        | name "IS"i "NULL"i -> is_null
        | name "IS"i "NOT"i "NULL"i -> is_not_null
        | "TRUE"i -> always
        | "FALSE"i -> never
    ?operand: NAME -> name
        | value
    ?value: text
        | SIGN? NUMBER -> number
        | "TRUE"i -> true
        | "FALSE"i -> false
    name: NAME | QUOTED
    text: TEXT

    COMPARISON: "=" | "<>" | ">=" | "<=" | ">" | "<"
    CONTAINS: "CONTAINS"i
    STARTSWITH: "STARTSWITH"i
    ENDSWITH: "ENDSWITH"i
    SIGN: "+" | "-"
    NUMBER: /(?:\d+\.\d*|\.\d+)(?:e[+-]?\d+)?|\d+e[+-]?\d+|\d+l?/i
    TEXT: /'(?:[^'\x00-\x1f\x7f\ud800-\udfff]|'')*'/
    NAME: /[a-z_$][a-z0-9_$]*/i
    QUOTED: /"[^"\x00-\x1f\x7f\ud800-\udfff\ufffd]+"/
    %ignore /[ \t\r\n\f]+/
"""
_CALLED: Final = {
    "COMPARISON": "=, <>, >, >=, <, <=",
    "NAME": "a property",
    "QUOTED": "a property",
    "TEXT": "text in single quotes",
    "NUMBER": "a number",
    "SIGN": "a number",
    "LPAR": "(",
    "RPAR": ")",
    "COMMA": "a comma",
    "$END": "the end",
}
"""Terminals of the grammar that are not called by their own names."""
_HINTS: Final = {
    "!": "Write <> for not equal.",
    "NULL": "Nothing equals NULL: write IS NULL or IS NOT NULL.",
    "QUOTED": "Put text into single quotes; double quotes are for names on the left.",
    '"': "Put text into single quotes; double quotes are for names on the left.",
    "'": "End the text with a single quote; one within it is written twice. It is one line.",
    "alone": "A property stands in a comparison, as in a = TRUE.",
}
"""Remedies for a token or a character that is unexpected or missing."""


class _InvalidCondition(Exception):
    """An error in a condition.

    Args:
        at: Position of the error; None if it concerns the whole condition, or its end.
    """

    def __init__(
        self, problem: str, remedy: str, at: Token | UnexpectedInput | None = None
    ) -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy
        self.line, self.column = (at.line or 0, at.column or 0) if at is not None else (0, 0)


class _Builder:
    """Builds conditions from the inside out. Method names are those of the grammar's rules."""

    def either(self, parts: list[Condition]) -> Condition:
        return Joined.of("OR", parts)

    def both(self, parts: list[Condition]) -> Condition:
        return Joined.of("AND", parts)

    def negated(self, parts: list[Condition]) -> Condition:
        (part,) = parts
        return part.part if isinstance(part, Not) else Not(part)

    def compare(self, parts: list[Any]) -> Condition:
        left, operator, right = parts
        if operator not in ("=", "<>"):
            _check_numeric(operator, (left, right), operator)
        kinds = {type(left), type(right)}
        if bool in kinds and kinds & {int, float, str}:
            raise _InvalidCondition(
                f"{operator} compares TRUE or FALSE with another value",
                "Compare TRUE and FALSE with a property.",
                operator,
            )
        return Compare(left, str(operator), right)

    def between(self, parts: list[Operand]) -> Condition:
        value, low, high = parts
        _check_numeric("BETWEEN", parts)
        if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
            raise _InvalidCondition(
                f"there is no number BETWEEN {low} AND {high}", "Write the smaller number first."
            )
        return Between(value, low, high)

    def not_between(self, parts: list[Operand]) -> Condition:
        return Not(self.between(parts))

    def one_of(self, parts: list[Any]) -> Condition:
        return In(parts[0].name, frozenset(parts[1:]))

    def none_of(self, parts: list[Any]) -> Condition:
        return Not(self.one_of(parts))

    def matches(self, parts: list[Any]) -> Condition:
        return Matches(parts[0].name, parts[1].upper(), parts[2])

    def not_matches(self, parts: list[Any]) -> Condition:
        return Not(self.matches(parts))

    def is_null(self, parts: list[Property]) -> Condition:
        return IsNull(parts[0].name)

    def is_not_null(self, parts: list[Property]) -> Condition:
        return Not(IsNull(parts[0].name))

    def always(self, _: list[Any]) -> Condition:
        return Constant(True)

    def never(self, _: list[Any]) -> Condition:
        return Constant(False)

    def true(self, _: list[Any]) -> bool:
        return True

    def false(self, _: list[Any]) -> bool:
        return False

    def name(self, parts: list[Token]) -> Property:
        (token,) = parts
        return Property(token[1:-1] if token.type == "QUOTED" else str(token))

    def text(self, parts: list[Token]) -> str:
        return parts[0][1:-1].replace("''", "'")

    def number(self, parts: list[Token]) -> int | float:
        value = number("".join(parts).rstrip("lL"))
        if value is None:
            raise _InvalidCondition(
                "the number is too long or too large",
                "Numbers have at most 64 characters, and are at most 1.7e308.",
                parts[-1],
            )
        # Integers are written in full, also if the condition has `5.0`; not if that is too long.
        whole = value == int(value) and len(str(int(value))) <= NUMBER_CHARACTERS_MAX
        return int(value) if whole else value


def parse_condition(expression: str, begin: int) -> Condition:
    """Return the condition in `expression` from character `begin` on.

    Raises:
        BadExpression: The condition can't be parsed; the message says where, and what is expected.
    """
    from lark.exceptions import UnexpectedInput  # noqa: PLC0415  as in _parser

    try:
        condition: Any = _parser().parse(" " * begin + expression[begin:])
        _check_size(condition)
    except _InvalidCondition as error:
        raise _refusal(expression, error) from error
    except UnexpectedInput as error:
        raise _refusal(expression, _unexpected(error)) from error
    return condition  # type: ignore[no-any-return]


def prepare() -> None:
    """Build the parser now, which takes 0.1 s, and not for the first condition."""
    _parser()


@cache
def _parser() -> Lark:
    from lark import Lark  # noqa: PLC0415  slow to import, and few programs need it

    return Lark(
        _GRAMMAR, parser="lalr", lexer="basic", transformer=_Builder(), g_regex_flags=re.ASCII
    )


def _check_numeric(word: str, operands: Sequence[Operand], at: Token | None = None) -> None:
    for operand in operands:
        if isinstance(operand, str | bool):
            raise _InvalidCondition(
                f"{word} compares numbers; {written(operand)} is not a number",
                "Write numbers without quotes. Text is compared with =, <>, IN and CONTAINS.",
                at,
            )


def _check_size(condition: Condition) -> None:
    count = count_comparisons(condition)
    if count > CONDITIONS_MAX:
        raise _InvalidCondition(
            f"{count} comparisons are too many",
            f"Use at most {CONDITIONS_MAX}; a list of values after IN counts as one.",
        )


def _unexpected(error: UnexpectedInput) -> _InvalidCondition:
    """Return the error for text that does not follow the grammar."""
    from lark.exceptions import UnexpectedToken  # noqa: PLC0415  as in _parser

    if not isinstance(error, UnexpectedToken):
        char = getattr(error, "char", "")
        return _InvalidCondition(
            f"{char!r} is not part of the grammar", _HINTS.get(char, ""), error
        )
    names = sorted(error.accepts or error.expected)
    *others, last = dict.fromkeys(_CALLED.get(name, name) for name in names)
    expected = f"{', '.join(others)} or {last}" if others else last
    token = error.token
    found, at = (repr(token[:SHOWN_MAX]), token) if token else ("the end", None)
    hint = _HINTS.get("alone" if "COMPARISON" in names else token.type, "")
    return _InvalidCondition(f"{found} where {expected} is expected", hint, at)


def _refusal(expression: str, error: _InvalidCondition) -> BadExpression:
    where = f"line {error.line}, " if error.line > 1 else ""
    where += f"column {error.column}: " if error.column else ""
    return BadExpression(
        f"expression {expression[:SHOWN_MAX]!r}: {where}{error.problem}",
        remedy=error.remedy or HELP,
        facts={"expression": expression[:SHOWN_MAX]},
    )
