"""SAVED RECORDS: what was put is there after any end, and what was removed is not."""

import errno
import os
import sqlite3
import stat
import time
from pathlib import Path

import pytest
import start_llm as s
from server_fixture import wait_until


def open_records(path: Path, ttl_seconds: float = 0.0) -> s.RecordFile:
    records = s.RecordFile()
    records.open(path, ttl_seconds=ttl_seconds)
    return records


def record(text: str, *parts: bytes, age: float = 0.0) -> s.SavedRecord:
    return s.SavedRecord("session", time.monotonic() - age, {"text": text}, parts)


def put(records: s.TenantRecords, key: bytes, *values: s.SavedRecord) -> None:
    records.put("kind", key, lambda: list(values))


def loaded(path: Path, tenant: str = "") -> dict[bytes, list[str]]:
    """The texts of all records by key, as the next server finds them."""
    found: dict[bytes, list[str]] = {}
    for key, saved in open_records(path).of_tenant(tenant).load("kind"):
        found.setdefault(key, []).append(saved.value["text"])
    return found


def test_records_are_there_for_the_next_server(tmp_path: Path) -> None:
    path = tmp_path / "records"
    file = open_records(path)
    records = file.of_tenant("")
    put(records, b"a", record("one"), record("two"))
    put(records, b"b", record("three"))
    put(records, b"b", record("four"))
    put(records, b"c", record("five"))
    records.remove("kind", b"c")
    assert file.flush(10.0)

    assert loaded(path) == {b"a": ["one", "two"], b"b": ["four"]}


def test_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    path = tmp_path / "records"
    file = open_records(path)
    put(file.of_tenant("x"), b"a", record("of x"))
    put(file.of_tenant("y"), b"a", record("of y"))
    assert file.flush(10.0)

    assert loaded(path, "x") == {b"a": ["of x"]}
    assert loaded(path) == {}


def test_part_is_stored_once_and_is_one_object_when_loaded(tmp_path: Path) -> None:
    path = tmp_path / "records"
    file = open_records(path)
    large = b"x" * 1_000_000
    for number in range(5):
        put(file.of_tenant(""), bytes([number]), record("of five", large, b"own"))
    assert file.flush(10.0)

    assert path.stat().st_size + (tmp_path / "records-wal").stat().st_size < 3_000_000
    parts = [saved.parts for _, saved in open_records(path).of_tenant("").load("kind")]
    assert [bytes(own) for _, own in parts] == [b"own"] * 5
    assert len({id(shared) for shared, _ in parts}) == 1


def test_age_survives_and_decides_the_order(tmp_path: Path) -> None:
    path = tmp_path / "records"
    file = open_records(path)
    records = file.of_tenant("")
    put(records, b"new", record("new", age=10.0))
    put(records, b"old", record("old", age=100.0))
    assert file.flush(10.0)

    found = open_records(path).of_tenant("").load("kind")

    assert [key for key, _ in found] == [b"old", b"new"]
    ages = [time.monotonic() - saved.last_used for _, saved in found]
    assert ages == pytest.approx([100.0, 10.0], abs=60.0)
    assert 85.0 < ages[0] - ages[1] < 95.0


def test_what_was_not_used_for_too_long_is_dropped_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "records"
    file = open_records(path)
    records = file.of_tenant("")
    put(records, b"new", record("new", b"part of the new"))
    put(records, b"old", record("old", b"part of the old", age=1e6))
    put(records, b"touched", record("touched", age=1e6))
    records.touch("kind", b"touched")
    assert file.flush(10.0)

    again = open_records(path, ttl_seconds=1e5)

    assert loaded(path) == {b"new": ["new"], b"touched": ["touched"]}
    again.of_tenant("").forget_parts()
    assert again.flush(10.0)
    assert b"part of the old" not in path.read_bytes()


def test_forgotten_text_is_nowhere_in_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "records"
    file = open_records(path)
    records = file.of_tenant("")
    secret = b"a secret that somebody has told"
    put(records, b"a", record("a secret value", secret), record("other"))
    put(records, b"b", record("stays", b"a part that stays"))
    assert file.flush(10.0)
    assert secret in b"".join(p.read_bytes() for p in tmp_path.iterdir())

    records.remove("kind", b"a")
    records.forget_parts()
    assert file.flush(10.0)

    left = b"".join(p.read_bytes() for p in tmp_path.iterdir())
    assert secret not in left
    assert b"a secret value" not in left
    assert b"a part that stays" in left


def test_parts_do_not_pile_up_while_the_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s, "_CLEAN_AFTER", 20)
    path = tmp_path / "records"
    file = open_records(path)
    for number in range(200):
        put(file.of_tenant(""), b"a", record("text", b"%d" % number * 10_000))
        if number % 10 == 0:
            assert file.flush(10.0)
    assert file.flush(10.0)

    with sqlite3.connect(path) as database:
        ((n_parts,),) = database.execute("SELECT count(*) FROM parts").fetchall()
    assert n_parts < 60


