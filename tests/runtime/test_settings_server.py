"""Goal: the call that returns the settings of a process shows each value, and no secret.

Method: convert settings of known names; the values of a running process are checked in
tests/cli/test_whole_cluster.py, the permission in tests/access/test_call_permissions.py.
"""

from __future__ import annotations

import pytest

from batonmq._process.settings_help import SettingHelp
from batonmq_server.runtime.settings_server import MASKED, setting_to_pb


def setting(name: str, value: str | None, default: str | None = None) -> SettingHelp:
    return SettingHelp(name, f"BATON_X_{name.upper()}", "text", default, "", "It is.", value, "env")


@pytest.mark.parametrize(
    "name", ["password", "etcd_password", "client_secret", "token", "api_key", "private_key_pem"]
)
def test_value_of_a_secret_is_masked(name: str) -> None:
    assert setting_to_pb(setting(name, "hunter2")).value == MASKED
    assert setting_to_pb(setting(name, None)).value == ""


@pytest.mark.parametrize(
    "name", ["token_file", "tls_key_file", "token_lease_ms", "port", "keys_max"]
)
def test_other_value_is_shown(name: str) -> None:
    assert setting_to_pb(setting(name, "/run/it")).value == "/run/it"


def test_user_and_password_of_a_url_are_masked() -> None:
    shown = setting_to_pb(setting("jwks_url", "https://me:hunter2@example.org/keys")).value
    assert shown == f"https://{MASKED}@example.org/keys"


def test_default_of_a_required_setting_is_not_set() -> None:
    assert not setting_to_pb(setting("node_id", "a")).HasField("default_value")
    assert setting_to_pb(setting("port", "1", "0")).default_value == "0"
