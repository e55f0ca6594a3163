"""The report of a run as a Markdown page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_HEAD = """# Faults in containers

Written by `make e2e-containers PAGE=1`. The pods of `deploy/k8s/overlays/kind-secure` and the Jobs
of `deploy/k8s/jobs-secure` run as containers on a private Docker network: the commands, settings,
names, users, read-only root file systems, memory limits, volumes and Secrets are those of the
manifests, and so are the readiness probes. All connections use mutual TLS, those to etcd included,
with certificates from `deploy/k8s/scripts/make-ca.sh`, and access control is on. The work of
Kubernetes itself (scheduling, network policies, rolling updates) is not part of this test.

"""
_FAULTS = """
## Faults

A producer sends 200 messages a second, and three members handle them. Meanwhile one pod after the
other is killed and restarted a second later, paused for 40 s, and disconnected from the network for
40 s. Its address may change when it is reconnected. *Ready* and *caught up* are times from the end
of the fault: until the readiness probe succeeds, and until all waiting messages are handled.
*Stalled* is the longest time without an acknowledged, or without a handled, message since the start
of the fault; it is measured once a second.

"""


_RENEWAL = """
## New certificates

Meanwhile every certificate and every key of the services, of etcd, of the demo and of the operator
is replaced, as Kubernetes replaces the files of a Secret. No process is restarted.

"""
_REJECTED = """
## Rejected callers

While messages flow:

"""
_INSECURE = """
## Without TLS

The demo in the pods of `deploy/k8s/overlays/kind`, where every client may make every call.

"""
_DEMO = ("published", "consumed", "lost", "duplicated", "misordered", "handovers")


def page(report: Mapping[str, Any]) -> str:
    """Return the page of a run as Markdown."""
    demo, traffic, insecure = report["demo"], report["traffic"], report["insecure"]
    text = _HEAD
    text += f"{report['containers']} containers; all ready after {report['start_s']} s.\n"
    text += f"\n```\n$ baton cluster status\n{_shown(report['status'])}\n"
    text += f"$ baton access list\n{_shown(report['grants'])}\n```\n\n## The demo\n\n"
    text += _demo(demo) + _FAULTS
    head = ("pod", "fault", "ready, s", "caught up, s", "sending stalled, s", "handling stalled, s")
    keys = ("pod", "fault", "ready_after_s", "flows_after_s", "sent_stalled_s", "handled_stalled_s")
    text += _table(head, [[str(one[key]) for key in keys] for one in report["faults"]])
    text += _RENEWAL + _renewal(report["renewal"]) + _REJECTED
    rejected = [
        [one["caller"], f"`{one['command']}`", one["error"] if one["rejected"] else "**ACCEPTED**"]
        for one in report["rejected_callers"]
    ]
    text += _table(
        ("caller", "command", "error"), [[_cell(text) for text in row] for row in rejected]
    )
    text += "\n## Result for the messages\n\n"
    counts = (
        "sent",
        "unsure",
        "consumed",
        "lost",
        "duplicated",
        "unflagged",
        "misordered",
        "foreign",
    )
    text += _table(counts, [[f"{traffic[key]:,}" for key in counts]])
    text += (
        "\n`sent` messages were acknowledged; `unsure` ones were not, and may be stored. "
        "`duplicated` counts\n"
        "repeated handlings; `unflagged` counts those that were not flagged as redelivered.\n"
        f"Verdict: **{_verdict(traffic['ok'])}**.\n"
    )
    return text + _INSECURE + _demo(insecure["demo"])


def _demo(demo: Mapping[str, Any]) -> str:
    table = _table(_DEMO, [[f"{demo[key]:,}" for key in _DEMO]])
    return f"{table}\nVerdict: **{_verdict(demo['ok'])}**.\n"


def _renewal(found: Mapping[str, Any]) -> str:
    return (
        f"After {found['shown_after_s']} s all {found['pods']} pods presented their new "
        "certificate to new\n"
        f"connections. Sending stalled for at most {found['sent_stalled_s']} s, handling for "
        f"{found['handled_stalled_s']} s.\n"
    )


def _shown(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _verdict(good: bool) -> str:
    return "nothing lost, no unflagged duplicate" if good else "failed"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
