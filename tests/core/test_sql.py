"""Goal: a condition has the three-valued meaning of SQL92 and one canonical text.

Errors name their position.
Method: tables of claims, including the examples of RocketMQ's manual; Hypothesis writes conditions
and evaluates them by itself, with None for unknown.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq._core.sql import number
from batonmq._core.subscription import SqlFilter, parse_filter
from batonmq.errors import BadExpression, LimitExceeded

Properties = Mapping[str, str]
Oracle = Callable[[Properties], bool | None]

ORDER = {"a": "7", "b": "x", "c": "TRUE", "price": "12.50", "name": "O'Neill", "empty": ""}


def passes(condition: str, properties: Properties = ORDER, tag: str = "", *keys: str) -> bool:
    return parse_filter(f"sql: {condition}").accepts(tag, keys, properties)


@pytest.mark.parametrize(
    "condition",
    [
        "a > 5 AND b IN ('x', 'y')",
        "a BETWEEN 0 AND 7",
        "a NOT BETWEEN 8 AND 9",
        "(a > 5 AND a < 100) OR (b IS NOT NULL AND b = TRUE)",
        "a > 5",
        "a >= 7",
        "a < 7.5",
        "a <= 7",
        "a = 7",
        "a = 7.0",
        "a = 7l",
        "a <> 8",
        "5 < a",
        "10 >= a",
        "7 = a",
        "-8 < a",
        "a > - 8",
        "a < +8",
        "a BETWEEN 7 AND 7",
        "5 BETWEEN 1 AND a",
        "8 NOT BETWEEN 1 AND a",
        "price = 12.5",
        "price = 1.25e1",
        "price > .5",
        "price > 5.",
        "a < price",
        "b = 'x'",
        "b <> 'y'",
        "'x' = b",
        "a = '7'",
        "b IN ('y','x')",
        "b NOT IN ('y', 'z')",
        "c = TRUE",
        "c <> FALSE",
        "TRUE = c",
        "name = 'O''Neill'",
        "name CONTAINS '''N'",
        "name STARTSWITH 'O'",
        "name ENDSWITH 'ill'",
        "name NOT CONTAINS 'x'",
        "name NOT STARTSWITH 'x'",
        "name NOT ENDSWITH 'x'",
        "missing IS NULL",
        "a IS NOT NULL",
        "empty IS NOT NULL",
        "empty = ''",
        "a = a",
        "TRUE",
        "NOT FALSE",
        "NOT a = 8",
        "NOT (a = 8 OR b = 'y')",
        "NOT NOT a = 7",
        "a = 8 OR a = 7 AND b = 'x'",
        "5 = 5",
        "'5' = 5.0",
        "a\n=\t7",
        "a=7AND b='x'",
        "A IS NULL",
        '"a" = 7',
    ],
)
def test_condition_is_true(condition: str) -> None:
    assert passes(condition)


@pytest.mark.parametrize(
    "condition",
    [
        "a > 7",
        "a < 7",
        "a <> 7",
        "a = '7.0'",
        "price = '12.5'",
        "a BETWEEN 8 AND 9",
        "a NOT BETWEEN 7 AND 9",
        "b = 'X'",
        "b IN ('y')",
        "b NOT IN ('x')",
        "a IS NULL",
        "missing IS NOT NULL",
        "FALSE",
        "c = FALSE",
        "(a = 8 OR a = 7) AND b = 'y'",
        "name CONTAINS 'o'",
        "a > price",
    ],
)
def test_condition_is_false_and_not_unknown(condition: str) -> None:
    assert not passes(condition)
    assert passes(f"NOT ({condition})")


@pytest.mark.parametrize(
    "condition",
    [
        "missing = 5",
        "5 <> missing",
        "missing <> 'x'",
        "missing > 5",
        "missing BETWEEN 1 AND 2",
        "missing NOT BETWEEN 1 AND 2",
        "missing IN ('x')",
        "missing NOT IN ('x')",
        "missing CONTAINS 'x'",
        "missing NOT CONTAINS 'x'",
        "missing = TRUE",
        "missing = a",
        "a = missing",
        "b > 5",
        "b = 5",
        "b <> 5",
        "b BETWEEN 1 AND 2",
        "b < a",
        "b = TRUE",
        "b <> FALSE",
        "empty = 0",
        "'x' = 5",
        "a = 7 AND missing = 5",
        "a = 8 OR missing = 5",
        "NOT missing = 5",
    ],
)
def test_condition_and_its_negation_are_unknown(condition: str) -> None:
    assert not passes(condition)
    assert not passes(f"NOT ({condition})")


def test_unknown_part_does_not_hide_a_deciding_part() -> None:
    assert passes("missing = 5 OR a = 7")
    assert passes("NOT (missing = 5 AND a = 8)")


def test_tag_and_keys_are_properties() -> None:
    assert passes("TAGS = 'paid' AND KEYS CONTAINS 'k2' AND a = 7", ORDER, "paid", "k1", "k2")
    assert passes("KEYS = 'k1 k2'", {}, "", "k1", "k2")
    assert passes("TAGS IS NULL AND KEYS IS NULL", {"TAGS": "x", "KEYS": "y"})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("007", 7),
        ("-12", -12),
        ("+3", 3),
        ("1.5", 1.5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1E3", -1000.0),
        ("9007199254740993", 9007199254740993),
        ("9" * 64, int("9" * 64)),
    ],
)
def test_text_of_a_number_is_parsed(text: str, value: float) -> None:
    assert number(text) == value


@pytest.mark.parametrize(
    "text",
    ["", " 5", "5 ", "1_000", "nan", "inf", "-Infinity", "0x10", "5d", "1e", "e5", ".", "--5",
     "٣", "1e400", "1" * 65, "5\n"],
)  # fmt: skip
def test_other_text_is_not_a_number(text: str) -> None:
    assert number(text) is None


def test_integers_of_any_size_are_exact() -> None:
    assert passes("a = 9007199254740993", {"a": "9007199254740993"})
    assert not passes("a = 9007199254740993", {"a": "9007199254740992"})


@pytest.mark.parametrize(
    ("one", "other", "canonical"),
    [
        ("a>5 and b in('x','y')", "A > 5", "a > 5 AND b IN ('x', 'y')"),
        ("b In ('y','x','y')", "", "b IN ('x', 'y')"),
        ("a  BETWEEN\n-5 and +6", "", "a BETWEEN -5 AND 6"),
        ("not a in ('x')", "", "a NOT IN ('x')"),
        ("not(a=1)", "", "NOT (a = 1)"),
        ("((a=1)) and ((b=2) and (c=3 or d=4))", "", "a = 1 AND b = 2 AND (c = 3 OR d = 4)"),
        ("(a=1 and b=2) or c=3", "", "a = 1 AND b = 2 OR c = 3"),
        ("not (a=1 or b=2)", "", "NOT (a = 1 OR b = 2)"),
        ("a is not null", "", "a IS NOT NULL"),
        ("a startswith 'it''s'", "", "a STARTSWITH 'it''s'"),
        ("true = a or false", "", "TRUE = a OR FALSE"),
        ("a = 1.50 and b = 1e3 and c = 5L", "", "a = 1.5 AND b = 1000 AND c = 5"),
        ("a = 5. and b = -0.0", "", "a = 5 AND b = 0"),
        ("a < 1e63 and b < 1e64", "", f"a < {int(1e63)} AND b < 1e+64"),
        ("a > -1e62 and b > -1e63", "", f"a > {int(-1e62)} AND b > -1e+63"),
        ('"a" = 1 and "a-b" = 1 and "in" = 1', "", 'a = 1 AND "a-b" = 1 AND "in" = 1'),
    ],
)
def test_condition_has_one_canonical_text(one: str, other: str, canonical: str) -> None:
    parsed = parse_filter(f"sql: {one}")
    assert parsed.canonical() == f"sql: {canonical}"
    assert parse_filter(f" SQL:\t{canonical} ") == parsed
    assert parse_filter(f"sql: {other or 'z = 1'}") != parsed


@pytest.mark.parametrize(
    ("condition", "problem", "remedy"),
    [
        ("", "the end where", ""),
        ("a", "the end where", "as in a = TRUE"),
        ("a AND b = 1", "column 8: 'AND' where", "as in a = TRUE"),
        ("a > ", "the end where FALSE, a property, a number", ""),
        ("a > 5 b", "column 12: 'b' where the end, AND or OR is expected", ""),
        ("a = NULL", "column 10: 'NULL' where", "IS NULL"),
        ("a != 5", "column 8: '!' is not part of the grammar", "<>"),
        ("a == 5", "column 9: '='", ""),
        ("a in (5)", "column 12: '5' where text in single quotes is expected", ""),
        ("a in ()", "column 12: ')' where text in single quotes", ""),
        ("a in ('x' 'y')", "column 16: \"'y'\" where a comma or ) is expected", ""),
        ('a = "x"', "column 10: '\"x\"' where", "single quotes"),
        ("a = 'x", 'column 10: "\'" is not part of the grammar', "single quote"),
        ("a = 'x\ny'", 'column 10: "\'" is not part of the grammar', "one line"),
        ("a NOT 5", "where BETWEEN, CONTAINS, ENDSWITH, IN or STARTSWITH is expected", ""),
        ("(a = 5", "the end where ) is expected", ""),
        ("a = 5)", "column 11: ')' where", ""),
        ("a BETWEEN 5", "the end where AND is expected", ""),
        ("a BETWEEN 6 AND 5", "there is no number BETWEEN 6 AND 5", "smaller number first"),
        (
            "a BETWEEN 'x' AND 'y'",
            "BETWEEN compares numbers; 'x' is not a number",
            "without quotes",
        ),
        ("a > 'x'", "column 8: > compares numbers; 'x' is not a number", "without quotes"),
        ("a > TRUE", "column 8: > compares numbers; TRUE is not a number", ""),
        ("TRUE = 5", "column 11: = compares TRUE", ""),
        ("a = 1e400", "column 10: the number is too long or too large", "64 characters"),
        ("in = 5", "column 6: 'in' where", ""),
        ("a\n> > 5", "line 2, column 3: '>' where", ""),
        ("a = 5 -- no comments", "column 12: '-' where", ""),
        ("a LIKE 'x%'", "column 8: 'LIKE' where", ""),
        ("a + 1 > 5", "column 8: '+' where", ""),
        ("a = '\ud800'", "is not part of the grammar", ""),
        ("a = \u017f", "column 10: '\u017f' is not part of the grammar", ""),
        ("a > \u0665", "column 10: '\u0665' is not part of the grammar", ""),
        (" OR ".join(["a=1"] * 65), "65 comparisons are too many", "at most 64"),
    ],
)
def test_invalid_condition_is_rejected_with_position_and_remedy(
    condition: str, problem: str, remedy: str
) -> None:
    with pytest.raises(BadExpression) as refused:
        parse_filter(f"sql: {condition}")
    assert problem in refused.value.message
    assert remedy in refused.value.remedy
    assert refused.value.facts == {"expression": f"sql: {condition}"[:140]}


def test_condition_too_long_as_written_or_canonical_is_rejected() -> None:
    fits = f"sql: a = '{'x' * 2_037}'"
    assert len(parse_filter(fits).canonical()) == 2_048
    spaces = f"sql: a={' ' * 2_040}5"
    assert parse_filter(spaces).canonical() == "sql: a = 5"
    with pytest.raises(LimitExceeded):
        parse_filter(f"{fits} ")
    with pytest.raises(LimitExceeded):
        parse_filter(f"sql: a='{'x' * 2_039}'")  # it gets two more with its spaces


def test_depth_is_bounded_by_length() -> None:
    assert parse_filter(f"sql: {'(' * 1_018}a=1{')' * 1_018}").canonical() == "sql: a = 1"
    assert parse_filter(f"sql: {'NOT ' * 500}a = 1").canonical() == "sql: a = 1"
    deep = "a=1 OR (a=2 AND (" * 31 + "a=3" + "))" * 31
    assert passes(deep, {"a": "1"})
    with pytest.raises(BadExpression, match="too many"):
        parse_filter("sql: " + "a=1 OR(a=2 AND(" * 100 + "a=3" + "))" * 100)


NAMES = st.sampled_from(["a", "b", "c"])
TEXTS = st.sampled_from(["", "x", "y", "xy", "5", "-2", "7.5", "true", "False", "it's"])
NUMBERS = st.one_of(st.integers(-9, 9), st.sampled_from([7.5, -2.0, 0.25, 1e16]))
COMPARE = {"=": operator.eq, "<>": operator.ne, ">": operator.gt, ">=": operator.ge,
           "<": operator.lt, "<=": operator.le}  # fmt: skip


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def as_float(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def known(test: Callable[[str], bool]) -> Callable[[str | None], bool | None]:
    return lambda text: None if text is None else test(text)


@st.composite
def leaves(draw: st.DrawFn) -> tuple[str, Oracle]:  # noqa: PLR0911  one for each kind
    """A comparison and its answer."""
    name = draw(NAMES)
    kind = draw(st.integers(0, 6))
    if kind == 0:
        comparison, value = draw(st.sampled_from(sorted(COMPARE))), draw(NUMBERS)

        def by_number(p: Properties) -> bool | None:
            parsed = as_float(p.get(name))
            return None if parsed is None else COMPARE[comparison](parsed, value)

        return f"{name} {comparison} {value}", by_number
    if kind == 1:
        low, high = sorted((draw(NUMBERS), draw(NUMBERS)))

        def between(p: Properties) -> bool | None:
            parsed = as_float(p.get(name))
            return None if parsed is None else low <= parsed <= high

        return f"{name} between {low} AND {high}", between
    if kind == 2:
        text = draw(TEXTS)
        return f"{name} = {quoted(text)}", lambda p: known(lambda t: t == text)(p.get(name))
    if kind == 3:
        texts = draw(st.lists(TEXTS, min_size=1, max_size=3))
        listed = ",".join(map(quoted, texts))
        return f"{name} in({listed})", lambda p: known(lambda t: t in texts)(p.get(name))
    if kind == 4:
        part, keyword = draw(TEXTS), draw(st.sampled_from(["contains", "startswith", "endswith"]))
        matches = {
            "contains": lambda t: part in t,
            "startswith": lambda t: t[: len(part)] == part,
            "endswith": lambda t: t[max(0, len(t) - len(part)) :] == part,
        }[keyword]
        return f"{name} {keyword} {quoted(part)}", lambda p: known(matches)(p.get(name))
    if kind == 5:
        other = draw(NAMES)

        def greater(p: Properties) -> bool | None:
            one, two = as_float(p.get(name)), as_float(p.get(other))
            return None if one is None or two is None else one > two

        return f"{name} > {other}", greater
    return f"{name} is null", lambda p: p.get(name) is None


def joined(
    children: st.SearchStrategy[tuple[str, Oracle]],
) -> st.SearchStrategy[tuple[str, Oracle]]:
    def negate(child: tuple[str, Oracle]) -> tuple[str, Oracle]:
        text, oracle = child
        return f"not ({text})", lambda p: None if (v := oracle(p)) is None else not v

    def both(pair: tuple[tuple[str, Oracle], tuple[str, Oracle]]) -> tuple[str, Oracle]:
        (one, first), (two, second) = pair

        def answer(p: Properties) -> bool | None:
            values = first(p), second(p)
            if False in values:
                return False
            return None if None in values else True

        return f"({one}) AND ({two})", answer

    def either(pair: tuple[tuple[str, Oracle], tuple[str, Oracle]]) -> tuple[str, Oracle]:
        (one, first), (two, second) = pair

        def answer(p: Properties) -> bool | None:
            values = first(p), second(p)
            if True in values:
                return True
            return None if None in values else False

        return f"({one}) or ({two})", answer

    pairs = st.tuples(children, children)
    return st.one_of(children.map(negate), pairs.map(both), pairs.map(either))


CONDITIONS = st.recursive(leaves(), joined, max_leaves=8)


@given(CONDITIONS, st.lists(st.dictionaries(NAMES, TEXTS), min_size=1, max_size=8))
def test_condition_follows_three_valued_logic(
    condition: tuple[str, Oracle], messages: list[dict[str, str]]
) -> None:
    text, oracle = condition
    condition_filter, negated_filter = (
        parse_filter(f"sql: {text}"),
        parse_filter(f"sql: NOT ({text})"),
    )
    for properties in messages:
        answer = oracle(properties)
        assert condition_filter.accepts("", (), properties) is (answer is True)
        assert negated_filter.accepts("", (), properties) is (answer is False)


@given(CONDITIONS, st.dictionaries(NAMES, TEXTS))
def test_canonical_form_is_a_fixed_point_with_the_same_meaning(
    condition: tuple[str, Oracle], properties: dict[str, str]
) -> None:
    parsed = parse_filter(f"sql: {condition[0]}")
    reparsed = parse_filter(parsed.canonical())
    assert isinstance(reparsed, SqlFilter)
    assert (reparsed, reparsed.canonical()) == (parsed, parsed.canonical())
    assert reparsed.accepts("", (), properties) is parsed.accepts("", (), properties)
