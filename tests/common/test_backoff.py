"""Goal: retry delays grow to a bound, are spread, and respect the server's advice.

Method: properties over any number of failures and any seed.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq._common.backoff import Backoff

BACKOFF = Backoff(first_ms=100, delay_ms_max=5_000)


@given(st.integers(0, 10_000), st.integers(0, 2**32))
def test_delay_is_between_half_and_all_of_its_ceiling(attempt: int, seed: int) -> None:
    delay_ms = BACKOFF.delay_ms(attempt, Random(seed))
    ceiling = min(100 * 2**attempt, 5_000)
    assert ceiling // 2 <= delay_ms <= ceiling


@given(st.integers(0, 100), st.integers(0, 2**32), st.integers(0, 100_000))
def test_delay_is_never_less_than_the_advice(attempt: int, seed: int, advice_ms: int) -> None:
    delay_ms = BACKOFF.delay_ms(attempt, Random(seed), advice_ms)
    assert delay_ms >= advice_ms
    assert delay_ms <= max(advice_ms, 5_000)


@pytest.mark.parametrize("attempt", [0, 3, 50])
def test_delays_of_many_clients_are_spread(attempt: int) -> None:
    random = Random(1)
    assert len({BACKOFF.delay_ms(attempt, random) for _ in range(200)}) > 20
