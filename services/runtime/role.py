"""Who asks a replica for what only its master may say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from batonmq.common.errors import BatonError, NoQuorum, NotLeader, Unreachable
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


class WhileMaster:
    """Stands where a servicer is expected: each call goes to the one of the mastership.

    An answer leaves only if the lease is still good then (protocol section 8). Otherwise nobody
    knows what has become of the call: that is no refusal, after which nothing would have changed.

    Args:
        servicer: That of the mastership; raises if there is none, or it does not serve yet.
    """

    def __init__(self, role: Role[Any], servicer: Callable[[], Any]) -> None:
        self._role, self._servicer = role, servicer

    def __getattr__(self, method: str) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            servicer, mastership = self._servicer(), self._role.mastership
            try:
                answer = await getattr(servicer, method)(request, context)
            except BatonError:
                self._check_over(mastership)
                raise
            self._check_over(mastership)
            return answer

        return call

    def _check_over(self, mastership: Any) -> None:
        try:
            self._role.check_still(mastership)
        except (NoQuorum, NotLeader) as error:
            raise Unreachable(
                "this node was master, and it is not known what has become of the call",
                retry_after_ms=200,
            ) from error
