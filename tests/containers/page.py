"""The report of a run as a page for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_HEAD = """# Containers under fire

Written by `make e2e-containers PAGE=1`. The pods of `deploy/k8s/overlays/kind` run as containers on
a private Docker network: the commands, settings, names, users, read-only root file systems, memory
limits and volumes are those of the manifests, and so are the probes that say when a pod is ready.
What Kubernetes itself does (scheduling, network policies, rolling updates) is not part of this.

"""
_STRIKES = """
## Under fire

Messages are sent, 200 a second, and handled by three members, while one pod after the other is
killed and started again a second later, stands still for 40 s, and runs cut off from the network
for 40 s. When it comes back it may have another address. *Ready* and *flows* count from the end of
the strike: until the readiness probe succeeds, and until all that waited is handled. *Stood* is the
longest time without a confirmed, or without a handled, message, from the beginning of the strike;
told once a second.

"""


def page(report: Mapping[str, Any]) -> str:
    """The page."""
    demo, traffic = report["demo"], report["traffic"]
    text = _HEAD
    text += f"{report['containers']} containers; all ready after {report['start_s']} s.\n"
    text += f"\n```\n$ baton cluster status\n{report['status']}\n```\n\n## The demo\n\n"
    keys = ("published", "consumed", "lost", "duplicated", "misordered", "handovers")
    text += _table(keys, [[f"{demo[key]:,}" for key in keys]])
    text += f"\nVerdict: **{_verdict(demo['ok'])}**.\n" + _STRIKES
    head = ("pod", "strike", "ready, s", "flows, s", "sending stood, s", "handling stood, s")
    keys = ("pod", "strike", "ready_after_s", "flows_after_s", "sent_stood_s", "handled_stood_s")
    text += _table(head, [[str(one[key]) for key in keys] for one in report["strikes"]])
    text += "\n## What became of the messages\n\n"
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
        "\n`sent` were confirmed, `unsure` were not and may be stored. `duplicated` counts\n"
        "handlings beyond the first, `unflagged` those of them not marked as redelivered.\n"
        f"Verdict: **{_verdict(traffic['ok'])}**.\n"
    )
    return text


def _verdict(good: bool) -> str:
    return "nothing lost, nothing twice unannounced" if good else "failed"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
