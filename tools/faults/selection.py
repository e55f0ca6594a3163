"""Faults for a run of three minutes in which every kind occurs."""

from __future__ import annotations

from tools.faults.director import ETCD, MEMBER, NETWORK, Fault, Strike, is_cut

_BROKER, _OTHER, _OFFSETS = "storage broker-0", "storage broker-1", "offsets"
_REST_MS = 300

_EVERYTHING = (
    (
        Strike("kill", _BROKER, 0, 500),
        Strike("pause", ETCD, 1, 3_000),
        Strike("kill", MEMBER, 0, 500),
    ),
    (Strike("isolate", _OTHER, 0, 6_000), Strike("restart", "nameserver", 1, 0)),
    (Strike("restart", _OFFSETS, 0, 0), Strike("brokers only", MEMBER, 1, 6_000)),
    (Strike("halves", NETWORK, 3, 5_000),),
    (
        Strike("slow sync", _OFFSETS, 1, 6_000, 2_000),
        Strike("slow sync", _BROKER, 0, 6_000, 500),
        Strike("clock jump", "lockmgr", 0, 6_000, 3_600_000),
        Strike("clock jump", _OTHER, 0, 6_000, -3_600_000),
    ),
    (
        Strike("failed sync", _OTHER, 0, 500),
        Strike("clock strobe", _OFFSETS, 0, 4_000, 100),
    ),
    (Strike("full disk", _BROKER, 0, 5_000), Strike("full disk", _OFFSETS, 0, 5_000)),
    (
        Strike("torn file", _BROKER, 1, 8_000, 1),
        Strike("torn file", _OFFSETS, 1, 8_000, 1),
        Strike("pause", MEMBER, 2, 4_000),
    ),
    (Strike("unplug", _OFFSETS, 0, 6_000), Strike("no broker", MEMBER, 0, 6_000)),
    (Strike("mute", "lockmgr", 0, 5_000), Strike("deaf", "nameserver", 0, 5_000)),
    (Strike("bridge", NETWORK, 5, 4_000),),
    (Strike("ring", NETWORK, 7, 4_000),),
    (Strike("no etcd", _OTHER, 0, 6_000), Strike("kill", "lockmgr", 0, 500)),
    (Strike("pause", ETCD, 0, 5_000), Strike("pause", ETCD, 2, 5_000)),
    (
        Strike("flipped bit", _OTHER, 0, 8_000, 2),
        Strike("flipped bit", _OFFSETS, 0, 8_000, 2),
        Strike("unplug", MEMBER, 1, 5_000),
    ),
)


def selection(*, cuts: bool) -> tuple[Fault, ...]:
    """The faults, without cuts if the network can't be cut."""
    chosen = [tuple(one for one in strikes if cuts or not is_cut(one)) for strikes in _EVERYTHING]
    return tuple(Fault(strikes, _REST_MS) for strikes in chosen if strikes)
