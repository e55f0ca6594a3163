"""Goal: a Delta table has the rows of each write once, and others can read it.

Method: files and commits made as tasks and the driver make them; tables are read by deltalake and
by Spark.
"""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from pathlib import Path
from time import tzset  # noqa: TID251  sets the zone, reads no clock

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from batonspark.bronze import DATED
from batonspark.decode import MESSAGES
from batonspark.delta_files import DeltaTarget, write_files
from batonspark.options import BadOption
from batonspark.sink_delta import commit_files, read_delta
from tests.spark.metric_events import NOON, batch, event

SCHEMA = pa.schema(
    [
        ("n", pa.int64()),
        ("time", pa.timestamp("us", tz="UTC")),
        ("attrs", pa.map_(pa.string(), pa.string())),
        ("date", pa.date32()),
    ]
)


def target(path: Path, *partition_by: str, schema: pa.Schema = SCHEMA) -> DeltaTarget:
    return DeltaTarget(str(path / "table"), schema, partition_by, "zstd")


def rows(begin: int, end: int, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [
            {
                "n": n,
                "time": datetime(2026, 1, 1 + n % 3, 12, 0, 0, n, tzinfo=UTC),
                "attrs": [("a", str(n))],
                "date": date(2026, 1, 1 + n % 3) if n % 10 else None,
                "new": "x",
            }
            for n in range(begin, end)
        ],
        schema,
    )


def numbers_in(target: DeltaTarget) -> list[int]:
    files = deltalake.DeltaTable(target.path).file_uris()
    return sorted(n for file in files for n in pq.read_table(file, columns=["n"])["n"].to_pylist())


def test_view_metrics_writes_the_events_of_messages(tmp_path: Path) -> None:
    messages = pa.RecordBatch.from_pylist(
        [
            {
                "topic": "BATON_SYS_METRICS",
                "broker": "broker-0",
                "queue_id": 0,
                "offset": 9,
                "body": batch([event("member_seen", NOON)] * 3, 1).SerializeToString(),
                "store_time": NOON * 1_000,
            }
        ],
        MESSAGES,
    )
    where = DeltaTarget(str(tmp_path / "table"), DATED, ("date",), "zstd", opened=True)
    (file,) = write_files(where, iter([messages]))
    commit_files(where, [file], None)
    table = deltalake.DeltaTable(where.path)
    assert json.loads(file.stats)["numRecords"] == 3
    assert table.schema().to_arrow().names == DATED.names
    assert file.partition == {"date": datetime.fromtimestamp(NOON / 1_000, UTC).date().isoformat()}


def test_repeated_transaction_changes_nothing(tmp_path: Path) -> None:
    where = target(tmp_path, "date")
    first = write_files(where, iter([rows(0, 50), rows(50, 100)]))
    assert commit_files(where, first, ("query", 0))
    for number in (0, 0):
        again = write_files(where, iter([rows(0, 100)]))
        assert not commit_files(where, again, ("query", number))
    assert commit_files(where, write_files(where, iter([rows(100, 120)])), ("query", 1))
    assert not commit_files(where, write_files(where, iter([rows(0, 100)])), ("query", 0))
    assert commit_files(where, write_files(where, iter([rows(120, 130)])), ("other", 0))
    assert numbers_in(where) == list(range(130))
    table = deltalake.DeltaTable(where.path)
    assert len(list(Path(where.path).rglob("*.parquet"))) == len(table.file_uris())
    assert table.version() == 3


