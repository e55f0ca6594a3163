"""Settings of the jobs: `BATON_SPARK_<NAME>`, and the file that `BATON_SPARK_CONFIG_FILE` names."""

from __future__ import annotations

from pydantic import Field, TypeAdapter, field_validator

from batonmq._process.config import Settings

PREFIX = "BATON_SPARK"
_TEXTS = TypeAdapter(dict[str, str])


class JobSettings(Settings):
    """What all jobs are told. One that does not need a setting leaves it alone."""

    nameserver: str = "127.0.0.1:9876"
    """Address of a nameserver; several separated by commas."""
    tls: bool = False
    """Whether services are talked to over TLS."""
    tls_ca_file: str = ""
    """Certificates that are trusted; those that gRPC brings if empty."""
    tls_cert_file: str = ""
    """Certificate of the jobs, where services ask for one."""
    tls_key_file: str = ""
    """Its key."""
    tls_server_name: str = ""
    """Name in the services' certificates, where it is not that of their addresses."""
    token_file: str = ""
    """File of the bearer token of the jobs; empty for none. Over TLS only."""
    data_dir: str = Field(".data/spark", min_length=1)
    """Folder of tables and checkpoints, the same on all nodes of Spark. One job owns a query."""
    master: str = "local[*]"
    """Where Spark runs: local[*], k8s://..., or any other that it knows."""
    spark: str = "{}"
    """Spark's own settings, as a JSON object of texts."""
    metrics_host: str = "127.0.0.1"
    """Address the Prometheus endpoint binds to."""
    metrics_port: int = Field(0, ge=0, le=65_535)
    """Port of the Prometheus endpoint; 0 takes a free one."""
    trigger_ms: int = Field(5_000, ge=0)
    """A micro-batch begins so long after the one before, at the earliest."""
    available_now: bool = False
    """Whether the queries end once they have done what is there when they start."""
    messages_per_trigger: int = Field(20_000, ge=1)
    """Messages of BATON_SYS_METRICS in one micro-batch of bronze, each with many events."""
    rows_per_trigger: int = Field(500_000, ge=1)
    """Events in one micro-batch of rollup and of alerts, more or less."""
    fail_on_data_loss: bool = False
    """Whether bronze ends when events are gone before it has read them, or counts them as lost."""
    read_from: str = Field("leader", pattern="^(leader|followers)$")
    """Whether bronze asks followers before the leader."""
    rules_file: str = ""
    """YAML of the alerts' rules; the defaults if empty."""
    watermark_s: int = Field(30, ge=1)
    """Alerts do not look at an event that comes so much later than others of its time."""
    alerts_topic: str = "BATON_SYS_ALERTS"
    """Where alerts are sent to; empty to send none."""
    bronze_retention_days: int = Field(7, ge=1)
    """How long events are kept."""
    rollup_retention_days: int = Field(90, ge=1)
    """How long windows are kept."""
    alerts_retention_days: int = Field(365, ge=1)
    """How long alerts are kept."""
    vacuum_hours: int = Field(24, ge=1)
    """Files that are no longer part of a table are kept so long for those who still read them."""

    @field_validator("spark")
    @classmethod
    def _is_an_object_of_texts(cls, value: str) -> str:
        _TEXTS.validate_json(value)
        return value

    @property
    def spark_config(self) -> dict[str, str]:
        """Spark's own settings."""
        return _TEXTS.validate_json(self.spark)

    def connection_options(self) -> dict[str, str]:
        """Options of `format("baton")` that say how to talk to the cluster."""
        files = {
            "tlsCaFile": self.tls_ca_file,
            "tlsCertFile": self.tls_cert_file,
            "tlsKeyFile": self.tls_key_file,
            "tlsServerName": self.tls_server_name,
            "tokenFile": self.token_file,
        }
        given = {name: value for name, value in files.items() if value}
        return {"nameserver": self.nameserver, "tls": str(self.tls or bool(given)).lower(), **given}
