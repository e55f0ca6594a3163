"""Who asks a replica for what only its master may say."""

from __future__ import annotations

from typing import Generic, TypeVar

from services.runtime.member import Member

Mastership = TypeVar("Mastership")


class Role(Generic[Mastership]):
    """A node's part in its replica set, as those see it who call the node.

    Args:
        member: The node in its set.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self._mastership: Mastership | None = None

    def check(self) -> None:
        """Refuse to answer once the lease may be over.

        Raises:
            NoQuorum, NotLeader: it may be; or another node is the master.
        """
        self.member.check()

    @property
    def mastership(self) -> Mastership:
        """What slaves ask.

        Raises:
            NoQuorum, NotLeader: as `check`.
        """
        self.check()
        if self._mastership is None:
            raise self.member.not_leader()
        return self._mastership

    def check_still(self, mastership: Mastership) -> None:
        """Refuse to answer for a mastership that is over, whoever is the master now.

        Raises:
            NoQuorum, NotLeader: it is.
        """
        if self.mastership is not mastership:
            raise self.member.not_leader()
