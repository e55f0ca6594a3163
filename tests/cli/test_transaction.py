"""Goal: `baton transaction` lists, shows and ends transactions, and a trace tells of them.

Method: a real `baton up`; transactions that their producer leaves open.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from batonmq._blocking import BlockingProducer
from tests.cli.baton import RunningCluster, baton, up


@pytest.mark.parametrize("arguments", [["list", "--limit", "0"], ["show"], ["commit"]])
def test_wrong_command_line_exits_with_2(arguments: list[str]) -> None:
    assert baton("transaction", *arguments).code == 2


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_open_transactions_are_listed_and_ended_by_hand(tmp_path: Path) -> None:
    with up(tmp_path / "data") as cluster:
        for topic in ("orders", "mails"):
            assert cluster("topic", "create", topic, "--queues", "1").code == 0
        assert "0 open transactions" in cluster("transaction", "list").out
        with BlockingProducer(cluster.nameserver, group="payments") as producer:
            ids = []
            for topic in ("orders", "orders", "mails"):
                with producer.transaction(topic, b"half", keys=["k"]) as tx:
                    tx.leave_open()
                ids.append(tx.transaction_id)
        listed = cluster("transaction", "list", "--format", "json").json
        assert [one["transaction_id"] for one in listed] == ids
        assert [one["topic"] for one in listed] == ["orders", "orders", "mails"]
        assert listed[0]["why_open"].startswith("no producer of group payments")
        (mail,) = cluster("transaction", "list", "--topic", "mails", "--format", "json").json
        assert (mail["transaction_id"], mail["keys"], mail["checks"]) == (ids[2], ["k"], 0)
        other = cluster("transaction", "list", "--group", "none", "--format", "json")
        assert other.json == []
        shown = cluster("transaction", "show", ids[1])
        assert shown.code == 0
        assert ids[1] in shown.out
        _check_trace_of_half_message(cluster, ids[2])

        done = cluster("transaction", "commit", ids[0])
        assert (done.code, done.out) == (0, f"{ids[0]} committed, in queue 0 at offset 0\n")
        assert cluster("transaction", "commit", ids[0]).code == 0
        refused = cluster("transaction", "rollback", ids[0])
        assert refused.code == 1
        assert "TRANSACTION_ENDED" in refused.err
        done = cluster("transaction", "rollback", ids[1])
        assert (done.code, done.out) == (0, f"{ids[1]} rolled back\n")
        gone = cluster("transaction", "show", ids[1])
        assert gone.code == 1
        assert "TRANSACTION_NOT_FOUND" in gone.err

        traced = cluster("message", "trace", "--topic", "orders", "--key", "k")
        assert f"half message of transaction {ids[0]}" in traced.out
        assert "committed" in traced.out
        gone = cluster("message", "trace", ids[1])
        assert (gone.code, "TRANSACTION_NOT_FOUND" in gone.err) == (1, True)


def _check_trace_of_half_message(cluster: RunningCluster, transaction_id: str) -> None:
    by_id = cluster("message", "trace", transaction_id)
    assert "half message of transaction" in by_id.out, by_id
    assert "no consumer sees it: no producer of group payments" in by_id.out
    by_key = cluster("message", "trace", "--topic", "mails", "--key", "k", "--format", "json").json
    assert (by_key["state"], by_key["transaction_id"], by_key["checks"]) == (
        "open", transaction_id, 0,
    )  # fmt: skip
    assert [one["event"] for one in by_key["events"]] == ["begun", "checked", "open"]
