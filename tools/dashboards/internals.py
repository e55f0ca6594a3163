"""The dashboards of internals: hand-overs, storage and replication, Spark."""

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
                "Hand-over time, by phase",
                "baton top",
                percentiles("baton_lockmgr_handover_seconds", "phase"),
                "s",
                "Phases: the fence at offsets, the write to etcd, the whole hand-over.",
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
                "Redelivered messages, by cause",
                "baton message trace ID",
                {
                    "{{cause}}": "sum by (cause) "
                    f"(increase(baton_offsets_duplicates_total{{{IN_CLUSTER}}}[1h]))"
                },
                meaning="In an hour. CLOSED_OR_DRAINED, a graceful hand-over, stays at 0.",
            ),
        ),
        "Forced changes": (
            Panel(
                "Calls with an invalid token",
                "baton lock show GROUP TOPIC BROKER QUEUE",
                {"{{op}} {{why}}": or_zero(rate("baton_offsets_fenced_total", "op, why"))},
                "cps",
            ),
            Panel(
                "Queues taken from their owner",
                "baton lock list",
                {
                    "lease expired": rate("baton_lockmgr_steals_total", "cluster"),
                    "by an operator": rate("baton_lockmgr_forced_total", "cluster"),
                    "for a new subscription": rate("baton_lockmgr_cleared_total", "cluster"),
                },
                "cps",
            ),
            Panel(
                "Members removed without a Leave",
                "baton group members GROUP",
                {
                    "session broken": rate("baton_nameserver_broken_sessions_total", "cluster"),
                    "lease expired": rate("baton_nameserver_expiries_total", "cluster"),
                },
                "cps",
            ),
            Panel(
                "Rejected heartbeats, by reason",
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
                "Sync time of the log",
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
                "Rejected batches, by reason",
                BROKERS,
                {"{{reason}}": or_zero(rate("baton_storage_refused_batches_total", "reason"))},
                "cps",
            ),
            Panel(
                "Waiting long polls",
                BROKERS,
                {"{{node_id}}": f"baton_storage_waiting_pulls{{{IN_CLUSTER}}}"},
            ),
            Panel(
                "Lateness of scheduled messages",
                BROKERS,
                {
                    "p99": "histogram_quantile(0.99, sum by (le) "
                    f"(increase(baton_storage_scheduled_lateness_seconds_bucket{{{IN_CLUSTER}}}[1h])))"
                },
                "s",
            ),
            Panel(
                "Age of the oldest transaction",
                "baton transaction list",
                {"{{node_id}}": f"baton_storage_oldest_transaction_age_seconds{{{IN_CLUSTER}}}"},
                "s",
            ),
            Panel(
                "Damaged batches found",
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
                "Time until the disk is full",
                BROKERS,
                {"{{node_id}}": f"baton_storage_disk_seconds_until_full{{{IN_CLUSTER}}}"},
                "s",
                "Infinite while the use of the disk does not grow.",
            ),
            Panel(
                "Segments that retention removed, in an hour",
                BROKERS,
                {
                    "{{node_id}}": "sum by (node_id) "
                    f"(increase(baton_storage_removed_segments_total{{{IN_CLUSTER}}}[1h]))"
                },
            ),
            Panel(
                "Bytes in the object store only",
                BROKERS,
                {"{{node_id}}": f"baton_storage_tier_remote_bytes{{{IN_CLUSTER}}}"},
                "bytes",
                "Only with an object store: segments that have left the local disk.",
            ),
            Panel(
                "Oldest segment that waits for the object store",
                BROKERS,
                {"{{node_id}}": f"baton_storage_tier_waiting_seconds{{{IN_CLUSTER}}}"},
                "s",
                "Only with an object store.",
            ),
        ),
        "Replicas": (
            Panel(
                "Share of replicas in sync",
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
                "Follower lag of storage, in bytes",
                REPLICATION,
                {"{{replica}}": f"baton_storage_replica_lag_bytes{{{IN_CLUSTER}}}"},
                "bytes",
            ),
            Panel(
                "Follower lag of storage, in time",
                REPLICATION,
                {"{{replica}}": f"baton_storage_replica_lag_seconds{{{IN_CLUSTER}}}"},
                "s",
            ),
            Panel(
                "Follower lag of offsets, in changes",
                REPLICATION,
                {"{{replica}}": f"baton_offsets_replica_lag_changes{{{IN_CLUSTER}}}"},
            ),
            Panel(
                "Leaders of storage",
                REPLICATION,
                {"storage {{node_id}}": f"baton_storage_leader{{{IN_CLUSTER}}}"},
                meaning="Only replica sets with several nodes.",
            ),
            Panel(
                "Followers with an error",
                REPLICATION,
                {
                    "storage": f"sum(baton_storage_replica_stuck{{{IN_CLUSTER}}})",
                    "offsets": f"sum(baton_offsets_replica_stuck{{{IN_CLUSTER}}})",
                },
            ),
        ),
        "Progress": (
            Panel(
                "Time of a durable write of offsets",
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
                "Unrecorded deliveries, by reason",
                WHY,
                {
                    "{{reason}}": or_zero(
                        rate("baton_storage_unrecorded_deliveries_total", "reason")
                    )
                },
                "cps",
            ),
            Panel(
                "Ack window in use",
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
        "State": (
            Panel(
                "Running queries",
                _READ,
                {"{{query}}": f"max by (query) (baton_spark_running{{{IN_CLUSTER}}})"},
                single=True,
            ),
            Panel(
                "Time since the last micro-batch",
                _READ,
                {"{{query}}": f"time() - baton_spark_progress_time_seconds{{{IN_CLUSTER}}}"},
                "s",
            ),
            Panel(
                "Firing alerts, by rule",
                "baton consume BATON_SYS_ALERTS --group GROUP",
                {"{{rule}}": or_zero(f"sum by (rule) (baton_alert{{{IN_CLUSTER}}})")},
            ),
        ),
        "Throughput": (
            _of_query(
                "backlog",
                title="Backlog",
                meaning="Unread messages of a topic, or unread commits of a table.",
            ),
            _of_query("batch_duration_seconds", "s", "Duration of a micro-batch"),
            _of_query("input_rows_per_second", "cps", "Input rows"),
            _of_query("processed_rows_per_second", "cps", "Processed rows"),
        ),
        "State store": (
            _of_query("state_rows", title="Rows in the state"),
            _of_query("state_bytes", "bytes", "Memory of the state"),
            _of_query("late_rows", title="Rows dropped as too late"),
        ),
    },
    ("cluster",),
)
