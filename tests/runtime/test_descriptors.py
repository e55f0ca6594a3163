"""Goal: connections never take the descriptors that files and peers need.

Method: the pure division of a limit; a process whose limit is lowered and raised.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from batonmq_server.runtime.descriptors import open_descriptors, share_descriptors


@pytest.mark.parametrize("limit", [64, 256, 1_024, 20_000, 65_536, 1 << 20])
def test_shares_are_within_the_limit_and_half_or_2048_are_reserved(limit: int) -> None:
    shares = share_descriptors(limit)
    assert shares.clients + shares.health + shares.metrics + shares.reserved == limit
    assert shares.reserved == min(limit // 2, 2_048)
    assert 0 < shares.per_address <= shares.clients


def test_settings_bound_the_connections_of_all_clients_and_of_one_address() -> None:
    shares = share_descriptors(65_536, 1_000, 50)
    assert (shares.clients, shares.per_address) == (1_000, 50)
    assert share_descriptors(65_536, 40, 50).per_address == 40


def test_more_connections_than_the_limit_leaves_are_a_bad_setting() -> None:
    with pytest.raises(ValueError, match=r"raise the limit \(ulimit -n\) to at least 3336"):
        share_descriptors(1_024, 1_000)


@pytest.mark.parametrize("told_by_size", [True, False])
def test_each_open_descriptor_is_counted(
    monkeypatch: pytest.MonkeyPatch, *, told_by_size: bool
) -> None:
    if not told_by_size:  # as before Linux 6.2
        monkeypatch.setattr(
            "batonmq_server.runtime.descriptors.os",
            SimpleNamespace(stat=lambda _: SimpleNamespace(st_size=0), listdir=os.listdir),
        )
    before = open_descriptors()
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    try:
        assert open_descriptors() == before + 20
    finally:
        for one in opened:
            os.close(one)


def test_process_raises_its_limit_and_warns_of_a_low_one() -> None:
    script = (
        "import logging, resource; logging.basicConfig(level='WARNING');"
        "from batonmq_server.runtime.descriptors import raise_limit;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 4096)); print(raise_limit());"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert done.stdout.split() == ["4096", "4096"], done.stderr
    assert "limit of open files is low limit=4096 wanted=65536" in done.stderr