def test_record_that_cannot_be_written_is_left_out_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "records"
    file = open_records(path)
    put(file.of_tenant(""), b"a", s.SavedRecord("s", 0.0, {"text": object()}))
    put(file.of_tenant(""), b"b", record("whole"))
    assert file.flush(10.0)

    assert loaded(path) == {b"b": ["whole"]}
    assert "one is not saved" in caplog.text


def test_damaged_row_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "records"
    file = open_records(path)
    records = file.of_tenant("")
    put(records, b"a", record("whole", b"part one"))
    put(records, b"b", record("value", b"part two"))
    put(records, b"c", record("text"))
    assert file.flush(10.0)
    with sqlite3.connect(path) as database:
        database.execute(
            "UPDATE parts SET data = ? WHERE data = ?", (b"x", b"part two")
        )
        database.execute("UPDATE records SET value = ? WHERE key = ?", (b"{}", b"c"))

    assert loaded(path) == {b"a": ["whole"]}


@pytest.mark.parametrize(
    "damage", ["no database", "cut", "another format", "a page", "a folder"]
)
def test_file_that_cannot_be_read_is_begun_anew(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "records"
    if damage == "a folder":
        path.mkdir()
    else:
        file = open_records(path)
        for number in range(200):
            put(
                file.of_tenant(""),
                bytes([number]),
                record("text", bytes([number]) * 9_999),
            )
        assert file.flush(10.0)
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    if damage == "no database":
        path.write_bytes(b"something else" * 1000)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:5000])
    elif damage == "a page":  # of a part that is longer than a page
        with path.open("r+b") as pages:
            pages.seek(path.stat().st_size // 2 // 4096 * 4096)
            pages.write(b"\xff" * 4096)
    elif damage == "another format":
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA user_version = 99")

    file = open_records(path)
    put(file.of_tenant(""), b"a", record("new"))
    file.flush(10.0)

    assert loaded(path) == ({} if damage == "a folder" else {b"a": ["new"]})


def test_file_that_is_only_locked_or_full_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "records"
    file = open_records(path)
    put(file.of_tenant(""), b"a", record("one"))
    assert file.flush(10.0)

    def refuse(_path: Path) -> sqlite3.Connection:
        error = sqlite3.OperationalError("database is locked")
        error.sqlite_errorcode = sqlite3.SQLITE_BUSY
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(s, "_connect", refuse)
        locked = open_records(path)
        put(locked.of_tenant(""), b"b", record("two"))
        assert not locked.flush(1.0)

    assert loaded(path) == {b"a": ["one"]}


def test_damaged_part_is_mended_by_the_next_record_that_has_it(tmp_path: Path) -> None:
    path = tmp_path / "records"
    file = open_records(path)
    put(file.of_tenant(""), b"a", record("one", b"a part"))
    assert file.flush(10.0)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE parts SET data = ?", (b"damaged",))
    assert loaded(path) == {}

    put(file.of_tenant(""), b"b", record("two", b"a part"))
    assert file.flush(10.0)

    assert loaded(path) == {b"a": ["one"], b"b": ["two"]}


def test_damaged_part_costs_no_other_record_while_others_write(tmp_path: Path) -> None:
    path = tmp_path / "records"
    file = open_records(path)
    records = file.of_tenant("")
    put(records, b"a", record("one", b"part one", age=9.0))
    put(records, b"b", record("two", b"part two", age=5.0))
    put(records, b"c", record("three", b"part three", age=1.0))
    assert file.flush(10.0)
    with sqlite3.connect(path) as database:
        query = "UPDATE parts SET data = ? WHERE data = ?"
        database.execute(query, (b"damaged", b"part two"))

    reading = s._read_records(s._connect(path), "", "kind")
    found = [next(reading)]
    put(file.of_tenant("other"), b"d", record("four"))
    assert file.flush(10.0)
    found += reading

    assert [saved.value["text"] for _, saved in found] == ["one", "three"]


def test_text_without_utf_8_is_saved_or_left_out_alone(tmp_path: Path) -> None:
    path = tmp_path / "records"
    file = open_records(path)
    put(file.of_tenant(""), b"a", record("half \ud83d"))
    put(file.of_tenant(""), b"b", record("whole"))
    assert file.flush(10.0)

    assert loaded(path) == {b"a": ["half \ud83d"], b"b": ["whole"]}


def test_what_cannot_be_saved_now_is_saved_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(s, "_RETRY_SECONDS", 0.01)
    path = tmp_path / "records"
    file = open_records(path)
    records = file.of_tenant("")
    put(records, b"a", record("one"))
    put(records, b"b", record("two"))
    assert file.flush(10.0)
    failures = [sqlite3.OperationalError("database or disk is full")] * 3

    def fail_at_first() -> list[s.SavedRecord]:
        if failures:
            raise failures.pop()
        return [record("three")]

    records.remove("kind", b"a")
    records.put("kind", b"c", fail_at_first)
    wait_until(lambda: not failures)
    put(records, b"d", record("four"))
    wait_until(lambda: not file.failure)

    assert file.flush(10.0)
    assert caplog.text.count("nothing is saved for now") == 1
    assert loaded(path) == {b"b": ["two"], b"c": ["three"], b"d": ["four"]}


def test_file_that_cannot_be_saved_for_long_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or what people have forgotten meanwhile would be there at the next start."""
    monkeypatch.setattr(s, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(s, "_MAX_WAITING_ORDERS", 3)
    path = tmp_path / "records"
    file = open_records(path)
    records = file.of_tenant("")
    put(records, b"a", record("one"))
    assert file.flush(10.0)

    def fail() -> list[s.SavedRecord]:
        raise sqlite3.OperationalError("database or disk is full")

    records.put("kind", b"b", fail)
    for _ in range(4):  # each comes after the failure before it
        records.remove("kind", b"a")
        wait_until(file._orders.empty)
    wait_until(lambda: "is begun anew" in caplog.text)
    put(records, b"c", record("three"))
    wait_until(lambda: not file.failure)

    assert file.flush(10.0)
    assert loaded(path) == {b"c": ["three"]}


def fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be written into any database, as on a full disk; it can be read."""
    connect = sqlite3.connect

    def connect_to_full(*args: object, **fields: object) -> sqlite3.Connection:
        database = connect(*args, **fields)  # type: ignore[call-overload]
        database.execute("PRAGMA query_only = ON")
        return database  # type: ignore[no-any-return]

    monkeypatch.setattr(sqlite3, "connect", connect_to_full)


def test_flush_on_a_full_disk_says_that_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(s, "_RETRY_SECONDS", 0.01)
    path = tmp_path / "records"
    file = open_records(path)
    records = file.of_tenant("")
    put(records, b"a", record("one"))
    assert file.flush(10.0)

    with monkeypatch.context() as patch:
        fill(patch)
        full = open_records(path)
        full.of_tenant("").remove("kind", b"a")

        assert not full.flush(10.0)
        assert full.failure
        assert str(path) in caplog.text
    wait_until(lambda: not full.failure)
    assert full.flush(10.0)
    assert loaded(path) == {}


def test_everything_is_forgotten_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "records"
    put(open_records(path).of_tenant(""), b"a", record("one", b"a secret"))
    file = open_records(path)
    put(file.of_tenant("x"), b"a", record("two", b"a secret"))
    assert file.flush(10.0)
    with monkeypatch.context() as patch:
        fill(patch)
        full = open_records(path)
        put(full.of_tenant(""), b"b", record("waits for the disk"))
        assert not full.flush(10.0)

        full.erase(10.0)

        left = b"".join(p.read_bytes() for p in tmp_path.iterdir())
        assert b"a secret" not in left
    full._retry.set()
    put(full.of_tenant(""), b"c", record("new"))
    wait_until(lambda: not full.failure)
    assert full.flush(10.0)
    assert loaded(path) == {b"c": ["new"]}


def test_what_cannot_be_deleted_is_said_and_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s, "_RETRY_SECONDS", 0.01)
    path = tmp_path / "records"
    file = open_records(path)
    put(file.of_tenant(""), b"a", record("one"))
    assert file.flush(10.0)

    def refuse(_path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(s, "_delete_database", refuse)
        with pytest.raises(OSError, match="Read-only"):
            file.erase(10.0)
        put(file.of_tenant(""), b"b", record("two"))
        assert not file.flush(10.0)
        assert file.failure == "Read-only file system"
    wait_until(lambda: not file.failure)

    assert loaded(path) == {b"b": ["two"]}


def test_folder_that_comes_back_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s, "_RETRY_SECONDS", 0.01)
    folder = tmp_path / "disk"
    folder.mkdir()
    file = open_records(folder / "records")
    put(file.of_tenant(""), b"a", record("one"))
    assert file.flush(10.0)

    folder.rename(tmp_path / "gone")
    put(file.of_tenant(""), b"b", record("two"))
    wait_until(lambda: bool(file.failure))
    with pytest.raises(FileNotFoundError):
        file.erase(10.0)
    put(file.of_tenant(""), b"b", record("two"))
    folder.mkdir()
    wait_until(lambda: not file.failure)

    assert file.flush(10.0)
    assert loaded(folder / "records") == {b"b": ["two"]}


@pytest.mark.parametrize("kind", ["a pipe", "a link to itself"])
def test_what_is_no_file_is_replaced(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "records"
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path)

    file = open_records(path)
    put(file.of_tenant(""), b"a", record("one"))

    assert file.flush(10.0)
    assert loaded(path) == {b"a": ["one"]}


def test_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    file = open_records(tmp_path / "records")
    put(file.of_tenant(""), b"a", record("one"))
    assert file.flush(10.0)

    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()
    }

    assert set(modes.values()) == {0o600}, modes


def test_nothing_is_saved_before_a_file_is_opened() -> None:
    file = s.RecordFile()
    put(file.of_tenant(""), b"a", record("one"))

    assert file.flush(1.0)
    assert file.of_tenant("").load("kind") == []
