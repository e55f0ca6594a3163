"""The rules of grants.

Goal: what is granted decides, and nothing else; remembering decisions changes none of them; grants
that mean nothing can't be made.
Method: properties against a naive reading of the documentation; examples for the words of errors.
"""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.errors import InvalidArgument, InvalidName, PermissionDenied
from batonmq_server.runtime.access.permissions import (
    ANY_GRANT,
    OPERATE,
    AccessRole,
    Authorizer,
    Grant,
    Permission,
    administer_group,
    change_topic,
    check_grant,
    check_identity,
    consume,
    create_topic,
    join_group,
    permission_to_ask_about,
    produce,
    use_topic,
)

names = st.sampled_from(["a", "ab", "abc", "b", "BATON_SYS_METRICS", "BATON_SYS_X", "BATON"])
patterns = names | st.builds("{}*".format, names | st.just("") | st.just("BATON_SYS_"))
roles = st.sampled_from(AccessRole)
grants = st.one_of(
    st.builds(Grant, roles, st.builds("topic:{}".format, patterns)),
    st.builds(Grant, st.sampled_from([AccessRole.CONSUME, AccessRole.ADMIN]),
              st.builds("group:{}".format, patterns)),
    st.just(Grant(AccessRole.ADMIN, "cluster")),
)  # fmt: skip
needs = st.one_of(
    st.builds(produce, names),
    st.builds(consume, names),
    st.builds(use_topic, names),
    st.builds(change_topic, names),
    st.builds(join_group, names),
    st.builds(administer_group, names),
    st.just(OPERATE),
    st.just(ANY_GRANT),
)


def naive(granted: set[Grant], need: Permission) -> bool:
    """As the documentation says, word by word."""
    for role, resource in granted:
        kind, _, pattern = resource.partition(":")
        if need == ANY_GRANT or kind == "cluster":
            return True
        if kind != need.kind or role not in {*need.roles, AccessRole.ADMIN}:
            continue
        if pattern == need.name:
            return True
        system = kind == "topic" and need.name.startswith("BATON_SYS_")
        begins = need.name.startswith(pattern[:-1])
        if pattern.endswith("*") and begins and not system:
            return True
        if pattern.endswith("*") and begins and pattern.startswith("BATON_SYS_"):
            return True
    return False


@given(st.sets(grants, max_size=4), needs)
def test_a_decision_is_what_the_documentation_says(granted: set[Grant], need: Permission) -> None:
    access = Authorizer()
    access.set_grants("somebody", granted)
    assert access.allows("somebody", need) is naive(granted, need)


@given(st.lists(st.tuples(st.sampled_from("xy"), st.sets(grants, max_size=3), needs), max_size=8))
def test_remembered_decisions_are_those_of_the_present_grants(
    steps: list[tuple[str, set[Grant], Permission]],
) -> None:
    access, held = Authorizer(), dict[str, set[Grant]]()
    for identity, granted, need in steps:
        access.set_grants(identity, granted)
        held[identity] = granted
        for one in "xyz":
            for _ in range(2):
                assert access.allows(one, need) is naive(held.get(one, set()), need)


@given(st.sets(grants, max_size=4), st.sets(grants, max_size=4), needs)
def test_a_further_grant_takes_nothing_away(
    granted: set[Grant], more: set[Grant], need: Permission
) -> None:
    access = Authorizer()
    access.set_grants("less", granted)
    access.set_grants("more", granted | more)
    assert access.allows("more", need) or not access.allows("less", need)


@given(grants)
def test_every_grant_that_covers_something_can_be_made(grant: Grant) -> None:
    assert check_grant(*grant) == grant


def test_an_administrator_by_setting_needs_no_grant_and_keeps_its_role() -> None:
    access = Authorizer(["root", ""])
    access.set_grants("root", ())
    assert access.allows("root", administer_group("readers"))
    assert not access.allows("", ANY_GRANT)


def test_a_service_has_the_topic_of_the_metrics_and_nothing_else() -> None:
    access = Authorizer()
    assert access.allows("service:storage", produce("BATON_SYS_METRICS"))
    assert not access.allows("service:storage", consume("BATON_SYS_METRICS"))
    assert not access.allows("service:storage", produce("orders"))
    assert not access.allows("storage", ANY_GRANT)


