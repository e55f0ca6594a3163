"""Grants and permissions.

Goal: grants alone decide; the cache changes no decision; meaningless grants are rejected.
Method: properties against a naive implementation of the documentation; examples for error texts.
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
permissions = st.one_of(
    st.builds(produce, names),
    st.builds(consume, names),
    st.builds(use_topic, names),
    st.builds(change_topic, names),
    st.builds(join_group, names),
    st.builds(administer_group, names),
    st.just(OPERATE),
    st.just(ANY_GRANT),
)


def naive(granted: set[Grant], permission: Permission) -> bool:
    """Decide as the documentation says, word by word."""
    for role, resource in granted:
        kind, _, pattern = resource.partition(":")
        if permission == ANY_GRANT or kind == "cluster":
            return True
        if kind != permission.kind or role not in {*permission.roles, AccessRole.ADMIN}:
            continue
        if pattern == permission.name:
            return True
        system = kind == "topic" and permission.name.startswith("BATON_SYS_")
        begins = permission.name.startswith(pattern[:-1])
        if pattern.endswith("*") and begins and not system:
            return True
        if pattern.endswith("*") and begins and pattern.startswith("BATON_SYS_"):
            return True
    return False


@given(st.sets(grants, max_size=4), permissions)
def test_decision_is_what_the_documentation_says(
    granted: set[Grant], permission: Permission
) -> None:
    authorizer = Authorizer()
    authorizer.set_grants("caller", granted)
    assert authorizer.allows("caller", permission) is naive(granted, permission)


@given(
    st.lists(st.tuples(st.sampled_from("xy"), st.sets(grants, max_size=3), permissions), max_size=8)
)
def test_cached_decisions_match_the_current_grants(
    steps: list[tuple[str, set[Grant], Permission]],
) -> None:
    authorizer, held = Authorizer(), dict[str, set[Grant]]()
    for identity, granted, permission in steps:
        authorizer.set_grants(identity, granted)
        held[identity] = granted
        for one in "xyz":
            for _ in range(2):
                assert authorizer.allows(one, permission) is naive(held.get(one, set()), permission)


@given(st.sets(grants, max_size=4), st.sets(grants, max_size=4), permissions)
def test_additional_grant_removes_no_permission(
    granted: set[Grant], more: set[Grant], permission: Permission
) -> None:
    authorizer = Authorizer()
    authorizer.set_grants("less", granted)
    authorizer.set_grants("more", granted | more)
    assert authorizer.allows("more", permission) or not authorizer.allows("less", permission)


@given(grants)
def test_every_grant_that_covers_something_is_valid(grant: Grant) -> None:
    assert check_grant(*grant) == grant


def test_admin_by_settings_needs_no_grant_and_can_not_be_revoked() -> None:
    authorizer = Authorizer(["root", ""])
    authorizer.set_grants("root", ())
    assert authorizer.allows("root", administer_group("readers"))
    assert not authorizer.allows("", ANY_GRANT)


def test_service_may_write_the_metrics_topic_and_nothing_else() -> None:
    authorizer = Authorizer()
    assert authorizer.allows("service:storage", produce("BATON_SYS_METRICS"))
    assert not authorizer.allows("service:storage", consume("BATON_SYS_METRICS"))
    assert not authorizer.allows("service:storage", produce("orders"))
    assert not authorizer.allows("storage", ANY_GRANT)


@pytest.mark.parametrize("topic", ["%RETRY%readers", "%DLQ%readers"])
def test_topics_of_a_group_belong_to_the_group(topic: str) -> None:
    authorizer = Authorizer()
    authorizer.set_grants("greedy", [Grant(AccessRole.ADMIN, "topic:*")])
    authorizer.set_grants("member", [Grant(AccessRole.CONSUME, "group:readers")])
    for permission in (produce(topic), consume(topic), use_topic(topic), create_topic(topic)):
        assert not authorizer.allows("greedy", permission)
        assert authorizer.allows("member", permission)
    assert not authorizer.allows("member", change_topic(topic))
    authorizer.set_grants("owner", [Grant(AccessRole.ADMIN, "group:readers")])
    assert authorizer.allows("owner", change_topic(topic))


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
def test_meaningless_grant_is_rejected(role: AccessRole, resource: str) -> None:
    with pytest.raises((InvalidArgument, InvalidName)):
        check_grant(role, resource)


@pytest.mark.parametrize("identity", ["", "a b", "a\n", "x" * 256, "\x00"])
def test_malformed_identity_is_rejected(identity: str) -> None:
    with pytest.raises(InvalidArgument):
        check_identity(identity)


def test_question_about_a_pattern_is_rejected() -> None:
    assert permission_to_ask_about(Grant(AccessRole.PRODUCE, "topic:a")) == produce("a")
    assert permission_to_ask_about(Grant(AccessRole.ADMIN, "cluster")) == OPERATE
    with pytest.raises(InvalidArgument):
        permission_to_ask_about(Grant(AccessRole.PRODUCE, "topic:a*"))


def test_error_names_missing_permissions_and_the_commands_that_grant_them() -> None:
    authorizer = Authorizer()
    authorizer.set_grants("it's me", [Grant(AccessRole.CONSUME, "topic:a")])
    with pytest.raises(PermissionDenied) as refused:
        authorizer.check("it's me", [consume("a"), use_topic("b"), join_group("g"), use_topic("b")])
    error = refused.value
    assert error.message == "it's me lacks produce or consume on topic:b, consume on group:g"
    assert error.facts == {"identity": "it's me", "role": "produce", "resource": "topic:b"}
    assert error.remedy == (
        """baton access grant 'it'"'"'s me' produce topic:b; """
        """baton access grant 'it'"'"'s me' consume group:g"""
    )


def test_error_about_many_permissions_stays_short() -> None:
    with pytest.raises(PermissionDenied) as refused:
        Authorizer().check("x", [produce(f"topic-{number}") for number in range(10_000)])
    assert refused.value.message.endswith("topic:topic-4, ...")
    assert refused.value.remedy.count("baton access grant") == 5


def test_overlong_name_is_neither_cached_nor_repeated() -> None:
    authorizer, name = Authorizer(), "x" * 1_000_000
    tracemalloc.start()
    try:
        for number in range(20):
            with pytest.raises(PermissionDenied) as refused:
                authorizer.check(
                    "stranger", [consume(f"{number}{name}"), join_group(f"{number}{name}")]
                )
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 10 * len(name)
    error = refused.value
    assert len(f"{error.message}{error.remedy}{error.facts}") < 1_000


def test_cluster_admin_is_allowed_an_overlong_name() -> None:
    authorizer = Authorizer(["root"])
    assert authorizer.allows("root", consume("x" * 128))
    assert not authorizer.allows("stranger", consume("x" * 128))
