"""Goal: an expression has one meaning, for every service and for the client.

Method: a table of expressions, and Hypothesis for equality.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq._core.records import tag_hash
from batonmq._core.subscription import SqlFilter, TagFilter, parse_filter
from batonmq.errors import BadExpression, LimitExceeded

TAGS = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=8)


@pytest.mark.parametrize("expression", ["", "*", " * ", "  "])
def test_star_or_nothing_accepts_all_messages(expression: str) -> None:
    tag_filter = TagFilter.parse(expression)
    assert tag_filter.hashes is None
    assert tag_filter.canonical() == "*"
    assert tag_filter.accepts("any")
    assert tag_filter.accepts("")


@pytest.mark.parametrize(
    ("expression", "canonical"),
    [
        ("TagA", "TagA"),
        (" b || a ", "a||b"),
        ("a||b||a", "a||b"),
        ("订单 || 😀", "订单||😀"),
        ("*a||b*", "*a||b*"),
    ],
)
def test_tags_are_trimmed_sorted_and_unique(expression: str, canonical: str) -> None:
    assert TagFilter.parse(expression).canonical() == canonical


@given(st.lists(TAGS, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_order_and_repetition_do_not_matter(tags: list[str], random: object) -> None:
    tag_filter = TagFilter.parse("||".join(tags))
    shuffled = tags + tags[:1]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert TagFilter.parse(" || ".join(shuffled)) == tag_filter
    assert TagFilter.parse(tag_filter.canonical()) == tag_filter
    assert tag_filter.hashes == frozenset(map(tag_hash, tags))
    assert all(tag_filter.accepts(tag) for tag in tags)


def test_message_without_a_tag_is_not_accepted_by_tags() -> None:
    assert not TagFilter.parse("a").accepts("")


def test_tags_with_colliding_hashes_are_distinguished() -> None:
    tag_filter = TagFilter.parse("Aa")
    assert tag_filter.hashes == TagFilter.parse("BB").hashes == frozenset({2112})
    assert tag_filter.accepts("Aa")
    assert not tag_filter.accepts("BB")


@pytest.mark.parametrize(
    "expression",
    ["||", "a||", "||a", "a|| ||b", "a b", "a|b", "|", "*||a", "a || *", "a\x00", "a\nb",
     "x" * 128, "订" * 43, "\ud800"],
)  # fmt: skip
def test_invalid_tags_are_rejected(expression: str) -> None:
    with pytest.raises(BadExpression) as refused:
        TagFilter.parse(expression)
    assert refused.value.facts == {"expression": expression[:140]}


def test_long_expression_is_rejected_with_limit_and_length() -> None:
    TagFilter.parse("||".join(["abcdefgh"] * 205)[:2_048])
    with pytest.raises(LimitExceeded) as refused:
        TagFilter.parse("a" * 2_049)
    assert refused.value.facts == {"field": "expression", "limit": "2048", "actual": "2049"}


@pytest.mark.parametrize("expression", ["*", "", " a || b", "sql:", "sqlite", "sql:insert || x"])
def test_tags_may_look_like_sql(expression: str) -> None:
    assert parse_filter(expression) == TagFilter.parse(expression)


def test_text_after_sql_and_white_space_is_a_condition() -> None:
    parsed = parse_filter("  SQL:\n a=1")
    assert isinstance(parsed, SqlFilter)
    assert (parsed.canonical(), parsed.hashes) == ("sql: a = 1", None)
    assert parsed != parse_filter("a=1")


@pytest.mark.parametrize("expression", ["sql:a=5", "SQL:a>5", "sql:b IN('x')", "sql:(a<>5)"])
def test_condition_without_white_space_before_it_is_rejected(expression: str) -> None:
    with pytest.raises(BadExpression, match="white space is missing after sql:"):
        parse_filter(expression)


def test_condition_without_sql_before_it_is_rejected_with_a_remedy() -> None:
    with pytest.raises(BadExpression) as refused:
        parse_filter("a > 5")
    assert "sql:" in refused.value.remedy
