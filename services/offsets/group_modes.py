"""Which calls a group accepts: with a token, without one (protocol 15), or none any more."""

from __future__ import annotations

from batonmq.errors import GroupInUse, ModeChanged
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.group_gates import GroupGates


class GroupModes:
    """Checks calls against the gates of the groups.

    Args:
        gates: Mirror of the gates in etcd; its owner runs it.
    """

    def __init__(self, gates: EtcdMirror) -> None:
        self._mirror, self._gates = gates, GroupGates(gates)

    def check(self, group: str, token: int) -> None:
        """Reject acks and deliveries that do not fit the mode of the group; `token` 0 is no token.

        Raises:
            ModeChanged: the call has a token and the group has no ownership, or the other way
                round; or the group is broadcasting, so its members keep their progress.
            GroupNotFound: the group is not known, and the call has no token.
            NotServing: the groups have not been read from etcd yet, and the call has no token.
        """
        if token:
            self._gates.check_owned(group)
            return
        if self._gates.check_unowned(group).broadcasting:
            raise ModeChanged(
                f"group {group} is broadcasting: its members keep their progress",
                facts={"group": group, "model": "broadcasting", "ownership": "off"},
            )

    def exists(self, group: str) -> bool:
        """Return whether the mirror has the group."""
        return group in self._mirror.values

    async def check_deleted(self, group: str) -> None:
        """Return if etcd has no such group at this moment.

        Raises:
            GroupInUse: the group exists.
            NoQuorum: etcd does not answer.
        """
        if await self._mirror.read(group) is not None:
            raise group_in_use(group)


def group_in_use(group: str) -> GroupInUse:
    """Return the error for deleting the progress of a group that exists."""
    return GroupInUse(
        f"group {group} exists: its progress is not deleted",
        remedy="Delete the group; its progress is deleted with it.",
        facts={"group": group},
    )
