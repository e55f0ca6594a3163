"""One look at a page: the viewer, the address, and what every template needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from batonmq._common.clock import Clock
from batonmq.errors import InvalidArgument
from batonmq_server.console.config import ConsoleSettings
from batonmq_server.console.core import formats
from batonmq_server.console.core.group_view import verdict_level
from batonmq_server.console.core.topic_view import kind_of
from batonmq_server.console.event_reader import EventReader
from batonmq_server.console.live import LiveHub
from batonmq_server.console.viewers import Viewer, Viewers

FOLDER = Path(__file__).parent
NAV = (  # section, text, path, key after g
    ("cluster", "Cluster", "/", "c"),
    ("topics", "Topics", "/topics", "t"),
    ("groups", "Groups", "/groups", "g"),
    ("hand-overs", "Hand-overs", "/hand-overs", "h"),
    ("dead-letters", "Dead letters", "/dead-letters", "d"),
    ("alerts", "Alerts", "/alerts", "a"),
    ("access", "Access", "/access", "x"),
)


@dataclass(frozen=True, slots=True)
class Console:
    """The parts of a console that all pages share."""

    settings: ConsoleSettings
    viewers: Viewers
    hub: LiveHub
    events: EventReader
    templates: Environment

    @property
    def clock(self) -> Clock:
        """The clock of the console."""
        return self.viewers.clock


@dataclass(frozen=True, slots=True)
class Visit:
    """One look at a page.

    Attributes:
        path: Path of the page.
        names: Names in the path, such as the topic.
        query: Fields of the query.
    """

    console: Console
    viewer: Viewer
    path: str
    names: Mapping[str, str]
    query: Mapping[str, str]

    def number(self, name: str, default: int) -> int:
        """Return a field of the query as a number that is not negative.

        Raises:
            InvalidArgument: It is something else.
        """
        text = self.query.get(name, "").strip()
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) <= 18):
            raise InvalidArgument(
                f"{name} must be a number, got {text[:40]!r}",
                remedy="Go back and correct it.",
                facts={"field": name},
            )
        return int(text)

    def text(self, name: str) -> str:
        """Return a field of the query without white space around it; empty if it is missing."""
        return self.query.get(name, "").strip()

    @property
    def now_unix_ms(self) -> int:
        """The wall clock."""
        return self.console.clock.unix_ms()


Load = Callable[[Visit], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class PageSpec:
    """A page: its path, its template, and what loads the values of the template.

    Attributes:
        section: Entry of the navigation that it belongs to.
        live: Whether the block `live` of its template is updated.
    """

    path: str
    template: str
    section: str
    load: Load
    live: bool = True


def make_templates() -> Environment:
    """Return the templates; an unknown name in one is an error."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("count", "size", "span", "rate", "time", "clock_time", "percent", "counted"):
        environment.filters[name] = getattr(formats, name)
    environment.filters["path"] = lambda text: quote(str(text), safe="")
    environment.globals["UNKNOWN"] = formats.UNKNOWN
    environment.globals["link"] = link
    environment.globals["verdict_level"] = verdict_level
    environment.globals["kind_of"] = kind_of
    environment.globals["ui"] = environment.get_template("macros.html").module
    return environment


def link(path: str, **fields: object) -> str:
    """Return a path with a query; fields that are empty or None are left out."""
    given = {name: str(value) for name, value in fields.items() if value not in ("", None)}
    return f"{path}?{urlencode(given)}" if given else path


def render_block(templates: Environment, template: str, values: Mapping[str, Any]) -> str:
    """Return the block `live` of a template."""
    loaded = templates.get_template(template)
    return "".join(loaded.blocks["live"](loaded.new_context(dict(values))))
