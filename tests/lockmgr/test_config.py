"""Goal: settings under which no owner could work are rejected at the start.

Method: settings loaded from a given environment.
"""

from __future__ import annotations

import pytest

from batonmq._core.owner_lease import DEADLINE_MARGIN_MS
from batonmq._process.config import ConfigError, load
from batonmq_server.lockmgr.config import CLIENT_MARGIN_MS, LockmgrSettings
from batonmq_server.lockmgr.core.lock_entry import DecisionProfile, LockPolicy


def settings(**values: str) -> LockmgrSettings:
    env = {f"BATON_LOCKMGR_{name.upper()}": value for name, value in values.items()}
    return load(LockmgrSettings, "BATON_LOCKMGR", env)


def test_default_times_are_those_of_the_protocol() -> None:
    assert settings().policy() == LockPolicy()


@pytest.mark.parametrize("lease_ms", ["-1", "0", "1000", "3000"])
def test_lease_that_leaves_its_owner_no_time_is_rejected(lease_ms: str) -> None:
    with pytest.raises(ConfigError, match=r"lock_lease_ms must be more than 3000"):
        settings(lock_lease_ms=lease_ms)
    assert settings(lock_lease_ms="3001").policy().lease_ms == 3_001


def test_client_margin_is_that_of_the_consumer() -> None:
    assert CLIENT_MARGIN_MS == DEADLINE_MARGIN_MS


def test_unknown_profile_is_rejected() -> None:
    assert settings(profile="defibus").policy().profile is DecisionProfile.DEFIBUS
    with pytest.raises(ConfigError, match="BATON_LOCKMGR_PROFILE"):
        settings(profile="rocketmq")
