"""Assignment of queues to members.

Goal: every queue is assigned to exactly one member, in equal shares, with no more moves than equal
shares need, whatever the order of the input. Method: RocketMQ's vectors, then properties over
arbitrary groups; the fewest moves are found by trying every choice of the larger shares.
"""

from __future__ import annotations

import time  # noqa: TID251  CPU time, whatever else runs
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import md5
from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq_server.nameserver.core.assignment import (
    AssignableMember,
    AssignableQueue,
    AssignmentStrategy,
    assign_queues,
)

ROOMS = st.sampled_from(["", "north", "south", "west"])
NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=6)
MEMBERS = st.dictionaries(NAMES, ROOMS, min_size=1, max_size=12).map(
    lambda rooms: [AssignableMember(name, room) for name, room in rooms.items()]
)
BROKERS = {"broker-a": "north", "broker-b": "south", "broker-c": "", "broker-d": "east"}
QUEUES = st.sets(
    st.tuples(
        st.sampled_from(["flights", "orders", "t"]),
        st.sampled_from(sorted(BROKERS)),
        st.integers(0, 40),
    ),
    max_size=60,
).map(lambda places: [AssignableQueue(*place, room=BROKERS[place[1]]) for place in places])
STRATEGIES = st.sampled_from(AssignmentStrategy)
EVEN = st.sampled_from(
    [AssignmentStrategy.STICKY, AssignmentStrategy.AVERAGE, AssignmentStrategy.AVERAGE_BY_CIRCLE]
)


@st.composite
def groups(
    draw: st.DrawFn, members_max: int = 12
) -> tuple[list[AssignableMember], list[AssignableQueue], dict[AssignableQueue, str]]:
    """Members, queues, and a present assignment to members, to removed members and to none."""
    members, queues = draw(MEMBERS), draw(QUEUES)
    members = members[:members_max]
    owners = st.sampled_from([*(m.client_id for m in members), "gone", ""])
    before = {queue: owner for queue in queues if (owner := draw(owners))}
    return (
        members,
        queues,
        before | {AssignableQueue("deleted", "broker-a", 0): members[0].client_id},
    )


def queues_of(count: int, topic: str = "t", room: str = "") -> list[AssignableQueue]:
    return [AssignableQueue(topic, "broker-a", queue_id, room) for queue_id in range(count)]


def candidates(*names: str) -> list[AssignableMember]:
    return [AssignableMember(name) for name in names]


def shares(assigned: Mapping[AssignableQueue, str], names: Iterable[str]) -> list[list[int]]:
    return [[q.queue_id for q, owner in assigned.items() if owner == name] for name in names]


def sizes(
    assigned: Mapping[AssignableQueue, str], members: Sequence[AssignableMember]
) -> list[int]:
    count = Counter(assigned.values())
    return [count[m.client_id] for m in members]


def moved(before: Mapping[AssignableQueue, str], assigned: Mapping[AssignableQueue, str]) -> int:
    """Number of queues that are assigned to another member than before."""
    return sum(before.get(queue) != owner for queue, owner in assigned.items())


def fewest_moves(
    members: Sequence[AssignableMember],
    queues: Sequence[AssignableQueue],
    before: Mapping[AssignableQueue, str],
) -> int:
    """The minimum over all choices of the members with the larger shares."""
    counts = Counter(before.get(queue) for queue in queues)
    share, remainder = divmod(len(queues), len(members))
    kept_count = max(
        sum(min(counts[m.client_id], share + (m in larger)) for m in members)
        for larger in combinations(members, remainder)
    )
    return len(queues) - kept_count