def test_files_are_partitioned_and_have_column_bounds(tmp_path: Path) -> None:
    where = target(tmp_path, "date")
    commit_files(where, write_files(where, iter([rows(0, 100)])), None)
    table = deltalake.DeltaTable(where.path)
    (uri,) = table.file_uris(file_pruning_predicate="date = '2026-01-02'")
    expected = [n for n in range(100) if n % 3 == 1 and n % 10]
    assert pq.read_table(uri)["n"].to_pylist() == expected
    log = Path(where.path) / "_delta_log" / f"{1:020}.json"
    adds = [json.loads(line)["add"] for line in log.read_text().splitlines() if '"add"' in line]
    assert len(adds) == 4
    assert sum(json.loads(add["stats"])["numRecords"] for add in adds) == 100
    stats = json.loads(next(a["stats"] for a in adds if "2026-01-02" in a["path"]))
    assert (stats["minValues"]["n"], stats["maxValues"]["n"]) == (expected[0], expected[-1])
    assert stats["minValues"]["time"].startswith("2026-01-02T12:00:00.000")
    assert stats["maxValues"]["time"] == "2026-01-02T12:00:00.001Z"


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Tokyo"])
def test_bounds_of_times_without_a_zone_are_those_times(
    zone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    tzset()
    try:
        schema = pa.schema([("n", pa.int64()), ("at", pa.timestamp("us"))])
        where = target(tmp_path, schema=schema)
        row = {"n": 1, "at": datetime.fromisoformat("2026-07-01T12:00:00")}
        batch = pa.RecordBatch.from_pylist([row], schema)
        (file,) = write_files(where, iter([batch]))
    finally:
        monkeypatch.undo()
        tzset()
    commit_files(where, [file], None)
    table = deltalake.DeltaTable(where.path)
    for condition in ("at < '2026-07-01T12:00:01'", "at > '2026-07-01T11:59:59'"):
        assert len(table.file_uris(file_pruning_predicate=condition)) == 1
    for condition in ("at < '2026-07-01T11:00:00'", "at > '2026-07-01T13:00:00'"):
        assert table.file_uris(file_pruning_predicate=condition) == []


def test_partition_values_may_have_any_character(tmp_path: Path) -> None:
    schema = pa.schema([("n", pa.int64()), ("group", pa.string())])
    where = target(tmp_path, "group", schema=schema)
    names = ["a b", "%25", "x/y", "ü=1", None]
    batch = pa.RecordBatch.from_pylist([{"n": n, "group": g} for n, g in enumerate(names)], schema)
    commit_files(where, write_files(where, iter([batch])), None)
    assert numbers_in(where) == [0, 1, 2, 3, 4]
    table = deltalake.DeltaTable(where.path)
    for n, name in enumerate(names[:-1]):
        (uri,) = table.file_uris(file_pruning_predicate=[("group", "=", name)])
        assert pq.read_table(uri, columns=["n"], partitioning=None)["n"].to_pylist() == [n]


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    where = target(tmp_path, "date")

    def failing() -> object:
        yield rows(0, 10)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_files(where, failing())  # type: ignore[arg-type]
    assert list(Path(where.path).rglob("*.parquet")) == []


def test_new_columns_are_added_and_changed_types_rejected(tmp_path: Path) -> None:
    where = target(tmp_path)
    commit_files(where, write_files(where, iter([rows(0, 10)])), None)
    more = SCHEMA.append(pa.field("new", pa.string()))
    wider = target(tmp_path, schema=more)
    commit_files(wider, write_files(wider, iter([rows(10, 20, more)])), None)
    assert [each.name for each in deltalake.DeltaTable(where.path).schema().fields] == more.names
    other = target(tmp_path, schema=pa.schema([("n", pa.string())]))
    with pytest.raises(BadOption, match="column n of the table is"):
        commit_files(other, [], None)
    with pytest.raises(BadOption, match="partitioned by"):
        commit_files(target(tmp_path, "date"), [], None)


@pytest.mark.spark
def test_spark_writes_and_reads_tables(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "table")
    numbers = spark.range(0, 100, numPartitions=3).selectExpr(
        "id",
        "date_add(date'2026-01-30', cast(id % 3 as int)) as date",
        "map('a', cast(null as string)) as attrs",
    )
    options = {"path": path, "partitionBy": "date"}
    writer = numbers.write.format("batondelta").options(**options)
    writer.mode("append").options(txnAppId="job", txnVersion="1").save()
    writer.mode("append").options(txnAppId="job", txnVersion="1").save()
    table = read_delta(spark, path)
    assert table.schema.simpleString() == numbers.schema.simpleString()
    assert sorted(row.id for row in table.collect()) == list(range(100))
    some = read_delta(spark, path, prune="date = '2026-01-31'")
    assert sorted(row.id for row in some.collect()) == list(range(1, 100, 3))
    numbers.where("id < 5").write.format("batondelta").options(**options).mode("overwrite").save()
    assert read_delta(spark, path).count() == 5
    before = deltalake.DeltaTable(path).version() - 1
    assert read_delta(spark, path, version=before).count() == 100


@pytest.mark.spark
def test_unknown_options_are_errors(spark: SparkSession, tmp_path: Path) -> None:
    options = {"path": str(tmp_path), "partitionedBy": "id"}
    with pytest.raises(PySparkException, match="unknown option partitionedby"):
        spark.range(1).write.format("batondelta").options(**options).mode("append").save()


@pytest.mark.parametrize("micros", [10**18, 253_402_300_799_999_999, -(10**18)])
def test_times_out_of_range_are_written_without_bounds(tmp_path: Path, micros: int) -> None:
    schema = pa.schema([("time", pa.timestamp("us", tz="UTC")), ("n", pa.int64())])
    times = pa.array([micros, 0]).cast(schema.field("time").type)
    where = target(tmp_path, schema=schema)
    batch = pa.RecordBatch.from_arrays([times, pa.array([1, 2])], schema=schema)
    (file,) = write_files(where, iter([batch]))
    stats = json.loads(file.stats)
    assert (stats["numRecords"], stats["minValues"], stats["maxValues"]) == (2, {"n": 1}, {"n": 2})
