"""The dashboards for users: the cluster, its topics, its groups."""

from __future__ import annotations

from tools.dashboards.panels import (
    BOTH,
    BROKERS,
    CONSUMERS,
    IN_CLUSTER,
    OF_GROUP,
    OF_TOPIC,
    REPLICATION,
    STATUS,
    WHY,
    Dashboard,
    Panel,
    in_an_hour,
    or_zero,
    percentiles,
    rate,
)

READY = f"rocketmq_consumer_ready_messages{{{CONSUMERS}}}"
IN_FLIGHT = f"rocketmq_consumer_inflight_messages{{{CONSUMERS}}}"


def _of_clients(what: str) -> str:
    return f"sum by (group) (baton_consumer_{what}_messages{{{OF_GROUP}}})"


CLUSTER = Dashboard(
    "baton-cluster",
    "BatonMQ: Cluster",
    {
        "Overview": (
            Panel(
                "Processes up",
                STATUS,
                {"{{node_type}}": f'sum by (node_type) (up{{{IN_CLUSTER}, node_type!=""}})'},
                single=True,
            ),
            Panel(
                "Replica sets without a leader",
                REPLICATION,
                {
                    "sets": "sum(max by (cluster, kind, replica_set) "
                    f"(baton_set_leaders{{{IN_CLUSTER}}}) == bool 0)"
                },
                single=True,
            ),
            Panel(
                "Groups with stuck queues",
                WHY,
                {"groups": or_zero(f"count(count by (group) (baton_queue_stuck{{{IN_CLUSTER}}}))")},
                single=True,
            ),
            Panel(
                "Topics, groups, members",
                "baton group list",
                {
                    "topics": f"max(baton_nameserver_topics{{{IN_CLUSTER}}})",
                    "groups": f"max(baton_nameserver_groups{{{IN_CLUSTER}}})",
                    "members": f"max(baton_nameserver_members{{{IN_CLUSTER}}})",
                },
                single=True,
            ),
        ),
        "Traffic": (
            Panel(
                "Messages stored, by topic",
                "baton top",
                {"{{topic}}": rate("rocketmq_messages_in_total", "topic")},
                "cps",
            ),
            Panel(
                "Messages delivered, by group",
                "baton top",
                {"{{consumer_group}}": rate("rocketmq_messages_out_total", "consumer_group")},
                "cps",
            ),
            Panel(
                "Bytes",
                BROKERS,
                {
                    "stored": rate("rocketmq_throughput_in_total", "cluster"),
                    "delivered": rate("rocketmq_throughput_out_total", "cluster"),
                },
                "Bps",
            ),
            Panel(
                "Append latency",
                "baton bench produce",
                percentiles(
                    "baton_rpc_seconds",
                    where=f'{IN_CLUSTER}, service="StorageService", method="Append"',
                ),
                "s",
            ),
            Panel(
                "Rejected and failed calls, by reason",
                STATUS,
                {
                    "{{reason}}": or_zero(
                        rate("baton_rpc_calls_total", "reason", f'{IN_CLUSTER}, reason!="OK"')
                    )
                },
                "cps",
                "Some are normal, such as HELD: another member owns the queue.",
            ),
        ),
        "Consumers": (
            Panel(
                "Lag in time, by group",
                "baton group lag GROUP",
                {"{{group}}": f"max by (group) (baton_group_lag_seconds{{{IN_CLUSTER}}})"},
                "s",
                "Age of the oldest message that is not handled, read from the log.",
            ),
            Panel(
                "Stuck queues, by reason",
                WHY,
                {"{{reason}}": or_zero(f"sum by (reason) (baton_queue_stuck{{{IN_CLUSTER}}})")},
            ),
            Panel(
                "Members, by group",
                "baton group members GROUP",
                {"{{group}}": f"max by (group) (baton_group_members{{{IN_CLUSTER}}})"},
            ),
            Panel(
                "Redelivered messages, by cause",
                "baton top",
                {"{{cause}}": rate("baton_offsets_duplicates_total", "cause")},
                "cps",
                "CLOSED_OR_DRAINED, a graceful hand-over, stays at 0.",
            ),
        ),
        "Limits": (
            Panel(
                "Disk in use",
                BROKERS,
                {"{{node_id}}": f"baton_storage_disk_used_ratio{{{IN_CLUSTER}}}"},
                "percentunit",
            ),
            Panel(
                "Ack window in use",
                WHY,
                {"used": f"max(baton_offsets_ack_window_used_ratio{{{IN_CLUSTER}}})"},
                "percentunit",
                "Of the fullest queue. At 100 % its deliveries pause.",
            ),
            Panel(
                "Time until certificates expire",
                "baton debug bundle",
                {
                    "{{certificate}}": "min by (certificate) "
                    f"(baton_tls_certificate_expiry_timestamp_seconds{{{IN_CLUSTER}}}) - time()"
                },
                "s",
                "Of each kind, the certificate that expires first. Empty without TLS.",
            ),
        ),
    },
    ("cluster",),
)

