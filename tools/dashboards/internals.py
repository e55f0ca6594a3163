"""The dashboards of what goes on inside: hand-overs, storage and its copies, Spark."""

from __future__ import annotations

from tools.dashboards.panels import (
    BROKERS,
    IN_CLUSTER,
    REPLICATION,
    STATUS,
    WHY,
    Dashboard,
    Panel,
    or_zero,
    percentiles,
    rate,
)

LOCKS = Dashboard(
    "baton-locks",
    "BatonMQ: Locks & hand-over",
    {
        "Hand-overs": (
            Panel(
                "How long a hand-over takes, by phase",
                "baton top",
                percentiles("baton_lockmgr_handover_seconds", "phase"),
                "s",
                "Fence at offsets, write to etcd, and all of it.",
            ),
            Panel(
                "Queues granted, by kind",
                "baton lock list",
                {"{{kind}}": rate("baton_lockmgr_grants_total", "kind")},
                "cps",
            ),
            Panel(
                "Queues denied, by reason",
                "baton lock show GROUP TOPIC BROKER QUEUE",
                {"{{reason}}": or_zero(rate("baton_lockmgr_denials_total", "reason"))},
                "cps",
            ),
            Panel(
                "Messages that come again, by cause",
                "baton message trace ID",
                {
                    "{{cause}}": "sum by (cause) "
                    f"(increase(baton_offsets_duplicates_total{{{IN_CLUSTER}}}[1h]))"
                },
                meaning="In an hour. CLOSED_OR_DRAINED, a hand-over in good order, stays at 0.",
            ),
        ),
        "Against their will": (
            Panel(
                "Calls under tokens that are not in force",
                "baton lock show GROUP TOPIC BROKER QUEUE",
                {"{{op}} {{why}}": or_zero(rate("baton_offsets_fenced_total", "op, why"))},
                "cps",
            ),
            Panel(
                "Queues taken",
                "baton lock list",
                {
                    "lease ran out": rate("baton_lockmgr_steals_total", "cluster"),
                    "by an operator": rate("baton_lockmgr_forced_total", "cluster"),
                    "for a new subscription": rate("baton_lockmgr_cleared_total", "cluster"),
                },
                "cps",
            ),
            Panel(
                "Members that went without a word",
                "baton group members GROUP",
                {
                    "connection broke": rate("baton_nameserver_broken_sessions_total", "cluster"),
                    "all": rate("baton_nameserver_expiries_total", "cluster"),
                },
                "cps",
            ),
            Panel(
                "Heartbeats refused, by reason",
                "baton group describe GROUP",
                {"{{reason}}": or_zero(rate("baton_nameserver_rejections_total", "reason"))},
                "cps",
            ),
        ),
        "The lock manager": (
            Panel(
                "Locks, by state",
                "baton lock list",
                {"{{state}}": f"sum by (state) (baton_lockmgr_entries{{{IN_CLUSTER}}})"},
            ),
            Panel(
                "Term",
                STATUS,
                {"{{node_id}}": f"baton_lockmgr_term{{{IN_CLUSTER}}}"},
                meaning="0 for a standby.",
            ),
            Panel(
                "Keep-alives",
                "baton lock list",
                {"{{node_id}}": rate("baton_lockmgr_keep_alives_total", "node_id")},
                "cps",
            ),
            Panel(
                "Groups whose subscription is being changed",
                "baton group list",
                {
                    "draining": f"max(baton_nameserver_draining_groups{{{IN_CLUSTER}}})",
                    "differing": f"max(baton_nameserver_differing_members{{{IN_CLUSTER}}})",
                },
            ),
        ),
    },
    ("cluster",),
)

