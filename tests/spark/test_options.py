"""Goal: options mean what docs/reference/spark.md says, and invalid options are rejected.

Method: options as users write them. No Spark.
"""

from __future__ import annotations

import pickle
import re

import pytest

from batonmq._connection.security import Security
from batonspark.options import BadOption, FromTime, read_options, write_options

LEAST = {"nameserver": "ns:9876", "topic": "orders"}


def test_defaults() -> None:
    options = read_options(LEAST)
    assert (options.topic, options.view) == ("orders", "messages")
    assert (options.starting, options.ending) == ("earliest", "latest")
    assert (options.rows_max, options.fail_on_data_loss, options.followers) == (0, True, False)
    assert options.connection.security is None
    assert pickle.loads(pickle.dumps(options)) == options


def test_option_names_are_not_case_sensitive() -> None:
    assert read_options(LEAST | {"MAXROWSPERTRIGGER": "7"}).rows_max == 7


def test_view_metrics_has_a_default_topic() -> None:
    assert read_options({"nameserver": "ns:1", "view": "metrics"}).topic == "BATON_SYS_METRICS"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"startingOffsets": "latest"}, "latest"),
        ({"startingOffsets": "timestamp", "startingTimestamp": "5"}, FromTime(5)),
        ({"startingTimestamp": "1970-01-01T00:00:01"}, FromTime(1_000)),
        ({"startingTimestamp": "1970-01-01T01:00:01.5+01:00"}, FromTime(1_500)),
        ({"startingOffsets": '{"a/0": 3, "b/1": "latest"}'}, {"a/0": 3, "b/1": "latest"}),
        ({"startingOffsets": '{"a/0": 3, "topic_id": 9}'}, {"a/0": 3}),
    ],
)
def test_start_positions(given: dict[str, str], meant: object) -> None:
    assert read_options(LEAST | given).starting == meant


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"topics": "x"}, "unknown option topics"),
        ({"topic": ""}, "topic is missing"),
        ({"nameserver": ""}, "nameserver is missing"),
        ({"view": "rows"}, "view has an invalid value: 'rows'"),
        ({"maxRowsPerTrigger": "-1"}, "maxRowsPerTrigger has an invalid value: '-1'"),
        ({"failOnDataLoss": "perhaps"}, "failOnDataLoss has an invalid value: 'perhaps'"),
        ({"startingOffsets": "soon"}, "startingOffsets has an invalid value: 'soon'"),
        ({"startingOffsets": '{"a/0": -1}'}, "must be"),
        ({"startingOffsets": '{"a/0"'}, "must be"),
        ({"startingOffsets": "latest", "startingTimestamp": "5"}, "exclude each other"),
        ({"startingOffsets": "timestamp"}, "startingOffsets has an invalid value: 'timestamp'"),
        ({"startingTimestamp": "yesterday"}, "is not a time"),
        ({"tlsCertFile": "a.pem"}, "must be given together"),
        ({"tls": "false", "tlsCaFile": "a.pem"}, "tls is false"),
    ],
)
def test_invalid_options_are_rejected(given: dict[str, str], text: str) -> None:
    with pytest.raises(BadOption, match=re.escape(text)):
        read_options(LEAST | given)


def test_tls_is_enabled_if_a_tls_file_is_given() -> None:
    assert read_options(LEAST | {"tlsCaFile": "ca.pem"}).connection.security == Security(
        ca_file="ca.pem"
    )
    assert read_options(LEAST | {"tls": "true"}).connection.security == Security()


def test_write_options_are_parsed() -> None:
    options = write_options(LEAST | {"writeId": "nightly", "order": "content", "queryName": "q"})
    assert (options.topic, options.write_id, options.sorted) == ("orders", "nightly", True)
    with pytest.raises(BadOption, match="unknown option startingoffsets"):
        write_options(LEAST | {"startingOffsets": "latest"})
