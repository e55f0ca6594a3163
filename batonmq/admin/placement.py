"""Which offsets set keeps the progress of a group, and moving it to another one."""

from __future__ import annotations

from dataclasses import dataclass

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq.admin.admin import Admin


@dataclass(frozen=True, slots=True)
class OffsetsPlacement:
    """Where a group is kept.

    Attributes:
        move: How often it was moved.
        from_set: The set it comes from, until it has arrived; else empty.
    """

    offsets_set: str
    move: int
    from_set: str


@dataclass(frozen=True, slots=True)
class GroupMove:
    """What a move does. A group that is where it is to be stays: both places are equal."""

    group: str
    before: OffsetsPlacement
    after: OffsetsPlacement

    @property
    def stays(self) -> bool:
        """Whether there is nothing to do."""
        return self.before == self.after


async def locate_group(admin: Admin, group: str) -> OffsetsPlacement:
    """Where a group is kept, or is about to be.

    Raises:
        OffsetsUnreachable: nobody has asked for it before, and no node of offsets is registered.
    """
    request = pb.LocateGroupRequest(group=group)
    answer = await admin.ask(
        lambda limit_s: admin.directory.nameserver().LocateGroup(request, timeout=limit_s)
    )
    return _place(answer.placement)


async def move_group(
    admin: Admin, group: str, to_set: str = "", *, dry_run: bool = False
) -> GroupMove:
    """Have another offsets set keep a group. It stands still for the moment of the move.

    Returns once it is decided; `locate_group` tells when it has arrived. Repeating it does no harm.

    Args:
        to_set: Empty for the set that a new group of the name would be given.
        dry_run: Tell what would happen, and change nothing.

    Raises:
        GroupNotFound: there is none.
        SetNotFound: there is no such set.
        GroupMoving: its last move does not come to an end.
    """
    request = pb.MoveGroupRequest(group=group, to_set=to_set, dry_run=dry_run)
    answer = await admin.ask(
        lambda limit_s: admin.directory.nameserver().MoveGroup(request, timeout=limit_s)
    )
    return GroupMove(group, _place(answer.before), _place(answer.placement))


def _place(place: pb.Placement) -> OffsetsPlacement:
    return OffsetsPlacement(place.offsets_set, place.move, place.from_set)
