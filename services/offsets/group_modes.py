"""Which calls a group allows: under a token or without (protocol 15), or once it is gone."""

from __future__ import annotations

from batonmq.errors import GroupInUse, ModeChanged, NotServing
from batonmq_server.runtime.gates import Gates
from batonmq_server.runtime.mirror import Mirror


class GroupModes:
    """Checks calls against the gates of the groups.

    Args:
        gates: Mirror of the gates in etcd, run by somebody else.
    """

    def __init__(self, gates: Mirror) -> None:
        self._mirror, self._gates = gates, Gates(gates)

    def check(self, group: str, token: int) -> None:
        """Refuse acks and deliveries in the other mode than the group's. `token` 0 is none.

        Raises:
            ModeChanged: the queues of the group are owned, or not owned, contrary to the call; or
                it is broadcasting, so that its members keep their progress.
            GroupNotFound: the group is not known, and there is no token.
            NotServing: groups are not known yet, and there is no token.
        """
        if token:
            self._gates.check_owned(group)
            return
        if not self._mirror.revision:
            raise NotServing("the groups are not known yet", retry_after_ms=500)
        if self._gates.check_unowned(group).broadcasting:
            raise ModeChanged(
                f"group {group} is broadcasting: its members keep their progress",
                facts={"group": group, "model": "broadcasting", "ownership": "off"},
            )

    def knows(self, group: str) -> bool:
        """Whether the group exists, as far as it is known here."""
        return group in self._mirror.values

    async def check_deleted(self, group: str) -> None:
        """Refuse to end the progress of a group that exists at this moment.

        Raises:
            GroupInUse: it does.
            NoQuorum: that is not known.
        """
        if await self._mirror.now(group) is not None:
            raise group_in_use(group)


def group_in_use(group: str) -> GroupInUse:
    """The refusal to end the progress of a group that exists, or exists again."""
    return GroupInUse(
        f"group {group} exists: its progress stays",
        remedy="Delete the group; its progress ends with it.",
        facts={"group": group},
    )
