"""Options for TLS, and how they combine with environment variables and a context."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from batonmq.cli.context_file import SECURITY, Context

if TYPE_CHECKING:
    from batonmq._connection.security import Security

tls_option = click.option(
    "--tls/--no-tls",
    default=None,
    envvar="BATON_TLS",
    help="Use TLS; the default if one of the following options is given.",
)
ca_file_option = click.option(
    "--ca-file",
    envvar="BATON_CA_FILE",
    metavar="FILE",
    help="PEM file of the trusted authorities; by default those of gRPC.",
)
cert_file_option = click.option(
    "--cert-file", envvar="BATON_CERT_FILE", metavar="FILE", help="PEM file of the certificate."
)
key_file_option = click.option(
    "--key-file",
    envvar="BATON_KEY_FILE",
    metavar="FILE",
    help="PEM file of the certificate's key.",
)
server_name_option = click.option(
    "--server-name",
    envvar="BATON_SERVER_NAME",
    metavar="NAME",
    help="Name in the servers' certificates, if it is not the name in their addresses.",
)
token_file_option = click.option(
    "--token-file",
    envvar="BATON_TOKEN_FILE",
    metavar="FILE",
    help="File of the bearer token; BATON_TOKEN may hold the token itself.",
)
TlsOptions = Mapping[str, str | bool | None]
"""Values by the names of `SECURITY`; None if not given."""


def token_of_environment() -> str:
    """Return the token in BATON_TOKEN; empty if there is none.

    There is no option for it, because other users of the machine can read command lines.
    """
    return os.environ.get("BATON_TOKEN", "")  # noqa: TID251  the one variable without an option


def choose_security(given: TlsOptions, token: str, context: Context) -> Security | None:
    """Return what options, variables and context say about TLS; None for a connection without TLS.

    Args:
        given: Values of options and variables; they win over the context.
        token: The token in BATON_TOKEN; it wins over the token file of the context.

    Raises:
        InvalidArgument: the values contradict each other.
    """
    # Imported here: without TLS, and for help pages, the modules are not needed.
    from batonmq._common.secret import Secret  # noqa: PLC0415
    from batonmq._connection.security import Security  # noqa: PLC0415

    known = {name: getattr(context, name) for name in SECURITY}
    if token:
        known["token_file"] = None
    if given["cert_file"] or given["key_file"]:
        known["cert_file"] = known["key_file"] = None
    known |= {name: value for name, value in given.items() if value is not None}
    enabled = known.pop("tls")
    texts = {name: str(value) for name, value in known.items() if value}
    if enabled is None:
        enabled = bool(texts or token)
    if not enabled:  # a token is never sent over a connection without TLS
        return None
    return Security(**texts, token=Secret(token) if token else None)
