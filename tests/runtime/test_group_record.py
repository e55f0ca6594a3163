"""Goal: a change of a group writes the keys that it changes; a record is read whole or refused.

Method: records of up to 1,000 members as values; a dictionary instead of etcd; random runs of
changes, and every damage of one key.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_group_pb2 import StoredAssignedQueues, StoredGroup
from batonmq.errors import Internal
from batonmq_server.runtime.group_record import (
    HEAD,
    QUEUES_PER_KEY,
    changed_parts,
    read_record,
    record_bytes,
    record_key,
    split_key,
    split_record,
)
from tests.support.stored_groups import MINE, OTHER, Stored, group, ids, member


def test_keys_of_a_record_are_below_its_head() -> None:
    assert record_key("g", HEAD) == "groups/g"
    assert record_key("g", "members/7") == "groups/g/members/7"
    assert split_key("g") == ("g", HEAD)
    assert split_key("g/members/7") == ("g", "members/7")


def test_record_is_read_as_it_was_written() -> None:
    members = [member("a"), member("b", OTHER), member("c")]
    written = group(members, [number % 4 for number in range(1_000)])
    parts = split_record(written, MINE, {})
    record = read_record("g", parts)
    assert record.group == written
    assert record.numbers == {"a": 1, "b": 2, "c": 3}
    assert record_bytes("g", parts) > sum(map(len, parts.values()))


def test_member_of_a_broadcasting_group_never_differs() -> None:
    plain = member("a", OTHER)
    plain.differs = False
    written = StoredGroup(name="g", model=pb.MESSAGE_MODEL_BROADCASTING, members=[plain])
    assert read_record("g", split_record(written, MINE, {})).group == written


def test_join_and_leave_write_the_key_of_that_member() -> None:
    stored, names = Stored(), ids(1_000)
    stored.write(group(map(member, names)))
    names.insert(500, "member-0499x")
    assert stored.write(group(map(member, names), generation=2)) == ({"members/1001"}, set())
    del names[3]
    assert stored.write(group(map(member, names), generation=3)) == (set(), {"members/4"})
    names.append("zz")
    assert stored.write(group(map(member, names), generation=4)) == ({"members/4"}, set())


def test_write_that_changes_nothing_writes_the_head() -> None:
    parts = split_record(group([member("a")]), MINE, {})
    assert changed_parts(parts, parts) == ({HEAD: parts[HEAD]}, [])


def test_changed_subscription_does_not_write_the_members() -> None:
    before, after = group(map(member, ids(10))), group(map(member, ids(10)), generation=2)
    after.subscriptions[0].expression = "x"
    for one in after.members:
        one.differs = True
    parts = split_record(before, MINE, {})
    put, delete = changed_parts(parts, split_record(after, OTHER, read_record("g", parts).numbers))
    assert (sorted(put), delete) == ([HEAD, "settings"], [])
    assert read_record("g", parts | put).group == after


def test_moved_queue_writes_the_numbers_of_its_key_only() -> None:
    stored, members = Stored(), [member(name) for name in ids(3)]
    assigned = [1] * (4 * QUEUES_PER_KEY - 1)
    stored.write(group(members, assigned))
    assigned[QUEUES_PER_KEY] = 3
    assert stored.write(group(members, assigned, 2)) == ({"queues/1"}, set())
    shorter = assigned[: 2 * QUEUES_PER_KEY]
    assert stored.write(group(members, shorter, 3)) == ({"queues/2", "settings"}, {"queues/3"})


def test_queues_of_a_member_stay_when_a_member_before_it_leaves() -> None:
    stored = Stored()
    stored.write(group(map(member, "abc"), [0, 1, 2, 3, 3]))
    assert stored.write(group(map(member, "bc"), [0, 0, 1, 2, 2], 2)) == (
        {"queues/0"},
        {"members/1"},
    )
    assert stored.write(group(map(member, "bcd"), [0, 0, 1, 2, 2], 3)) == ({"members/1"}, set())


NAMES = st.lists(st.sampled_from(ids(8)), unique=True).map(sorted)


@given(st.lists(st.tuples(NAMES, st.integers(0, 600), st.integers(0, 3), st.randoms()), max_size=8))
def test_record_is_whole_after_any_changes(
    changes: list[tuple[list[str], int, int, object]],
) -> None:
    stored = Stored()
    for generation, (names, queue_count, differing, random) in enumerate(changes, 1):
        members = [
            member(name, OTHER if place < differing else MINE, generation if place % 2 else 1)
            for place, name in enumerate(names)
        ]
        assigned = [random.randint(0, len(names)) for _ in range(queue_count)]  # type: ignore[attr-defined]
        stored.write(group(members, assigned, generation))
        assert sum(part.startswith("members/") for part in stored.parts) == len(names)


# ---- records of earlier versions


def test_whole_record_of_an_earlier_version_is_read_and_replaced() -> None:
    whole = group(map(member, "abc"), [1, 2, 3])
    stored = Stored()
    stored.parts = {HEAD: whole.SerializeToString()}
    assert read_record("g", stored.parts).group == whole
    written, deleted = stored.write(group(map(member, "abcd"), [1, 2, 3], 2))
    assert written == {"settings", "queues/0", *(f"members/{number}" for number in range(1, 5))}
    assert deleted == set()


def test_whole_record_replaces_the_keys_below_it() -> None:
    """An earlier version has written a group that a later one had split."""
    stored = Stored()
    stored.write(group(map(member, "abc"), [1, 2, 3]))
    whole = group(map(member, "b"), [1, 1, 1], 2)
    stored.parts[HEAD] = whole.SerializeToString()
    assert read_record("g", stored.parts).group == whole
    assert stored.write(group(map(member, "b"), [1, 1, 1], 3))[1] == {"members/2", "members/3"}


# ---- damage


def without(parts: dict[str, bytes], part: str) -> dict[str, bytes]:
    return {key: value for key, value in parts.items() if key != part}


def damaged_parts() -> list[tuple[str, dict[str, bytes]]]:
    stored = Stored()
    stored.write(group(map(member, "abc"), [1] * 400))
    before = dict(stored.parts)
    later = [member("a"), member("b", incarnation_id=2), member("d")]
    stored.write(group(later, [1, 2] * 200, 2))
    return [
        *((f"{part or 'head'} is missing", without(stored.parts, part)) for part in stored.parts),
        *(
            (f"{part or 'head'} is outdated", stored.parts | {part: before[part]})
            for part in stored.parts
            if stored.parts[part] != before[part]
        ),
        ("a member is superfluous", stored.parts | {"members/9": stored.parts["members/1"]}),
        ("a key is unknown", stored.parts | {"other": b""}),
        ("the head is no message", stored.parts | {HEAD: b"\xff"}),
        ("the whole record is no message", {HEAD: b"\x1a\xff"}),
    ]


DAMAGED = damaged_parts()


@pytest.mark.parametrize("parts", [parts for _, parts in DAMAGED], ids=[why for why, _ in DAMAGED])
def test_incomplete_record_is_refused(parts: dict[str, bytes]) -> None:
    with pytest.raises(Internal) as raised:
        read_record("g", parts)
    assert "unreadable record of group g" in raised.value.message
    assert "groups/g" in raised.value.remedy
    assert raised.value.facts == {"group": "g"}


def test_queue_of_a_member_without_key_is_refused() -> None:
    """A fault of the writer: the digest is right."""
    parts = split_record(group([member("a")], [1]), MINE, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batonmq_server.runtime.group_record._digest", lambda _: 1)
        head = split_record(group([member("a")], [1]), MINE, {})[HEAD]
        queues = StoredAssignedQueues(members=[2, 0]).SerializeToString()
        with pytest.raises(Internal):
            read_record("g", parts | {HEAD: head, "queues/0": queues})
