"""The offsets set that keeps the progress of a group, and moves to another set."""

from __future__ import annotations

from dataclasses import dataclass

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq.admin.admin import Admin


@dataclass(frozen=True, slots=True)
class OffsetsPlacement:
    """The placement of a group.

    Attributes:
        move: Number of moves so far; -1 for a group that does not exist and has no placement.
        from_set: Previous set while the group is moving; else empty.
    """

    offsets_set: str
    move: int
    from_set: str


@dataclass(frozen=True, slots=True)
class GroupMove:
    """A move of a group; both placements are equal if the group is already on the set."""

    group: str
    before: OffsetsPlacement
    after: OffsetsPlacement

    @property
    def stays(self) -> bool:
        """Whether the group already is on the target set."""
        return self.before == self.after


async def locate_group(admin: Admin, group: str) -> OffsetsPlacement:
    """Return the placement of a group; this call places a group that has none.

    A group that does not exist is not placed: then `move` is -1, and the set is the one that the
    group would get.

    Raises:
        OffsetsUnreachable: The group has no placement yet, and no offsets node is registered.
    """
    request = pb.LocateGroupRequest(group=group)
    answer = await admin.ask(
        lambda limit_s: admin.directory.nameserver().LocateGroup(request, timeout=limit_s)
    )
    return _placement(answer.placement)


async def move_group(
    admin: Admin, group: str, to_set: str = "", *, dry_run: bool = False
) -> GroupMove:
    """Move a group to another offsets set. The group makes no progress during the move.

    Returns when the move is decided; `locate_group` shows when it is complete. The call may be
    repeated.

    Args:
        to_set: Target set; empty for the set on which a new group of this name would be placed.
        dry_run: Return the move without carrying it out.

    Raises:
        GroupNotFound: The group does not exist.
        SetNotFound: The set does not exist.
        GroupMoving: The previous move of the group is not complete.
    """
    request = pb.MoveGroupRequest(group=group, to_set=to_set, dry_run=dry_run)
    answer = await admin.ask(
        lambda limit_s: admin.directory.nameserver().MoveGroup(request, timeout=limit_s)
    )
    return GroupMove(group, _placement(answer.before), _placement(answer.placement))


def _placement(message: pb.Placement) -> OffsetsPlacement:
    return OffsetsPlacement(message.offsets_set, message.move, message.from_set)
