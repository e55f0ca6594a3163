"""Panels and dashboards: queries, and the command that prints the same at a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RATE = "$__rate_interval"
"""Grafana replaces it with a span that has several scrapes."""
IN_CLUSTER = 'cluster=~"$cluster"'
OF_TOPIC = f'{IN_CLUSTER}, topic=~"$topic"'
OF_GROUP = f'{IN_CLUSTER}, group=~"$group"'
BOTH = f'{OF_GROUP}, topic=~"$topic"'
CONSUMERS = f'{IN_CLUSTER}, consumer_group=~"$group", topic=~"$topic"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        command: Command that prints the same at a terminal.
        queries: Queries by legend; `{{label}}` in a legend is the value of a label.
        unit: Unit by its name in Grafana.
        meaning: Description, where the title does not suffice.
        single: Whether the last value is shown as a number.
    """

    title: str
    command: str
    queries: Mapping[str, str]
    unit: str = "short"
    meaning: str = ""
    single: bool = False


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard; `rows` are its panels by heading."""

    uid: str
    title: str
    rows: Mapping[str, tuple[Panel, ...]]
    variables: tuple[str, ...] = field(default=())

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels."""
        return tuple(panel for row in self.rows.values() for panel in row)


def rate(series: str, by: str, where: str = IN_CLUSTER) -> str:
    """Return the query for the growth of a counter per second."""
    return f"sum by ({by}) (rate({series}{{{where}}}[{RATE}]))"


def percentiles(series: str, by: str = "", where: str = IN_CLUSTER) -> dict[str, str]:
    """Return the queries for median and 99th percentile of a histogram, by legend."""
    labels = ", ".join(("le", by) if by else ("le",))
    legend = f"{{{{{by}}}}} " if by else ""
    rates = f"sum by ({labels}) (rate({series}_bucket{{{where}}}[{RATE}]))"
    return {f"{legend}p{round(q * 100)}": f"histogram_quantile({q}, {rates})" for q in (0.5, 0.99)}


def or_zero(query: str) -> str:
    """Return the query with a 0 if it has no series, which then means that nothing is wrong."""
    return f"{query} or on() vector(0)"


def in_an_hour(series: str, by: str, where: str = IN_CLUSTER) -> str:
    """Return the query for the increase of a counter within an hour."""
    return f"sum by ({by}) (increase({series}{{{where}}}[1h]))"


STATUS, WHY = "baton cluster status", "baton group why-stuck GROUP"
REPLICATION, BROKERS = "baton cluster replication", "baton cluster brokers"
