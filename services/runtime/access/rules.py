"""What each call needs: the form of the tables that services declare, and the common ones.

A table has a rule for every method, by its full path. A method without one is refused while access
is on. Rules look at the request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from batonmq._core.names import METRICS_TOPIC
from batonmq.errors import BatonError
from batonmq_server.runtime.access.permissions import ANYTHING, Need, consume, join

Needs = Callable[[Any], Iterable[Need]]


class Each(NamedTuple):
    """How a batched call is refused item by item.

    Attributes:
        items: Name of the request's repeated field.
        need: What one item needs.
        outcomes: Name of the answer's repeated field, with one for each item.
        refused: The outcome of an item that is refused.
    """

    items: str
    need: Callable[[Any], Need]
    outcomes: str
    refused: Callable[[BatonError], Any]


class Rule(NamedTuple):
    """What a method needs.

    Attributes:
        needs: All that the caller has to have; where they are none, some grant.
        services: These may call it without.
        private: Nobody else may.
        known: Where `needs` are none, whoever is known may.
        each: Set where items are refused one by one; `needs` is what all of them need then.
    """

    needs: Needs
    services: frozenset[str] = frozenset()
    private: bool = False
    known: bool = False
    each: Each | None = None


Rules = Mapping[str, Rule]
SERVICES = frozenset({"storage", "offsets", "lockmgr", "nameserver"})


def rules_of(service: str, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """The rules of a service's methods by their full paths."""
    return {f"/{service}/{method}": rule for method, rule in rules.items()}


def needs(*what: Need, services: Iterable[str] = ()) -> Rule:
    """The same for every request."""
    return Rule(lambda _: what, frozenset(services))


def on(find: Needs, services: Iterable[str] = ()) -> Rule:
    """What `find` sees in the request."""
    return Rule(find, frozenset(services))


def only(*services: str) -> Rule:
    """Nobody but these services."""
    return Rule(lambda _: (), frozenset(services), private=True)


def of_queue(queue: Any) -> tuple[Need, Need]:
    """What it takes to work on a group's queue."""
    return consume(queue.queue.topic), join(queue.group)


def of_queues(items: str) -> Needs:
    """The same of every item that names a group's queue."""
    return lambda request: (
        need for item in getattr(request, items) for need in of_queue(item.queue)
    )


COMMON: Rules = {
    **rules_of(
        "grpc.health.v1.Health",
        {name: Rule(lambda _: (), known=True) for name in ("Check", "Watch", "List")},
    ),
    **rules_of(
        "grpc.reflection.v1alpha.ServerReflection", {"ServerReflectionInfo": needs(ANYTHING)}
    ),
    **rules_of("baton.metrics.v1.MetricsService", {"Watch": needs(consume(METRICS_TOPIC))}),
}
"""Of what every process serves."""