TOPIC = Dashboard(
    "baton-topic",
    "BatonMQ: Topic",
    {
        "In": (
            Panel(
                "Messages stored",
                "baton topic stats TOPIC --watch",
                {"{{topic}}": rate("rocketmq_messages_in_total", "topic", OF_TOPIC)},
                "cps",
            ),
            Panel(
                "Bytes stored",
                "baton topic stats TOPIC",
                {"{{topic}}": rate("rocketmq_throughput_in_total", "topic", OF_TOPIC)},
                "Bps",
            ),
            Panel(
                "Average message size",
                "baton topic stats TOPIC",
                {
                    "{{topic}}": f"{rate('rocketmq_throughput_in_total', 'topic', OF_TOPIC)} / "
                    f"({rate('rocketmq_messages_in_total', 'topic', OF_TOPIC)} > 0)"
                },
                "bytes",
            ),
            Panel(
                "Send latency, reported by producers",
                "baton bench produce",
                percentiles("baton_producer_send_seconds", "topic", OF_TOPIC),
                "s",
                "From programs that export the metrics of their clients.",
            ),
            Panel(
                "Failed sends, reported by producers",
                "baton topic describe TOPIC",
                {
                    "{{reason}}": or_zero(
                        rate("baton_producer_failed_messages_total", "reason", OF_TOPIC)
                    )
                },
                "cps",
            ),
        ),
        "Out": (
            Panel(
                "Messages delivered, by group",
                "baton top",
                {
                    "{{consumer_group}} {{topic}}": rate(
                        "rocketmq_messages_out_total", "consumer_group, topic", CONSUMERS
                    )
                },
                "cps",
            ),
            Panel(
                "Bytes delivered, by group",
                "baton top",
                {
                    "{{consumer_group}} {{topic}}": rate(
                        "rocketmq_throughput_out_total", "consumer_group, topic", CONSUMERS
                    )
                },
                "Bps",
            ),
            Panel(
                "Lag in messages, by group",
                "baton group lag GROUP",
                {"{{group}} {{topic}}": f"baton_group_lag_messages{{{BOTH}}}"},
            ),
            Panel(
                "Lag in time, by group",
                "baton group lag GROUP",
                {"{{group}} {{topic}}": f"baton_group_lag_seconds{{{BOTH}}}"},
                "s",
            ),
            Panel(
                "Messages lost to retention, by group",
                "baton group describe GROUP",
                {
                    "{{group}} {{topic}}": or_zero(
                        in_an_hour("baton_storage_lost_messages_total", "group, topic", BOTH)
                    )
                },
                meaning="In the last hour.",
            ),
        ),
    },
    ("cluster", "topic", "group"),
)

GROUP = Dashboard(
    "baton-group",
    "BatonMQ: Group",
    {
        "State": (
            Panel(
                "Members",
                "baton group members GROUP",
                {"{{group}}": f"max by (group) (baton_group_members{{{OF_GROUP}}})"},
                single=True,
            ),
            Panel(
                "Lag in time",
                "baton group lag GROUP",
                {"{{group}} {{topic}}": f"baton_group_lag_seconds{{{BOTH}}}"},
                "s",
            ),
            Panel(
                "Messages ready and in flight",
                "baton group lag GROUP",
                {
                    "{{consumer_group}} {{topic}}: ready": READY,
                    "{{consumer_group}} {{topic}}: in flight": IN_FLIGHT,
                },
            ),
            Panel(
                "Stuck queues, by reason",
                WHY,
                {"{{reason}}": or_zero(f"sum by (reason) (baton_queue_stuck{{{BOTH}}})")},
            ),
        ),
        "Activity": (
            Panel(
                "Messages delivered",
                "baton top",
                {
                    "{{consumer_group}} {{topic}}": rate(
                        "rocketmq_messages_out_total", "consumer_group, topic", CONSUMERS
                    )
                },
                "cps",
            ),
            Panel(
                "Messages handled, reported by consumers",
                "baton top",
                {
                    "{{group}} {{topic}}": rate(
                        "baton_consumer_handled_messages_total", "group, topic", BOTH
                    )
                },
                "cps",
                "From programs that export the metrics of their clients.",
            ),
            Panel(
                "Handler time, reported by consumers",
                "baton top",
                percentiles("baton_consumer_handler_seconds", "group", BOTH),
                "s",
            ),
            Panel(
                "Failed messages, by reason, reported by consumers",
                "baton message trace ID",
                {
                    "{{reason}}": or_zero(
                        rate("baton_consumer_failed_messages_total", "reason", BOTH)
                    )
                },
                "cps",
            ),
            Panel(
                "Messages in the client",
                "baton group describe GROUP",
                {
                    "{{group}}: in handlers": _of_clients("handling"),
                    "{{group}}: buffered": _of_clients("buffered"),
                },
            ),
        ),
        "Problems": (
            Panel(
                "Dead letters, in an hour",
                "baton dlq show GROUP",
                {
                    "{{consumer_group}}": or_zero(
                        "sum by (consumer_group) (increase(rocketmq_send_to_dlq_messages_total"
                        f'{{{IN_CLUSTER}, consumer_group=~"$group"}}[1h]))'
                    )
                },
            ),
            Panel(
                "Queues whose progress went back, in an hour",
                "baton group resets GROUP",
                {
                    "{{group}} {{cause}}": "sum by (group, cause) "
                    f"(increase(baton_group_offset_rewinds_total{{{BOTH}}}[1h]))"
                },
                meaning="The cause unasked, without an operator, stays at 0.",
            ),
            Panel(
                "Messages lost to retention, in an hour",
                "baton group lag GROUP",
                {
                    "{{group}} {{topic}}": or_zero(
                        in_an_hour("baton_storage_lost_messages_total", "group, topic", BOTH)
                    )
                },
            ),
            Panel(
                "Queues acquired and lost, reported by consumers",
                "baton lock list --group GROUP",
                {"{{kind}}": rate("baton_consumer_queue_changes_total", "kind", OF_GROUP)},
                "cps",
            ),
        ),
    },
    ("cluster", "topic", "group"),
)
