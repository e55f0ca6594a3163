"""Settings of the jobs: `BATON_SPARK_<NAME>`, and the file that `BATON_SPARK_CONFIG_FILE` names."""

from __future__ import annotations

from pydantic import Field, TypeAdapter, field_validator

from batonmq._process.config import Settings

PREFIX = "BATON_SPARK"
_TEXTS = TypeAdapter(dict[str, str])


class JobSettings(Settings):
    """Settings of every job. A job ignores the settings that it does not need."""

    nameserver: str = "127.0.0.1:9876"
    """Address of a nameserver; several are separated by commas."""
    tls: bool = False
    """Whether the jobs connect to the services over TLS."""
    tls_ca_file: str = ""
    """PEM file of the trusted certificate authorities; empty for those of gRPC."""
    tls_cert_file: str = ""
    """PEM file of the certificate of the jobs, if the services require one."""
    tls_key_file: str = ""
    """PEM file of the private key of `tls_cert_file`."""
    tls_server_name: str = ""
    """Host name in the services' certificates, if it differs from their addresses."""
    token_file: str = ""
    """File of the bearer token of the jobs; empty for none. Requires TLS."""
    data_dir: str = Field(".data/spark", min_length=1)
    """Folder of tables and checkpoints, shared by all nodes of Spark.

    Only one process at a time may run a query.
    """
    master: str = "local[*]"
    """Spark master: local[*], k8s://..., or any other that Spark supports."""
    spark: str = "{}"
    """Settings of Spark, as a JSON object of strings."""
    metrics_host: str = "127.0.0.1"
    """Address the Prometheus endpoint binds to."""
    metrics_port: int = Field(0, ge=0, le=65_535)
    """Port of the Prometheus endpoint; 0 takes a free one."""
    trigger_ms: int = Field(5_000, ge=0)
    """Minimum time between the starts of two micro-batches, in milliseconds."""
    available_now: bool = False
    """Whether the queries end once they have processed the data present at their start."""
    messages_per_trigger: int = Field(20_000, ge=1)
    """Maximum messages of BATON_SYS_METRICS in a micro-batch of bronze; each has many events."""
    rows_per_trigger: int = Field(500_000, ge=1)
    """Approximate maximum of events in a micro-batch of rollup and of alerts."""
    fail_on_data_loss: bool = False
    """Whether bronze fails if retention removed events before it read them; else it counts them."""
    read_from: str = Field("leader", pattern="^(leader|followers)$")
    """Whether bronze reads from the leader, or from followers first."""
    rules_file: str = ""
    """YAML file of the alert rules; empty for the defaults."""
    watermark_s: int = Field(30, ge=1)
    """Alerts ignore an event that is read more than this many seconds later than its peers."""
    alerts_topic: str = "BATON_SYS_ALERTS"
    """Topic to which alerts are sent; empty to send none."""
    bronze_retention_days: int = Field(7, ge=1)
    """Days that events are kept."""
    rollup_retention_days: int = Field(90, ge=1)
    """Days that windows are kept."""
    alerts_retention_days: int = Field(365, ge=1)
    """Days that alerts are kept."""
    vacuum_hours: int = Field(24, ge=1)
    """Hours that files removed from a table are kept for queries that still read them."""
    compact_hours: int = Field(0, ge=0)
    """Hours between two compactions of all tables beside the queries; 0 for none."""

    @field_validator("spark")
    @classmethod
    def _is_an_object_of_texts(cls, value: str) -> str:
        _TEXTS.validate_json(value)
        return value

    @property
    def spark_config(self) -> dict[str, str]:
        """Settings of Spark as a mapping."""
        return _TEXTS.validate_json(self.spark)

    def connection_options(self) -> dict[str, str]:
        """Options of `format("baton")` for the connection to the cluster."""
        files = {
            "tlsCaFile": self.tls_ca_file,
            "tlsCertFile": self.tls_cert_file,
            "tlsKeyFile": self.tls_key_file,
            "tlsServerName": self.tls_server_name,
            "tokenFile": self.token_file,
        }
        given = {name: value for name, value in files.items() if value}
        return {"nameserver": self.nameserver, "tls": str(self.tls or bool(given)).lower(), **given}
