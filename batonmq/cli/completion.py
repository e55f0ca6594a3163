"""Shell completion of names; it offers nothing if the names can't be had quickly."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batonmq._common import timeouts
from batonmq.cli import context_file
from batonmq.cli.context_file import SECURITY, Context, ContextError
from batonmq.cli.global_options import DEFAULT_NAMESERVER
from batonmq.cli.tls_options import choose_security, token_of_environment

if TYPE_CHECKING:
    from batonmq.admin.admin import Admin

_TIMEOUT_S = 0.7


def complete_topics(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the topics that begin with `incomplete`; system topics if it does, too."""
    from batonmq._core.names import is_system_topic  # noqa: PLC0415  only when Tab is pressed

    async def names(admin: Admin) -> list[str]:
        topics = [topic.name for topic in await admin.list_topics()]
        with_system = is_system_topic(incomplete)
        return [name for name in topics if with_system or not is_system_topic(name)]

    return _matching(incomplete, _ask(context, names))


def complete_groups(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the groups that begin with `incomplete`."""

    async def names(admin: Admin) -> list[str]:
        return [group.name for group in await admin.list_groups()]

    return _matching(incomplete, _ask(context, names))


def complete_contexts(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the contexts that begin with `incomplete`."""
    try:
        return _matching(incomplete, sorted(context_file.read(_config(context)).by_name))
    except ContextError:
        return []


def _matching(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _ask(context: click.Context, names: Callable[[Admin], Awaitable[list[str]]]) -> list[str]:
    """Return names from the cluster; none after an error or a timeout."""
    import asyncio  # noqa: PLC0415  only when Tab is pressed

    from batonmq.errors import BatonError  # noqa: PLC0415

    async def ask() -> list[str]:
        async with timeouts.timeout(_TIMEOUT_S), _admin(context) as admin:
            return await names(admin)

    try:
        return asyncio.run(ask())
    except (BatonError, ContextError, OSError, TimeoutError):
        return []


def _admin(context: click.Context) -> Admin:
    """Return the client that the command would use: option, then variable, then context.

    The callback of `baton` has not run, so its options are read here.
    """
    from batonmq.admin.admin import Admin  # noqa: PLC0415  only when Tab is pressed

    options = context.find_root().params
    contexts = context_file.read(_config(context))
    name = options.get("name") or contexts.current
    chosen = contexts.get(str(name)) if name else Context()
    address = context.params.get("nameserver") or options.get("nameserver") or chosen.nameserver
    given = {key: options.get(key) for key in SECURITY}
    security = choose_security(given, token_of_environment(), chosen)
    return Admin(str(address or DEFAULT_NAMESERVER), security=security)


def _config(context: click.Context) -> Path:
    return Path(context.find_root().params.get("file") or context_file.default_config())
