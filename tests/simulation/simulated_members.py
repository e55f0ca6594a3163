"""The members of a run: they join, leave, are killed and restarted, and change subscriptions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.handler_results import RetryLater
from batonmq._consumer.message import ReceivedMessage
from batonmq_server.testing.processes import SimulatedProcess
from tests.simulation.answer_checks import SPAN_MAX
from tests.simulation.cluster import ConsumerProcess
from tests.simulation.run_context import Later, RunContext

MEMBERS_MAX = 6
ATTEMPTS_MAX = 3
"""Number of client ids; the last one is reused."""
EXPRESSIONS = ("a || b", "b || c", "c", "*", "a")


class SimulatedMembers:
    """Starts, stops and disturbs members."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._expression = EXPRESSIONS[0]
        self._members: dict[str, ConsumerProcess] = {}
        self._lives: Counter[str] = Counter()
        self._names = 0
        self._settings = ConsumerSettings(
            consume_from="first",
            queue_concurrency=context.options.parallel,
            buffer_messages_max=context.options.buffer,
            pull_messages_max=8,
            pull_hold_ms=5_000,
            span_max=SPAN_MAX,
            commit_interval_ms=1_000,
            commit_on_pull=context.options.commit_on_pull,
            keep_alive_ms=2_000,
            drain_timeout_ms=2_000,
            order="key" if context.options.by_key else "none",
            send_back=context.options.fails > 0 and not context.options.by_key,
            retry_first_ms=200,
            retry_ms_max=3_000,
        )

    @property
    def names(self) -> list[str]:
        """The names of all members so far."""
        return list(self._members)

    @property
    def processes(self) -> Iterable[ConsumerProcess]:
        """The last process of each member."""
        return self._members.values()

    def present(self) -> list[ConsumerProcess]:
        """Return the members that run and are not leaving."""
        return [
            member
            for member in self._members.values()
            if member.alive and not member.frozen and not member.leaving
        ]

    def join(self, name: str = "") -> None:
        """Start a member with the newest subscription."""
        if len(self.present()) >= MEMBERS_MAX:
            return
        if not name:
            self._names += 1
            name = f"c{self._names}"
        life = self._lives[name] = self._lives[name] + 1
        self._members[name] = ConsumerProcess(
            self._context.cluster, name, life, self._expression, self._settings, self._handle
        )
        self._context.note(f"{name} joins for {self._expression}", "joins")

    def leave(self) -> None:
        """Stop a member gracefully."""
        if len(self.present()) > 1:
            self._leave(self._context.random.choice(self.present()))

    def kill(self) -> Later:
        """Kill a member; restart it or start another one later."""
        if not self.present():
            return None
        member = self._context.random.choice(self.present())
        member.kill(noticed=self._context.random.random() < 0.7)
        self._context.cluster.checker.clients.crashed(member.name)
        self._context.note(f"{member.name} is killed", "kills")
        return self._come_back(member.name)

    def pause(self) -> Later:
        """Freeze a member for a while."""
        present = self.present()
        if not present:
            return None
        return self._context.freeze(self._context.random.choice(present), "pauses")

    def break_watches(self) -> None:
        """Break the streams of a member: session, routes and lock manager."""
        if self.present():
            member = self._context.random.choice(self.present())
            count = self._context.cluster.network.break_streams(member.host)
            self._context.note(f"{count} streams of {member.name} break", "watch breaks")

    def switch(self) -> Later:
        """Roll out a new version with another subscription (section 14)."""
        others = [each for each in EXPRESSIONS if each != self._expression]
        self._expression = self._context.random.choice(others)
        self._context.note(f"the new version wants {self._expression}", "switches")
        return self._roll(self._expression)

    def settle(self) -> None:
        """Stop the members with the old version; keep at least one member running."""
        for member in self.processes:
            if member.alive:
                member.thaw()
        for member in self.present():
            if member.expression != self._expression:
                member.stop()
        if not self.present():
            self.join()

    async def _roll(self, expression: str) -> None:
        for member in self.present():
            await asyncio.sleep(3 * self._context.random.random())
            if self._expression != expression:
                return
            if member not in self.present() or member.expression == expression:
                continue
            if self._context.random.random() < 0.5:
                self._leave(member)
                self.join()
            else:
                self.join()
                self._leave(member)

    def _leave(self, member: ConsumerProcess) -> None:
        member.stop()
        self._context.note(f"{member.name} leaves", "leaves")

    async def _come_back(self, name: str) -> None:
        random = self._context.random
        name = random.choice([name, ""])
        await asyncio.sleep(random.choice([0.1, 3, 20]) * random.random())
        self.join(name)

    async def _handle(
        self, process: SimulatedProcess, message: ReceivedMessage
    ) -> RetryLater | None:
        random = process.random
        if random.random() < self._context.options.slow_handlers:
            self._context.counts["slow handlers"] += 1
            await asyncio.sleep(random.uniform(1, self._context.options.slow_handler_s))
        else:
            await asyncio.sleep(random.choice([0.002, 0.02, 0.2]) * random.random())
        if message.attempts < ATTEMPTS_MAX and random.random() < self._context.options.fails:
            return RetryLater(random.choice([0, 500, 5_000]))
        return None
