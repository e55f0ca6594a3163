"""What the shell offers on the Tab key: names that exist. Silent when they can't be had at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import click

from batonmq._core.names import is_system_topic
from batonmq.admin.admin import Admin
from batonmq.cli import context_file
from batonmq.cli.context_file import SECURITY, Context, ContextError
from batonmq.cli.session import DEFAULT_NAMESERVER
from batonmq.cli.tls_options import choose_security, token_of_environment
from batonmq.errors import BatonError

_DEADLINE_S = 0.7


def topics_that_begin(context: typer.Context, incomplete: str) -> list[str]:
    """Topics of the cluster."""

    async def names(admin: Admin) -> list[str]:
        topics = [topic.name for topic in await admin.list_topics()]
        meant = is_system_topic(incomplete)
        return [name for name in topics if meant or not is_system_topic(name)]

    return _begin(incomplete, _asked(context, names))


def groups_that_begin(context: typer.Context, incomplete: str) -> list[str]:
    """Groups of the cluster."""

    async def names(admin: Admin) -> list[str]:
        return [group.name for group in await admin.list_groups()]

    return _begin(incomplete, _asked(context, names))


def contexts_that_begin(context: typer.Context, incomplete: str) -> list[str]:
    """Contexts of the file."""
    try:
        return _begin(incomplete, sorted(context_file.read(_config(context)).by_name))
    except ContextError:
        return []


def _begin(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _asked(context: typer.Context, names: Callable[[Admin], Awaitable[list[str]]]) -> list[str]:
    async def ask() -> list[str]:
        async with asyncio.timeout(_DEADLINE_S), _admin(context) as admin:
            return await names(admin)

    try:
        return asyncio.run(ask())
    except (BatonError, ContextError, OSError, TimeoutError):
        return []


def _admin(context: typer.Context) -> Admin:
    """As the command would choose it, which does not run here: option, variable, context."""
    front = context.find_root().params
    contexts = context_file.read(_config(context))
    name = front.get("name") or contexts.current
    said = contexts.get(str(name)) if name else Context()
    given = context.params.get("nameserver") or front.get("nameserver") or said.nameserver
    told = {key: front.get(key) for key in SECURITY}
    return Admin(
        str(given or DEFAULT_NAMESERVER),
        security=choose_security(told, token_of_environment(), said),
    )


def _config(context: typer.Context) -> Path:
    return Path(context.find_root().params.get("file") or default_config())


def default_config() -> Path:
    """Where the contexts are, unless the caller says otherwise."""
    return Path(typer.get_app_dir("baton")) / "config.toml"
