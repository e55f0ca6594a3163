"""Options that say how to use TLS, and what they mean together with variables and a context."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated

import click
from pydantic import SecretStr

from batonmq._connection.security import Security
from batonmq.cli.context_file import SECURITY, Context

tls_option = click.option(
    "--tls/--no-tls",
    default=None,
    envvar="BATON_TLS",
    help="Talk to services over TLS; by default if one of the next is given.",
)
ca_file_option = click.option(
    "--ca-file",
    metavar="FILE",
    envvar="BATON_CA_FILE",
    help="PEM file of the authorities that are trusted; by default those that gRPC brings.",
)
cert_file_option = click.option(
    "--cert-file",
    metavar="FILE",
    envvar="BATON_CERT_FILE",
    help="PEM file of the certificate to show.",
)
key_file_option = click.option(
    "--key-file", metavar="FILE", envvar="BATON_KEY_FILE", help="PEM file of its key."
)
server_name_option = click.option(
    "--server-name",
    metavar="NAME",
    envvar="BATON_SERVER_NAME",
    help="Name in the servers' certificates, where it is not that of their addresses.",
)
token_file_option = click.option(
    "--token-file",
    metavar="FILE",
    envvar="BATON_TOKEN_FILE",
    help="File of the bearer token; BATON_TOKEN may hold the token itself.",
)
TlsOptions = Mapping[str, str | bool | None]
"""By the names of `SECURITY`; None is not given."""


def token_of_environment() -> str:
    """No option: other people see those of a command."""
    return os.environ.get("BATON_TOKEN", "")  # noqa: TID251  the one variable without an option


def choose_security(given: TlsOptions, token: str, context: Context) -> Security | None:
    """What to use; None for no TLS.

    Args:
        given: By options and variables; these win over the context.
        token: Of the variable, wins over the file of the context.

    Raises:
        InvalidArgument: it does not go together.
    """
    known = {name: getattr(context, name) for name in SECURITY}
    if token:
        known["token_file"] = None
    if given["cert_file"] or given["key_file"]:
        known["cert_file"] = known["key_file"] = None
    known |= {name: value for name, value in given.items() if value is not None}
    wanted = known.pop("tls")
    texts = {name: str(value) for name, value in known.items() if value}
    if wanted is None:
        wanted = bool(texts or token)
    if not wanted:  # without it no token goes anywhere
        return None
    return Security(**texts, token=SecretStr(token) if token else None)