@pytest.mark.parametrize("topic", ["%RETRY%readers", "%DLQ%readers"])
def test_topics_of_a_group_belong_to_the_group(topic: str) -> None:
    access = Authorizer()
    access.set_grants("greedy", [Grant(AccessRole.ADMIN, "topic:*")])
    access.set_grants("member", [Grant(AccessRole.CONSUME, "group:readers")])
    for need in (produce(topic), consume(topic), use_topic(topic), create_topic(topic)):
        assert not access.allows("greedy", need)
        assert access.allows("member", need)
    assert not access.allows("member", change_topic(topic))
    access.set_grants("owner", [Grant(AccessRole.ADMIN, "group:readers")])
    assert access.allows("owner", change_topic(topic))


@pytest.mark.parametrize(
    ("role", "resource"),
    [
        (AccessRole.PRODUCE, "group:a"),
        (AccessRole.PRODUCE, "cluster"),
        (AccessRole.CONSUME, "cluster"),
        (AccessRole.ADMIN, "cluster:a"),
        (AccessRole.ADMIN, ""),
        (AccessRole.ADMIN, "a"),
        (AccessRole.ADMIN, "topic:"),
        (AccessRole.ADMIN, "topics:a"),
        (AccessRole.ADMIN, "topic:a*b"),
        (AccessRole.ADMIN, "topic:a**"),
        (AccessRole.ADMIN, "topic:a b"),
        (AccessRole.CONSUME, "topic:%RETRY%readers"),
        (AccessRole.CONSUME, "topic:%DLQ%readers"),
        (AccessRole.CONSUME, "group:" + "g" * 128),
    ],
)
def test_a_grant_that_means_nothing_is_refused(role: AccessRole, resource: str) -> None:
    with pytest.raises((InvalidArgument, InvalidName)):
        check_grant(role, resource)


@pytest.mark.parametrize("identity", ["", "a b", "a\n", "x" * 256, "\x00"])
def test_what_is_no_identity_is_refused(identity: str) -> None:
    with pytest.raises(InvalidArgument):
        check_identity(identity)


def test_nobody_can_ask_about_many_at_once() -> None:
    assert permission_to_ask_about(Grant(AccessRole.PRODUCE, "topic:a")) == produce("a")
    assert permission_to_ask_about(Grant(AccessRole.ADMIN, "cluster")) == OPERATE
    with pytest.raises(InvalidArgument):
        permission_to_ask_about(Grant(AccessRole.PRODUCE, "topic:a*"))


def test_a_refusal_names_what_is_missing_and_the_commands_that_give_it() -> None:
    access = Authorizer()
    access.set_grants("it's me", [Grant(AccessRole.CONSUME, "topic:a")])
    with pytest.raises(PermissionDenied) as refused:
        access.check("it's me", [consume("a"), use_topic("b"), join_group("g"), use_topic("b")])
    error = refused.value
    assert error.message == "it's me lacks produce or consume on topic:b, consume on group:g"
    assert error.facts == {"identity": "it's me", "role": "produce", "resource": "topic:b"}
    assert error.remedy == (
        """baton access grant 'it'"'"'s me' produce topic:b; """
        """baton access grant 'it'"'"'s me' consume group:g"""
    )


def test_a_refusal_of_very_much_stays_short() -> None:
    with pytest.raises(PermissionDenied) as refused:
        Authorizer().check("x", [produce(f"topic-{number}") for number in range(10_000)])
    assert refused.value.message.endswith("topic:topic-4, ...")
    assert refused.value.remedy.count("baton access grant") == 5


def test_a_name_that_nothing_can_have_is_neither_remembered_nor_repeated() -> None:
    access, name = Authorizer(), "x" * 1_000_000
    tracemalloc.start()
    try:
        for number in range(20):
            with pytest.raises(PermissionDenied) as refused:
                access.check(
                    "stranger", [consume(f"{number}{name}"), join_group(f"{number}{name}")]
                )
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 10 * len(name)
    error = refused.value
    assert len(f"{error.message}{error.remedy}{error.facts}") < 1_000


def test_whoever_may_do_everything_is_not_refused_a_name_that_is_too_long() -> None:
    access = Authorizer(["root"])
    assert access.allows("root", consume("x" * 128))
    assert not access.allows("stranger", consume("x" * 128))
