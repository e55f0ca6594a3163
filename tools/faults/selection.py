"""A fixed list of faults for a run of three minutes; every kind occurs."""

from __future__ import annotations

from tools.faults.fault_schedule import ETCD, GATEWAY, MEMBER, NETWORK, Fault, FaultGroup, is_cut

_BROKER, _OTHER, _OFFSETS = "storage broker-0", "storage broker-1", "offsets"
_REST_MS = 300

_EVERYTHING = (
    (
        Fault("kill", _BROKER, 0, 500),
        Fault("pause", ETCD, 1, 3_000),
        Fault("kill", MEMBER, 0, 500),
    ),
    (Fault("isolate", _OTHER, 0, 6_000), Fault("restart", "nameserver", 1, 0)),
    (Fault("restart", _OFFSETS, 0, 0), Fault("brokers only", MEMBER, 1, 6_000)),
    (Fault("halves", NETWORK, 3, 5_000), Fault("kill", GATEWAY, 0, 500)),
    (
        Fault("slow sync", _OFFSETS, 1, 6_000, 2_000),
        Fault("slow sync", _BROKER, 0, 6_000, 500),
        Fault("clock jump", "lockmgr", 0, 6_000, 3_600_000),
        Fault("clock jump", _OTHER, 0, 6_000, -3_600_000),
    ),
    (
        Fault("failed sync", _OTHER, 0, 500),
        Fault("clock strobe", _OFFSETS, 0, 4_000, 100),
    ),
    (Fault("full disk", _BROKER, 0, 5_000), Fault("full disk", _OFFSETS, 0, 5_000)),
    (
        Fault("torn file", _BROKER, 1, 8_000, 1),
        Fault("torn file", _OFFSETS, 1, 8_000, 1),
        Fault("pause", MEMBER, 2, 4_000),
    ),
    (Fault("unplug", _OFFSETS, 0, 6_000), Fault("no broker", MEMBER, 0, 6_000)),
    (Fault("mute", "lockmgr", 0, 5_000), Fault("deaf", "nameserver", 0, 5_000)),
    (Fault("bridge", NETWORK, 5, 4_000), Fault("pause", GATEWAY, 1, 4_000)),
    (Fault("ring", NETWORK, 7, 4_000),),
    (Fault("no etcd", _OTHER, 0, 6_000), Fault("kill", "lockmgr", 0, 500)),
    (Fault("pause", ETCD, 0, 5_000), Fault("pause", ETCD, 2, 5_000)),
    (
        Fault("flipped bit", _OTHER, 0, 8_000, 2),
        Fault("flipped bit", _OFFSETS, 0, 8_000, 2),
        Fault("unplug", MEMBER, 1, 5_000),
    ),
)


def selection(*, cuts: bool) -> tuple[FaultGroup, ...]:
    """Return the groups of faults; without cuts if the network cannot be cut."""
    chosen = [tuple(one for one in faults if cuts or not is_cut(one)) for faults in _EVERYTHING]
    return tuple(FaultGroup(faults, _REST_MS) for faults in chosen if faults)
