"""Prometheus metrics of the gateway."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from apache.rocketmq.v2 import definition_pb2 as pb


class GatewayMetrics:
    """Counts answers and messages; gauges of what clients hold."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answers = Counter(
            "baton_gateway_answers",
            "Answers to remote clients, by call, language of the client and code of the contract.",
            ("call", "language", "code"),
            registry=registry,
        )
        self.sent = Counter(
            "baton_gateway_sent_messages", "Messages stored for remote clients.", registry=registry
        )
        self.delivered = Counter(
            "baton_gateway_delivered_messages",
            "Deliveries to remote clients, repeated ones included.",
            registry=registry,
        )
        self.acknowledged = Counter(
            "baton_gateway_acknowledged_messages",
            "Messages that remote clients have acknowledged, durably.",
            registry=registry,
        )
        self.transaction_checks = Counter(
            "baton_gateway_transaction_checks",
            "Checks of transactions that were sent to remote producers.",
            registry=registry,
        )
        self.commands = Counter(
            "baton_gateway_commands",
            "Commands of operators to remote clients, by command and outcome: answered, silent.",
            ("command", "outcome"),
            registry=registry,
        )
        self._gauges = {
            name: Gauge(f"baton_gateway_{name}", text, registry=registry)
            for name, text in (
                (
                    "clients",
                    "Remote clients with a call within 4 times client_timeout_ms.",
                ),
                ("groups", "Consumer groups that the gateway is a member of."),
                ("in_flight_messages", "Messages that remote clients hold."),
                ("waiting_receives", "Receive calls that wait for a message."),
                (
                    "oldest_lease_seconds",
                    "Age of the oldest delivery that a remote client holds, in seconds; 0 if there "
                    "is none.",
                ),
            )
        }

    def answered(self, call: str, language: str, code: int) -> None:
        """Count an answer."""
        known = code in pb.Code.values()
        name = pb.Code.Name(pb.Code.ValueType(code)) if known else str(code)
        self._answers.labels(call, language, name).inc()

    def set_gauges(self, **values: float) -> None:
        """Set gauges, by their names without `baton_gateway_`."""
        for name, value in values.items():
            self._gauges[name].set(value)
