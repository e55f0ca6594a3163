"""Fixtures of the simulations."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def only_errors_are_logged() -> Iterator[None]:
    """Hide the thousands of expected warnings of a run; errors go into its trace."""
    names = ("batonmq", "batonmq_server", "asyncio")
    before = [logging.getLogger(name).level for name in names]
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    yield
    for name, level in zip(names, before, strict=True):
        logging.getLogger(name).setLevel(level)