@pytest.mark.parametrize(
    ("strategy", "count", "expected"),
    [
        (AssignmentStrategy.AVERAGE, 8, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (AssignmentStrategy.AVERAGE_BY_CIRCLE, 8, [[0, 3, 6], [1, 4, 7], [2, 5]]),
        (AssignmentStrategy.AVERAGE, 2, [[0], [1], []]),
        (AssignmentStrategy.AVERAGE_BY_CIRCLE, 2, [[0], [1], []]),
    ],
)
def test_assignment_equals_the_known_vectors(
    strategy: AssignmentStrategy, count: int, expected: list[list[int]]
) -> None:
    names = ["c1", "c2", "c3"]
    assert (
        shares(assign_queues(strategy, candidates(*names), queues_of(count), {}), names) == expected
    )


@pytest.mark.parametrize("strategy", AssignmentStrategy)
def test_no_queue_is_assigned_without_members(strategy: AssignmentStrategy) -> None:
    assert assign_queues(strategy, [], queues_of(8), {}) == {}


@pytest.mark.parametrize("strategy", AssignmentStrategy)
def test_assignment_without_queues_is_empty(strategy: AssignmentStrategy) -> None:
    assert (
        assign_queues(strategy, candidates("c1"), [], {AssignableQueue("t", "broker-a", 0): "c1"})
        == {}
    )


@given(STRATEGIES, groups())
def test_every_queue_is_assigned_to_exactly_one_member(
    strategy: AssignmentStrategy,
    group: tuple[list[AssignableMember], list[AssignableQueue], dict[AssignableQueue, str]],
) -> None:
    members, queues, before = group
    assigned = assign_queues(strategy, members, queues, before)
    assert list(assigned) == sorted(queues, key=lambda q: (q.topic, q.broker, q.queue_id))
    assert set(assigned.values()) <= {m.client_id for m in members}


@given(EVEN, groups())
def test_shares_differ_by_one_at_most(
    strategy: AssignmentStrategy,
    group: tuple[list[AssignableMember], list[AssignableQueue], dict[AssignableQueue, str]],
) -> None:
    members, queues, before = group
    counts = sizes(assign_queues(strategy, members, queues, before), members)
    assert max(counts) - min(counts) <= 1


@given(STRATEGIES, groups(), st.randoms(use_true_random=False))
def test_order_and_repetition_of_the_input_do_not_matter(
    strategy: AssignmentStrategy,
    group: tuple[list[AssignableMember], list[AssignableQueue], dict[AssignableQueue, str]],
    random: Random,
) -> None:
    members, queues, before = group
    expected = assign_queues(strategy, members, queues, before)
    again, shuffled, owners = [*members, *members], [*queues, *queues], list(before.items())
    for values in (again, shuffled, owners):
        random.shuffle(values)
    assert assign_queues(strategy, again, shuffled, dict(owners)) == expected


@given(groups(members_max=6))
def test_sticky_moves_no_more_than_equal_shares_need(
    group: tuple[list[AssignableMember], list[AssignableQueue], dict[AssignableQueue, str]],
) -> None:
    members, queues, before = group
    assigned = assign_queues(AssignmentStrategy.STICKY, members, queues, before)
    assert moved(before, assigned) == fewest_moves(members, queues, before)


@pytest.mark.parametrize("strategy", AssignmentStrategy)
@given(groups())
def test_repeated_assignment_moves_no_queue(
    strategy: AssignmentStrategy,
    group: tuple[list[AssignableMember], list[AssignableQueue], dict[AssignableQueue, str]],
) -> None:
    members, queues, before = group
    assigned = assign_queues(strategy, members, queues, before)
    assert assign_queues(strategy, members, queues, assigned) == assigned


@pytest.mark.parametrize(
    "strategy", [AssignmentStrategy.STICKY, AssignmentStrategy.CONSISTENT_HASH]
)
@given(group=groups(), newcomer=NAMES)
def test_join_moves_queues_only_to_the_new_member(
    strategy: AssignmentStrategy,
    group: tuple[list[AssignableMember], list[AssignableQueue], dict[AssignableQueue, str]],
    newcomer: str,
) -> None:
    members, queues, before = group
    first = assign_queues(strategy, members, queues, before)
    after = assign_queues(strategy, [*members, AssignableMember(newcomer)], queues, first)
    assert {after[queue] for queue in queues if after[queue] != first[queue]} <= {newcomer}


@pytest.mark.parametrize(
    "strategy", [AssignmentStrategy.STICKY, AssignmentStrategy.CONSISTENT_HASH]
)
@given(group=groups())
def test_leave_moves_only_the_queues_of_that_member(
    strategy: AssignmentStrategy,
    group: tuple[list[AssignableMember], list[AssignableQueue], dict[AssignableQueue, str]],
) -> None:
    members, queues, before = group
    first = assign_queues(strategy, members, queues, before)
    after = assign_queues(strategy, members[1:], queues, first)
    removed = members[0].client_id
    assert all(first[queue] in (removed, owner) for queue, owner in after.items())


def test_sticky_member_gives_up_queues_of_each_topic() -> None:
    queues = [*queues_of(8, "flights"), *queues_of(8, "orders")]
    assigned = assign_queues(
        AssignmentStrategy.STICKY, candidates("c1", "c2"), queues, dict.fromkeys(queues, "c1")
    )
    new = Counter(queue.topic for queue, owner in assigned.items() if owner == "c2")
    assert new == {"flights": 4, "orders": 4}


@given(groups())
def test_machine_room_keeps_queues_in_their_room_in_equal_shares(
    group: tuple[list[AssignableMember], list[AssignableQueue], dict[AssignableQueue, str]],
) -> None:
    members, queues, before = group
    assigned = assign_queues(AssignmentStrategy.MACHINE_ROOM, members, queues, before)
    for room in ("north", "south"):
        inside = [m for m in members if m.room == room]
        part = {queue: owner for queue, owner in assigned.items() if queue.room == room}
        if inside:
            assert set(part.values()) <= {m.client_id for m in inside}
            counts = sizes(part, inside)
            assert max(counts) - min(counts) <= 1
            assert moved(before, part) == fewest_moves(inside, list(part), before)


@given(groups())
def test_machine_room_assigns_rooms_without_members_to_all_in_equal_shares(
    group: tuple[list[AssignableMember], list[AssignableQueue], dict[AssignableQueue, str]],
) -> None:
    members, queues, before = group
    inhabited = {m.room for m in members} - {""}
    assigned = assign_queues(AssignmentStrategy.MACHINE_ROOM, members, queues, before)
    remaining = {queue: owner for queue, owner in assigned.items() if queue.room not in inhabited}
    counts = sizes(remaining, members)
    assert max(counts) - min(counts) <= 1


def test_broker_that_changes_its_room_keeps_its_assignment() -> None:
    before = dict.fromkeys(queues_of(4, room="north"), "c2")
    members = [AssignableMember("c1", "south"), AssignableMember("c2", "south")]
    assigned = assign_queues(
        AssignmentStrategy.MACHINE_ROOM, members, queues_of(4, room="south"), before
    )
    assert moved(before, assigned) == 2


@given(groups())
def test_consistent_hash_takes_the_next_of_ten_points_on_the_ring(
    group: tuple[list[AssignableMember], list[AssignableQueue], dict[AssignableQueue, str]],
) -> None:
    members, queues, before = group

    def place(text: str) -> int:
        return int(md5(text.encode(), usedforsecurity=False).hexdigest()[:8], 16)

    def distance(queue: AssignableQueue, member: AssignableMember) -> int:
        name = f"MessageQueue [topic={queue.topic}, brokerName={queue.broker}, "
        at = place(f"{name}queueId={queue.queue_id}]")
        return min((place(f"{member.client_id}-{node}") - at) % 2**32 for node in range(10))

    for queue, owner in assign_queues(
        AssignmentStrategy.CONSISTENT_HASH, members, queues, before
    ).items():
        assert distance(queue, AssignableMember(owner)) == min(distance(queue, m) for m in members)


def assignment_cpu_s(strategy: AssignmentStrategy, member_count: int, queue_count: int) -> float:
    """Return the least CPU time of three assignments after a twentieth of the members has left."""
    members = [
        AssignableMember(f"client-{index}@host", f"room-{index % 3}")
        for index in range(member_count)
    ]
    queues = [
        AssignableQueue(
            f"topic-{index % 20}", f"broker-{index % 7}", index // 20, f"room-{index % 4}"
        )
        for index in range(queue_count)
    ]
    before = assign_queues(strategy, members, queues, {})
    taken_s = []
    for _ in range(3):
        start_s = time.thread_time()
        assign_queues(strategy, members[member_count // 20 :], queues, before)
        taken_s.append(time.thread_time() - start_s)
    return min(taken_s)


@pytest.mark.parametrize("strategy", AssignmentStrategy)
async def test_cost_of_an_assignment_grows_with_the_queues_and_not_with_queues_times_members(
    strategy: AssignmentStrategy,
) -> None:
    """12 to 19 times the cost for ten times as many of both; with their product it were 100."""
    small_s, large_s = (
        assignment_cpu_s(strategy, 100, 1_000),
        assignment_cpu_s(strategy, 1_000, 10_000),
    )
    assert large_s < 40 * small_s
