"""Goal: no committed row is lost when a write reports an error.

Method: commits that report an error although they succeeded, because the checkpoint after them
can't be written; aborts as Spark calls them, in a process that knows only the written files.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake.exceptions import DeltaError
from pyspark.sql import SparkSession
from pyspark.sql.datasource import WriterCommitMessage

from batonspark.delta_files import DeltaTarget, write_files
from batonspark.sink_delta import (
    DeltaStreamWriter,
    DeltaWriter,
    WrittenFiles,
    commit_files,
    read_delta,
)

SCHEMA = pa.schema([("id", pa.int64())])
TRANSACTIONS = [None, ("query", 1)]


@pytest.fixture
def where(tmp_path: Path) -> DeltaTarget:
    """Create a table with one row whose every commit writes a checkpoint."""
    made = DeltaTarget(str(tmp_path / "table"), SCHEMA, (), "zstd")
    configuration = {"delta.checkpointInterval": "1"}
    deltalake.DeltaTable.create(
        made.path, deltalake.Schema.from_arrow(SCHEMA), configuration=configuration
    )
    assert commit_files(made, written(made, 0).files, ("query", 0))
    return made


def written(where: DeltaTarget, *ids: int) -> WrittenFiles:
    """Write files as a task does; return its message to the driver."""
    batch = pa.RecordBatch.from_pylist([{"id": number} for number in ids], SCHEMA)
    return WrittenFiles("query", write_files(where, iter([batch])))


def task_messages(where: DeltaTarget, *ids: int) -> list[WriterCommitMessage | None]:
    """Return the messages of the tasks to the driver; a task without rows sends none."""
    return [written(where, *ids), None]


def numbers_in(where: DeltaTarget) -> list[int]:
    files = deltalake.DeltaTable(where.path).file_uris()
    return sorted(n for file in files for n in pq.read_table(file)["id"].to_pylist())


def file_count(where: DeltaTarget) -> int:
    """Return the number of data files, in the table or not."""
    return len(list(Path(where.path).glob("*.parquet")))


@contextmanager
def no_checkpoints(where: DeltaTarget) -> Iterator[None]:
    """Make checkpoints fail: a folder is at the path of the file that names the last one."""
    log = Path(where.path) / "_delta_log"
    place, aside = log / "_last_checkpoint", log / "aside"
    place.rename(aside)
    (place / "in the way").mkdir(parents=True)
    yield
    shutil.rmtree(place)
    aside.rename(place)


@pytest.mark.parametrize("transaction", TRANSACTIONS)
def test_commit_succeeds_although_a_later_step_fails(
    where: DeltaTarget, transaction: tuple[str, int] | None, caplog: pytest.LogCaptureFixture
) -> None:
    with no_checkpoints(where):
        assert commit_files(where, written(where, 1, 2).files, transaction)
    assert "commit succeeded although it reported an error" in caplog.text
    assert numbers_in(where) == [0, 1, 2]


def test_committed_micro_batch_is_not_repeated(where: DeltaTarget) -> None:
    writer = DeltaStreamWriter(where, "")
    with no_checkpoints(where):
        writer.commit(task_messages(where, 1, 2), 1)
    version = deltalake.DeltaTable(where.path).version()
    writer.commit(task_messages(where, 1, 2), 1)
    table = deltalake.DeltaTable(where.path)
    assert (table.version(), table.transaction_version("query")) == (version, 1)
    assert numbers_in(where) == [0, 1, 2]
    assert file_count(where) == len(table.file_uris())


@pytest.mark.parametrize("transaction", TRANSACTIONS)
def test_abort_keeps_committed_files(
    where: DeltaTarget, transaction: tuple[str, int] | None
) -> None:
    """The process may end between the commit and its report."""
    writer, tasks = DeltaWriter(where, transaction, overwrite=False), task_messages(where, 1)
    writer.commit(tasks)
    writer.abort(tasks)
    assert numbers_in(where) == [0, 1]


def test_abort_keeps_committed_rows_that_were_compacted(
    where: DeltaTarget,
) -> None:
    writer, tasks = DeltaStreamWriter(where, ""), task_messages(where, 1)
    writer.commit(tasks, 1)
    before = deltalake.DeltaTable(where.path)
    deltalake.DeltaTable(where.path).optimize.compact()
    writer.abort(tasks, 1)
    assert numbers_in(where) == [0, 1]
    assert all(Path(uri.removeprefix("file://")).exists() for uri in before.file_uris())


def aborts(where: DeltaTarget) -> None:
    """Call every abort that Spark may call."""
    DeltaWriter(where, None, overwrite=True).abort(task_messages(where, 1))
    DeltaWriter(where, ("other", 0), overwrite=False).abort(task_messages(where, 1))
    DeltaStreamWriter(where, "").abort(task_messages(where, 1), 1)
    DeltaStreamWriter(where, "other").abort([None], 0)


def test_abort_removes_uncommitted_files(where: DeltaTarget) -> None:
    aborts(where)
    assert file_count(where) == 1
    assert numbers_in(where) == [0]


def test_abort_removes_files_of_a_table_that_was_not_created(tmp_path: Path) -> None:
    nowhere = DeltaTarget(str(tmp_path / "table"), SCHEMA, (), "zstd")
    aborts(nowhere)
    assert file_count(nowhere) == 0


def test_abort_that_can_not_read_the_table_removes_nothing(where: DeltaTarget) -> None:
    last = Path(where.path) / "_delta_log" / f"{2:020}.json"
    last.write_text("torn")
    aborts(where)
    assert file_count(where) == 4
    last.unlink()
    assert numbers_in(where) == [0]


def test_failed_commit_is_an_error_and_leaves_no_file(where: DeltaTarget) -> None:
    (Path(where.path) / "_delta_log" / f"{2:020}.json" / "in the way").mkdir(parents=True)
    writer, tasks = DeltaStreamWriter(where, ""), task_messages(where, 1)
    with pytest.raises(DeltaError):
        writer.commit(tasks, 1)
    writer.abort(tasks, 1)
    assert file_count(where) == 1
    assert numbers_in(where) == [0]


@pytest.mark.spark
def test_abort_by_spark_does_not_undo_a_successful_commit(
    spark: SparkSession, where: DeltaTarget
) -> None:
    ids = spark.range(1, 100, numPartitions=2)
    with no_checkpoints(where):
        ids.write.format("batondelta").options(path=where.path).mode("append").save()
    assert sorted(row.id for row in read_delta(spark, where.path).collect()) == list(range(100))
