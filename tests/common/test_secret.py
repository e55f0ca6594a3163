"""Goal: a secret is not shown by accident.

Method: every way in which Python turns an object into text.
"""

from __future__ import annotations

import copy
import pickle

import pytest

from batonmq._common.secret import Secret

TOKEN = "a-token-that-must-not-be-shown"


@pytest.mark.parametrize("show", [str, repr, "{}".format, "{!r}".format, "%s".__mod__])
def test_secret_is_hidden_in_every_text(show: object) -> None:
    assert callable(show)
    shown = show(Secret(TOKEN))
    assert TOKEN not in shown
    assert "**********" in shown


def test_empty_secret_is_shown_as_empty() -> None:
    assert (str(Secret("")), repr(Secret(""))) == ("", "Secret('')")


def test_secret_reveals_its_value_on_request() -> None:
    assert Secret(TOKEN).reveal() == TOKEN


def test_secrets_with_equal_values_are_equal() -> None:
    assert Secret(TOKEN) == Secret(TOKEN) != Secret("other")
    assert len({Secret(TOKEN), Secret(TOKEN)}) == 1
    assert Secret(TOKEN) != TOKEN


def test_secret_survives_copies() -> None:
    secret = Secret(TOKEN)
    assert pickle.loads(pickle.dumps(secret)) == copy.deepcopy(secret) == secret
