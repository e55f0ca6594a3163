"""The options of a run.

Fault model. The cluster must keep its promises while
- messages between any two processes are lost, come late (also after the caller has given up),
  overtake each other, and calls arrive twice;
- links are cut, in one direction or both, and whole processes are cut off;
- any process but etcd is killed at any event and started again later, without its memory. Its
  disk has what was synced; what offsets was just writing is there or not; of what storage had
  not synced any part may be there, torn (after a power cut), or all of it (after `kill -9`);
- any process is frozen at any event for longer than its leases, and then continues with the data
  in its sockets;
- wall clocks jump by hours;
- of the nodes of a replica set, of offsets or of storage, the acting leader is killed, frozen or
  cut off, from its followers, from etcd, or both, and may die then; followers are, too, in one
  direction or both;
  a node loses its disk, or a bit of its log is flipped, though never of the only one that has
  everything; a disk of storage fails for a while, and loses the bytes of the failed sync;
- consumers join, leave, are killed and come back under the same or another name, and handlers
  run longer than a queue that is lost may drain, or fail, so that messages are sent back;
- streams break;
- the lease of an acting leader is ended although the leader runs and reaches etcd;
- an operator moves the group back and forth, undoes that, forces the release of queues, pauses
  the group for a while; a new version with another subscription is rolled out;
- a stranger writes under the ids of the producer, makes calls for members with their incarnations
  and tokens, and requests queues for members to which they are not assigned;
- the group is moved between two sets of offsets, whose nodes are killed, frozen and cut off;
- an operator drains nodes of replica sets, restarts them and undrains them, at any event; the
  followers of a leader freeze just before it is drained;
- all services are unreachable for longer than the own deadline of the members.

Not part of it: an etcd that loses what it has stored, monotonic clocks that run at different
rates, a damaged disk without another copy.

The seed determines the events and also the options (`RunOptions`), so that runs differ in the kinds
of their faults.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Literal, get_args

from batonmq_server.testing.memory_network import Faults

Strategy = Literal["STICKY", "AVERAGE", "AVERAGE_BY_CIRCLE", "CONSISTENT_HASH"]


POLICIES = ("REJECT", "STAGED", "STAGED", "STAGED_LATEST", "WARN")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run. The weight of an action is its relative frequency among all actions.

    Attributes:
        steps: Actions until the faults cease.
        queues: Queues of the topic.
        consumers: Members at the start.
        parallel: Messages of a queue that one member handles at once.
        by_key: Whether messages have ordering keys, and members handle those of a key in order.
            Failed messages are then handled again by the same member.
        buffer: Messages of a queue that wait in one member, at most.
        faults: What the network does to every message.
        joins: Weight of a new member.
        leaves: Weight of a member that leaves gracefully.
        kills: Weight of a member that is killed; it comes back later, or another one does.
        pauses: Weight of a member that is frozen.
        service_kills: Weight of a service that is killed, and started again.
        service_pauses: Weight of a service that is frozen.
        service_restarts: Weight of a service that is stopped gracefully, and started again.
        cuts: Weight of a link, or a process, that is cut off for a while.
        deaf: Weight of a member that reaches no lock manager, or no nameserver, for a while.
        jumps: Weight of a wall clock that jumps.
        resets: Weight of an operator's reset back or forth, which may be undone.
        forces: Weight of an operator's forced release of a queue.
        switches: Weight of a new version that subscribes to something else.
        group_pauses: Weight of an operator's pause of the group.
        watch_breaks: Weight of a member whose streams break.
        questions: Weight of an operator's diagnosis of queues that do not move.
        policy: What happens to subscriptions that differ; a `SubscriptionPolicy`.
        commit_on_pull: Whether acks are sent within pulls.
        pause_ms_max: Longest pause or cut.
        slow_handlers: Probability that a handler runs longer than the drain timeout.
        slow_handler_s: Longest time that such a handler runs.
        power_cuts: Whether a killed storage node loses or tears what it had not synced.
        strategy: Assignment strategy of the group.
        fails: Probability that a handler fails and sends the message back. 0: there is no
            retry topic.
        replicated: Whether offsets has three nodes, or one.
        min_in_sync: Minimum size of the in-sync set.
        kept_bytes_max: Bytes of changes that a leader keeps for returning followers.
        leader_faults: Weight of the acting leader of offsets that is killed, frozen or cut off.
        two_steps: Weight of a leader of three nodes that the others don't reach, and that may die
            then; another node must serve.
        ended_leases: Weight of a leader whose lease is ended although the leader runs.
        splits: Weight of a node of offsets that does not reach the others, or etcd, for a while.
        lost_disks: Weight of a node of offsets that is killed and comes back with an empty disk.
        stores: Nodes of the broker: one, or a replica set. Then `min_in_sync` counts for it too,
            and the three weights above for nodes of either set.
        memory_window_bytes: Consumers lagging more than this read from a follower; 0 for none.
        rots: Weight of a node of storage that is killed and comes back with a damaged log.
        disk_failures: Weight of a node of storage whose disk can't be written to for a while, if it
            has others.
        strandings: Weight of an outage of etcd for all storage nodes, which lasts longer for one.
        moves: Weight of an operator's move of the group to the other of two sets of offsets, of one
            node each. 0: there is one set.
        drains: Weight of an operator's drain of a node of a replica set. The node may be restarted,
            and is undrained later.
        lone_drains: Weight of a leader that is drained when its followers have just been frozen;
            not together with other faults of leaders.
        forgeries: Weight of a batch that a stranger sends under an id of the producer.
        thefts: Weight of a call that a stranger makes for a member; only with `identities`.
        intrusions: Weight of a request for a member, for a queue that is assigned to another one.
        identities: Whether services identify their callers.
        switches_identities: Whether access control is switched on, service by service, after the
            actions. Soon after that every queue must have an owner, without an expired lease.
        outage_ms: How long all services are unreachable after the actions; 0 for not at all. Soon
            after the outage every queue must have an owner again.
    """

    steps: int = 30
    queues: int = 4
    consumers: int = 3
    parallel: int = 3
    by_key: bool = False
    buffer: int = 40
    faults: Faults = field(default_factory=Faults)
    joins: int = 4
    leaves: int = 4
    kills: int = 0
    pauses: int = 0
    service_kills: int = 0
    service_pauses: int = 0
    service_restarts: int = 0
    cuts: int = 0
    deaf: int = 0
    jumps: int = 0
    resets: int = 0
    forces: int = 0
    switches: int = 0
    group_pauses: int = 0
    watch_breaks: int = 0
    questions: int = 0
    policy: str = "REJECT"
    commit_on_pull: bool = True
    pause_ms_max: int = 25_000
    slow_handlers: float = 0.0
    slow_handler_s: float = 6.0
    power_cuts: bool = False
    strategy: Strategy = "STICKY"
    fails: float = 0.0
    replicated: bool = False
    min_in_sync: int = 1
    kept_bytes_max: int = 64 * 1024 * 1024
    leader_faults: int = 0
    two_steps: int = 0
    ended_leases: int = 0
    splits: int = 0
    lost_disks: int = 0
    stores: int = 1
    memory_window_bytes: int = 0
    rots: int = 0
    disk_failures: int = 0
    strandings: int = 0
    moves: int = 0
    drains: int = 0
    lone_drains: int = 0
    forgeries: int = 0
    thefts: int = 0
    intrusions: int = 0
    identities: bool = False
    switches_identities: bool = False
    outage_ms: int = 0

    @staticmethod
    def drawn(random: Random, steps: int) -> RunOptions:
        """Draw options; each kind of fault is absent, present or frequent."""

        def some(most: int) -> int:
            return random.choice([0, 0, most // 2, most])

        faults = Faults(
            loss=random.choice([0, 0, 0.01, 0.05]),
            duplicate=random.choice([0, 0.02, 0.1]),
            slow=random.choice([0, 0.01, 0.04]),
            delay_ms_max=random.choice([3, 20, 150]),
        )
        options = RunOptions(
            steps=steps,
            queues=random.randint(2, 6),
            consumers=random.randint(2, 4),
            parallel=random.randint(1, 4),
            faults=faults,
            joins=random.randint(1, 4),
            leaves=random.randint(1, 4),
            kills=some(4),
            pauses=some(4),
            service_kills=some(6),
            service_pauses=some(4),
            service_restarts=some(4),
            cuts=some(4),
            deaf=some(2),
            jumps=some(2),
            resets=some(3),
            forces=some(2),
            switches=some(3),
            group_pauses=some(6),
            watch_breaks=some(2),
            questions=1,
            policy=random.choice(POLICIES),
            commit_on_pull=random.random() < 0.5,
            pause_ms_max=random.choice([4_000, 20_000, 40_000]),
            slow_handlers=random.choice([0, 0, 0.05]),
            power_cuts=random.random() < 0.5,
            strategy=random.choice(get_args(Strategy)),
        )
        # A retry copy waits by the wall clock: for hours if the clock has jumped.
        fails = random.choice([0, 0.3, 0.3, 0.6])
        options = options if options.jumps else replace(options, fails=fails)
        if random.random() < 0.5:
            return replace(options, moves=some(4))
        return replace(
            options,
            replicated=True,
            min_in_sync=random.choice([1, 1, 2]),
            kept_bytes_max=random.choice([1_000, 64 * 1024 * 1024]),
            leader_faults=some(4),
            splits=some(4),
            lost_disks=some(2),
            two_steps=some(2),
            ended_leases=some(2),
        )

    @staticmethod
    def of_storage(random: Random, steps: int) -> RunOptions:
        """Draw options as `drawn`, with a replicated broker and its faults."""
        return replace(
            RunOptions.drawn(random, steps),
            stores=random.choice([2, 3, 3]),
            min_in_sync=random.choice([1, 1, 2]),
            memory_window_bytes=random.choice([0, 2_000]),
            leader_faults=random.choice([2, 4]),
            splits=random.choice([2, 4]),
            lost_disks=random.choice([0, 1, 2]),
            rots=random.choice([0, 1, 2]),
            disk_failures=random.choice([0, 1, 2]),
            strandings=random.choice([0, 1]),
            two_steps=random.choice([0, 1, 2]),
        )

    @staticmethod
    def of_moves(random: Random, steps: int) -> RunOptions:
        """Draw options as `drawn`, with repeated moves of the group between two sets of offsets."""
        drawn = RunOptions.drawn(random, steps)
        return replace(
            drawn, moves=12, replicated=False, leader_faults=0, two_steps=0, splits=0, lost_disks=0
        )

    @staticmethod
    def of_drains(random: Random, steps: int) -> RunOptions:
        """Draw options with drains, among the faults of `of_storage` or among none of leaders."""
        if random.random() < 0.5:
            drawn = RunOptions.of_storage(random, steps)
            min_in_sync = random.choice([1, 1, 1, 2])
            return replace(drawn, replicated=True, moves=0, drains=16, min_in_sync=min_in_sync)
        return RunOptions(
            steps=steps,
            faults=Faults(delay_ms_max=random.choice([3, 20, 80]), duplicate=0.02),
            commit_on_pull=random.random() < 0.5,
            fails=random.choice([0, 0.1]),
            replicated=random.random() < 0.5,
            min_in_sync=random.choice([1, 2]),
            stores=3,
            lone_drains=8,
        )

    @staticmethod
    def of_outages(random: Random, steps: int) -> RunOptions:
        """Draw options without faults but an outage of all services, at the end of the actions."""
        return RunOptions(
            steps=steps,
            queues=random.randint(2, 6),
            consumers=random.randint(2, 4),
            parallel=random.randint(1, 4),
            faults=Faults(delay_ms_max=random.choice([3, 20, 80])),
            watch_breaks=random.choice([0, 2]),
            commit_on_pull=random.random() < 0.5,
            slow_handlers=random.choice([0, 0.05, 0.2]),
            slow_handler_s=random.choice([6, 6, 25]),
            strategy=random.choice(get_args(Strategy)),
            fails=random.choice([0, 0.1]),
            replicated=random.random() < 0.3,
            outage_ms=random.choice([10_000, 14_000, 20_000]),
        )

    def with_stranger(self, random: Random) -> RunOptions:
        """Return these options, perhaps with a stranger, with or without identities."""
        forgeries, thefts = random.choice([0, 0, 2, 4]), random.choice([0, 2, 4])
        if random.random() < 0.5:
            intrusions = random.choice([0, 0, 2])
            return replace(self, forgeries=forgeries, intrusions=intrusions)
        return replace(self, forgeries=forgeries, thefts=thefts, identities=True)

    @staticmethod
    def graceful(random: Random, steps: int) -> RunOptions:
        """Return options without faults: members join and leave, services restart one by one."""
        options = RunOptions(
            steps=steps,
            queues=random.randint(2, 6),
            consumers=random.randint(2, 4),
            parallel=random.randint(1, 4),
            faults=Faults(delay_ms_max=random.choice([3, 20, 80])),
            service_restarts=random.choice([0, 0, 2]),
            switches=random.choice([0, 0, 1, 2]),
            group_pauses=random.choice([0, 1]),
            watch_breaks=random.choice([0, 2]),
            questions=1,
            policy=random.choice(POLICIES),
            commit_on_pull=random.random() < 0.5,
            strategy=random.choice(get_args(Strategy)),
            fails=random.choice([0, 0.1]),
            replicated=random.random() < 0.5,
            min_in_sync=random.choice([1, 2]),
            stores=random.choice([1, 1, 2, 3]),
        )
        return options if options.replicated else replace(options, moves=random.choice([0, 3]))

    @staticmethod
    def switching_identities(random: Random, steps: int) -> RunOptions:
        """Draw options without faults, in which access control is switched on at the end."""
        drawn = replace(RunOptions.graceful(random, steps), switches=0, group_pauses=0, stores=1)
        return replace(drawn, moves=0, replicated=False, switches_identities=True)

    def __str__(self) -> str:
        """Return the options that differ from the defaults."""
        plain = RunOptions()
        names = [each.name for each in fields(self)]
        changed = [name for name in names if getattr(self, name) != getattr(plain, name)]
        return ", ".join(f"{name}={getattr(self, name)}" for name in changed)