STORAGE = Dashboard(
    "baton-storage",
    "BatonMQ: Storage & replication",
    {
        "Log": (
            Panel(
                "How long a sync of the log takes",
                BROKERS,
                percentiles("baton_storage_fsync_seconds", "node_id"),
                "s",
            ),
            Panel(
                "Messages stored, by node",
                BROKERS,
                {"{{node_id}}": rate("baton_storage_appended_messages_total", "node_id")},
                "cps",
            ),
            Panel(
                "Batches refused, by reason",
                BROKERS,
                {"{{reason}}": or_zero(rate("baton_storage_refused_batches_total", "reason"))},
                "cps",
            ),
            Panel(
                "Pulls that wait for a message",
                BROKERS,
                {"{{node_id}}": f"baton_storage_parked_pulls{{{IN_CLUSTER}}}"},
            ),
            Panel(
                "Messages for later: how late they come",
                BROKERS,
                {
                    "p99": "histogram_quantile(0.99, sum by (le) "
                    f"(increase(baton_storage_scheduled_lateness_seconds_bucket{{{IN_CLUSTER}}}[1h])))"
                },
                "s",
            ),
            Panel(
                "Damage found",
                "baton fsck DIR",
                {"{{node_id}}": f"baton_storage_damaged_batches_total{{{IN_CLUSTER}}}"},
            ),
        ),
        "Disk": (
            Panel(
                "Disk in use",
                BROKERS,
                {"{{node_id}}": f"baton_storage_disk_used_ratio{{{IN_CLUSTER}}}"},
                "percentunit",
            ),
            Panel(
                "Time until it is full",
                BROKERS,
                {"{{node_id}}": f"baton_storage_disk_seconds_until_full{{{IN_CLUSTER}}}"},
                "s",
                "Infinite if that is not in sight.",
            ),
            Panel(
                "Segments that retention removed, in an hour",
                BROKERS,
                {
                    "{{node_id}}": "sum by (node_id) "
                    f"(increase(baton_storage_removed_segments_total{{{IN_CLUSTER}}}[1h]))"
                },
            ),
        ),
        "Copies": (
            Panel(
                "Members in sync, of those there should be",
                REPLICATION,
                {
                    "storage {{node_id}}": f"(baton_storage_in_sync_replicas{{{IN_CLUSTER}}} > 0) "
                    f"/ baton_storage_replicas{{{IN_CLUSTER}}}",
                    "offsets {{node_id}}": f"(baton_offsets_in_sync_replicas{{{IN_CLUSTER}}} > 0) "
                    f"/ baton_offsets_replicas{{{IN_CLUSTER}}}",
                },
                "percentunit",
            ),
            Panel(
                "How far a follower is behind",
                REPLICATION,
                {"{{replica}}": f"baton_storage_replica_lag_bytes{{{IN_CLUSTER}}}"},
                "bytes",
            ),
            Panel(
                "For how long a follower has been behind",
                REPLICATION,
                {"{{replica}}": f"baton_storage_replica_lag_seconds{{{IN_CLUSTER}}}"},
                "s",
            ),
            Panel(
                "How many changes a follower of offsets lacks",
                REPLICATION,
                {"{{replica}}": f"baton_offsets_replica_lag_changes{{{IN_CLUSTER}}}"},
            ),
            Panel(
                "Who leads",
                REPLICATION,
                {"storage {{node_id}}": f"baton_storage_leader{{{IN_CLUSTER}}}"},
                meaning="Of sets with several nodes.",
            ),
            Panel(
                "Followers that can't follow",
                REPLICATION,
                {
                    "storage": f"sum(baton_storage_replica_stuck{{{IN_CLUSTER}}})",
                    "offsets": f"sum(baton_offsets_replica_stuck{{{IN_CLUSTER}}})",
                },
            ),
        ),
        "Progress": (
            Panel(
                "How long a durable write of offsets takes",
                "baton group describe GROUP",
                percentiles("baton_offsets_durable_write_seconds", "node_id"),
                "s",
            ),
            Panel(
                "Acknowledgements, by outcome",
                "baton group describe GROUP",
                {"{{op}} {{outcome}}": rate("baton_offsets_commits_total", "op, outcome")},
                "cps",
            ),
            Panel(
                "Deliveries that could not be recorded, by reason",
                WHY,
                {
                    "{{reason}}": or_zero(
                        rate("baton_storage_unrecorded_deliveries_total", "reason")
                    )
                },
                "cps",
            ),
            Panel(
                "Acks out of order: part of the window that is used",
                WHY,
                {"{{node_id}}": f"baton_offsets_ack_window_used_ratio{{{IN_CLUSTER}}}"},
                "percentunit",
            ),
        ),
    },
    ("cluster",),
)

_READ = "baton topic stats BATON_SYS_METRICS"


def _of_query(name: str, unit: str = "short", title: str = "", meaning: str = "") -> Panel:
    return Panel(title, _READ, {"{{query}}": f"baton_spark_{name}{{{IN_CLUSTER}}}"}, unit, meaning)


SPARK = Dashboard(
    "baton-spark",
    "BatonMQ: Spark",
    {
        "Do they run?": (
            Panel(
                "Queries that run",
                _READ,
                {"{{query}}": f"max by (query) (baton_spark_running{{{IN_CLUSTER}}})"},
                single=True,
            ),
            Panel(
                "Since the last micro-batch",
                _READ,
                {"{{query}}": f"time() - baton_spark_progress_time_seconds{{{IN_CLUSTER}}}"},
                "s",
            ),
            Panel(
                "Alerts that fire, by rule",
                "baton consume BATON_SYS_ALERTS --group GROUP",
                {"{{rule}}": or_zero(f"sum by (rule) (baton_alert{{{IN_CLUSTER}}})")},
            ),
        ),
        "Do they keep up?": (
            _of_query(
                "backlog",
                title="What is there and not read yet",
                meaning="Messages of a topic, commits of a table.",
            ),
            _of_query("batch_duration_seconds", "s", "How long a micro-batch takes"),
            _of_query("input_rows_per_second", "cps", "Rows that come"),
            _of_query("processed_rows_per_second", "cps", "Rows that are worked on"),
        ),
        "What they remember": (
            _of_query("state_rows", title="Rows that are remembered"),
            _of_query("state_bytes", "bytes", "Memory for them"),
            _of_query("late_rows", title="Rows that came too late"),
        ),
    },
    ("cluster",),
)
