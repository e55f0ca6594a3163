"""Opens the outputs of an owner: refuses those of earlier owners, and learns what is stored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field

import grpc.aio

from baton.storage.v1 import output_service_pb2 as pb
from batonmq._common.batcher import Batcher
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq._connection.routes import query_route
from batonmq._consumer.session import Session
from batonmq._core.outputs import OutputHead
from batonmq.errors import BatonError

log = logging.getLogger(__name__)

OWNERS_MAX = 16
"""Owners of one call: each response may name the outputs of a whole window."""
_Outcome = pb.StoredOutputs | BatonError


@dataclass(slots=True)
class KnownOutputs:
    """What storage remembers of a source, of all brokers.

    Attributes:
        digests: Digest of each stored output, by offset of its input and number.
        forgotten_unix_ms: Outputs that were stored at or before this time may be forgotten.
    """

    digests: dict[int, dict[int, int]] = field(default_factory=dict)
    forgotten_unix_ms: int = 0

    def add(self, stored: pb.StoredOutputs) -> None:
        """Add what one broker remembers."""
        for one in stored.outputs:
            self.digests.setdefault(one.offset, {})[one.number] = one.digest
        self.forgotten_unix_ms = max(self.forgotten_unix_ms, stored.forgotten_unix_ms)

    def of(self, offset: int) -> Mapping[int, int]:
        """Return the digests of the stored outputs of an input, by number."""
        return self.digests.get(offset, {})


class OutputOpener:
    """Opens outputs at all brokers of the output topics.

    Args:
        topics: Names of the output topics.
        spawn: Runs a coroutine until the consumer ends.
    """

    def __init__(
        self,
        session: Session,
        topics: Sequence[str],
        spawn: Callable[[Coroutine[object, object, None]], object],
    ) -> None:
        self._session, self._topics, self._spawn = session, topics, spawn
        self._batchers: dict[str, Batcher[pb.OutputOwner, _Outcome]] = {}

    async def open(self, head: OutputHead, is_valid: Callable[[], bool]) -> KnownOutputs | None:
        """Repeat until all brokers have answered; return None if the ownership ends before that.

        Args:
            is_valid: Returns whether the token of `head` is still that of the owner.
        """
        owner = _owner_of(head)
        known, opened, failures = KnownOutputs(), set[str](), 0
        while is_valid():
            try:
                # The route is asked for now: an earlier owner may have known newer queues.
                for broker in sorted(await self._brokers() - opened):
                    outcome = await self._batcher(broker).call(owner)
                    if isinstance(outcome, BatonError):
                        raise outcome
                    known.add(outcome)
                    opened.add(broker)
            except BatonError as error:
                log.warning("outputs not opened, trying again source=%s: %s", head.source, error)
                await self._session.directory.pause(error, failures)
                failures += 1
            else:
                log.info("outputs opened source=%s token=%d", head.source, head.token)
                return known
        return None

    async def _brokers(self) -> set[str]:
        routes = [await query_route(self._session.directory, topic) for topic in self._topics]
        return {spread.broker for route in routes for spread in route.topic.spread}

    def _batcher(self, broker: str) -> Batcher[pb.OutputOwner, _Outcome]:
        batcher = self._batchers.get(broker)
        if batcher is None:

            async def request(owners: Sequence[pb.OutputOwner]) -> Sequence[_Outcome]:
                return await self._request(broker, owners)

            batcher = self._batchers[broker] = Batcher(request, items_max=OWNERS_MAX)
            self._spawn(batcher.run())
        return batcher

    async def _request(self, broker: str, owners: Sequence[pb.OutputOwner]) -> list[_Outcome]:
        try:
            stub = await self._session.directory.outputs(broker)
            answer = await stub.OpenOutputs(
                pb.OpenOutputsRequest(owners=owners), timeout=CALL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            return [from_rpc_error(error)] * len(owners)
        except BatonError as error:
            return [error] * len(owners)
        return [
            error_from_pb(one.error) if one.HasField("error") else one.stored
            for one in answer.outcomes
        ]


def _owner_of(head: OutputHead) -> pb.OutputOwner:
    source = head.source
    return pb.OutputOwner(
        source=pb.OutputSource(
            group=source.group,
            topic_id=source.topic_id,
            broker=source.broker,
            queue_id=source.queue_id,
        ),
        reset_epoch=head.reset_epoch,
        token=head.token,
        floor=head.floor,
    )
