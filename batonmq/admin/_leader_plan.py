"""Which leaderships to move so that each host has about as many as any other. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LedSet:
    """A replica set with a leader.

    Attributes:
        leader: Node id of the leader.
        hosts: Host by node id, of the leader and of each node that may lead instead.
    """

    service: str
    replica_set: str
    leader: str
    hosts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LeaderMove:
    """A leadership that is to move to another node of its set."""

    service: str
    replica_set: str
    from_node: str
    to_node: str
    from_host: str
    to_host: str


def plan_moves(sets: Sequence[LedSet]) -> list[LeaderMove]:
    """Return the least moves after which no host leads two sets more than another that could lead.

    A move may need another one first, which makes room on a host that both sets have.
    """
    leaders = [one.leader for one in sets]
    while path := _shortest_path(sets, leaders):
        for index, node in path:
            leaders[index] = node
    return [
        LeaderMove(
            one.service,
            one.replica_set,
            one.leader,
            node,
            one.hosts[one.leader],
            one.hosts[node],
        )
        for one, node in zip(sets, leaders, strict=True)
        if one.hosts[node] != one.hosts[one.leader]
    ]


def _shortest_path(sets: Sequence[LedSet], leaders: Sequence[str]) -> list[tuple[int, str]]:
    """Return moves that take one leadership from a host to one with two fewer; empty without."""
    counts = Counter({host: 0 for one in sets for host in one.hosts.values()})
    led: dict[str, list[int]] = {host: [] for host in counts}
    for index, (one, leader) in enumerate(zip(sets, leaders, strict=True)):
        counts[one.hosts[leader]] += 1
        led[one.hosts[leader]].append(index)
    for start in sorted(counts, key=lambda host: (-counts[host], host)):
        paths: dict[str, list[tuple[int, str]]] = {start: []}
        queue = deque([start])
        while queue:
            host = queue.popleft()
            if counts[host] <= counts[start] - 2:
                return paths[host]
            for index in led[host]:
                for node, next_host in sorted(sets[index].hosts.items()):
                    if next_host not in paths:
                        paths[next_host] = [*paths[host], (index, node)]
                        queue.append(next_host)
    return []
