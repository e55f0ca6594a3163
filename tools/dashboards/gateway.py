"""The dashboard of the gateways and their remote clients."""

from __future__ import annotations

from tools.dashboards.panels import IN_CLUSTER, Dashboard, Panel, or_zero, rate

_ANSWERS = "baton_gateway_answers_total"
FAILURES = "INTERNAL_.*|HA_NOT_AVAILABLE|PROXY_TIMEOUT|[0-9]+"
"""Codes of calls that fail at the gateway or behind it, and not for what the client asked."""
_FINE = "OK|MESSAGE_NOT_FOUND"
_CLIENTS, _MESSAGES = "baton gateway clients", "baton gateway messages GROUP"


def _gauge(name: str) -> dict[str, str]:
    return {"{{node_id}}": f"baton_gateway_{name}{{{IN_CLUSTER}}}"}


def _with_code(pattern: str) -> str:
    return f'{IN_CLUSTER}, code=~"{pattern}"'


GATEWAY = Dashboard(
    "baton-gateway",
    "BatonMQ: Gateways & remote clients",
    {
        "Clients": (
            Panel("Remote clients", _CLIENTS, _gauge("clients")),
            Panel("Groups of the gateway", "baton group list", _gauge("groups")),
            Panel("Waiting receive calls", _CLIENTS, _gauge("waiting_receives")),
        ),
        "Calls": (
            Panel("Calls, by kind", _CLIENTS, {"{{call}}": rate(_ANSWERS, "call")}, "cps"),
            Panel(
                "Calls, by language of the client",
                _CLIENTS,
                {"{{language}}": rate(_ANSWERS, "language")},
                "cps",
            ),
            Panel(
                "Refused and failed calls, by code",
                _CLIENTS,
                {"{{code}}": or_zero(rate(_ANSWERS, "code", f'{IN_CLUSTER}, code!~"{_FINE}"'))},
                "cps",
            ),
            Panel(
                "Share of calls that fail at the gateway",
                "baton cluster status",
                {
                    "{{call}}": or_zero(
                        f"{rate(_ANSWERS, 'call', _with_code(FAILURES))} / {rate(_ANSWERS, 'call')}"
                    )
                },
                "percentunit",
            ),
            Panel(
                "Calls with an invalid receipt handle",
                _MESSAGES,
                {
                    "{{language}}": or_zero(
                        rate(_ANSWERS, "language", _with_code("INVALID_RECEIPT_HANDLE"))
                    )
                },
                "cps",
                "Calls whose every handle is invalid.",
            ),
        ),
        "Messages": (
            Panel(
                "Messages of remote clients",
                "baton top",
                {
                    "sent": rate("baton_gateway_sent_messages_total", "cluster"),
                    "delivered": rate("baton_gateway_delivered_messages_total", "cluster"),
                    "acknowledged": rate("baton_gateway_acknowledged_messages_total", "cluster"),
                },
                "cps",
            ),
            Panel("Messages in flight at clients", _MESSAGES, _gauge("in_flight_messages")),
            Panel(
                "Age of the oldest delivery at a client",
                _MESSAGES,
                _gauge("oldest_lease_seconds"),
                "s",
            ),
            Panel(
                "Checks of transactions, in an hour",
                "baton transaction list",
                {
                    "{{node_id}}": "sum by (node_id) "
                    f"(increase(baton_gateway_transaction_checks_total{{{IN_CLUSTER}}}[1h]))"
                },
            ),
        ),
    },
    ("cluster",),
)
