"""SAVED RECORDS: what was put is there after any end, and what was removed is not."""

import sqlite3
import stat
import time
from contextlib import suppress
from pathlib import Path

import pytest
import start_llm as s
from server_fixture import MAX_WAIT_SECONDS, wait_until


def open_records(path: Path, ttl_seconds: float = 0.0) -> s.RecordFile:
    records = s.RecordFile()
    records.open(path, ttl_seconds=ttl_seconds)
    return records


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records"


@pytest.fixture
def file(path: Path) -> s.RecordFile:
    return open_records(path)


@pytest.fixture
def records(file: s.RecordFile) -> s.TenantRecords:
    return file.of_tenant("")


def put(records, name, text, *, parent="", age=0.0):
    records.put(
        s.SavedRecord(
            id=name.encode(),
            parent_id=parent.encode(),
            key=b"a key",
            session_id="session",
            last_used=time.monotonic() - age,
            value=text.encode("utf-8", "surrogatepass"),
        )
    )


def update(records, name, *, last_used, session_id=""):
    records.update(
        s.SavedRecord(
            id=name.encode(),
            parent_id=b"",
            key=b"",
            session_id=session_id,
            last_used=last_used,
        )
    )


def loaded(path: Path, tenant: str = "") -> dict[str, str]:
    """The texts of all records by name, in order, as the next server finds them."""
    records = open_records(path).of_tenant(tenant).load()
    return {record.id.decode(): record.value.decode() for record in records}


def test_records_are_there_for_the_next_server(path, file, records):
    put(records, "a", "one")
    put(records, "b", "two", parent="a")
    put(records, "c", "three", parent="a")
    put(records, "d", "four", parent="c")
    records.remove(b"b")
    update(records, "c", session_id="another", last_used=time.monotonic())
    assert file.flush(10.0)

    first, third, fourth = open_records(path).of_tenant("").load()
    assert (first.id, first.parent_id, first.value) == (b"a", b"", b"one")
    assert (first.key, first.session_id) == (b"a key", "session")
    assert (third.id, third.parent_id, third.value) == (b"c", b"a", b"three")
    assert (third.key, third.session_id) == (b"", "another")
    assert (fourth.id, fourth.parent_id, fourth.value) == (b"d", b"c", b"four")


def test_tenants_do_not_see_each_other(path, file):
    put(file.of_tenant("x"), "a", "of x")
    put(file.of_tenant("y"), "b", "of y")
    assert file.flush(10.0)

    assert loaded(path, "x") == {"a": "of x"}
    assert loaded(path) == {}
    assert sorted(file.tenants()) == ["x", "y"]


def test_age_survives(path, file, records):
    put(records, "new", "new", age=10.0)
    put(records, "old", "old", age=100.0)
    put(records, "used", "used", age=100.0)
    update(records, "used", last_used=time.monotonic() - 50.0)
    assert file.flush(10.0)

    found = open_records(path).of_tenant("").load()

    ages = [time.monotonic() - saved.last_used for saved in found]
    assert ages == pytest.approx([10.0, 100.0, 50.0], abs=60.0)
    assert 85.0 < ages[1] - ages[0] < 95.0
    assert 35.0 < ages[2] - ages[0] < 45.0


def test_what_was_not_used_for_too_long_is_dropped_at_the_start(path, file, records):
    """But for parents of what was used, however far up."""
    put(records, "first", "first of the new", age=1e6)
    put(records, "second", "second", parent="first", age=1e6)
    put(records, "new", "new", parent="second")
    put(records, "old", "text of the old", age=1e6)
    put(records, "touched", "touched", age=1e6)
    update(records, "touched", last_used=time.monotonic())
    assert file.flush(10.0)

    again = open_records(path, ttl_seconds=1e5)

    assert [*loaded(path)] == ["first", "second", "new", "touched"]
    assert again.flush(10.0)
    assert b"text of the old" not in path.read_bytes()
    assert b"first of the new" in path.read_bytes()


def test_forgotten_text_is_nowhere_in_the_folder(tmp_path, file, records):
    put(records, "a", "a secret that somebody has told " * 1_000)
    put(records, "b", "stays")
    put(records, "c", "a forgotten name in a row")
    assert file.flush(10.0)
    assert b"a secret" in b"".join(p.read_bytes() for p in tmp_path.iterdir())

    records.remove(b"a")
    update(records, "b", last_used=0.0)
    update(records, "c", last_used=0.0)
    assert file.flush(10.0)

    left = b"".join(p.read_bytes() for p in tmp_path.iterdir())
    assert b"a secret" not in left
    assert b"session" not in left.replace(b"session_id", b"")
    assert b"stays" in left


def test_record_that_cannot_be_written_is_left_out_alone(caplog, path, file):
    put(file.of_tenant("half \ud83d"), "a", "of a tenant without a name")
    put(file.of_tenant(""), "b", "whole")
    assert file.flush(10.0)

    assert loaded(path) == {"b": "whole"}
    assert "one is not saved" in caplog.text


def test_damaged_row_is_left_out(path, file, records):
    put(records, "a", "whole")
    put(records, "b", "damaged")
    assert file.flush(10.0)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE records SET value = ? WHERE id = ?", (b"x", b"b"))

    assert loaded(path) == {"a": "whole"}


DAMAGES = ["no database", "cut", "another version", "a page"]


@pytest.mark.parametrize("damage", [*DAMAGES, "a folder"])
def test_file_that_cannot_be_read_is_begun_anew(damage, caplog, path):
    if damage == "a folder":
        path.mkdir()
    else:
        file = open_records(path)
        for number in range(30):
            put(file.of_tenant(""), str(number), f"text {number}" * 999)
        assert file.flush(10.0)
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    if damage == "no database":
        path.write_bytes(b"something else" * 1000)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:5000])
    elif damage == "a page":  # of a text that is longer than a page
        with path.open("r+b") as pages:
            pages.seek(path.stat().st_size // 2 // 4096 * 4096)
            pages.write(b"\xff" * 4096)
    elif damage == "another version":
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA user_version = 99")

    file = open_records(path)
    put(file.of_tenant(""), "a", "new")
    file.flush(10.0)

    assert loaded(path) == ({} if damage == "a folder" else {"a": "new"})
    assert ("is begun anew" in caplog.text) == (damage != "a folder")


def test_flush_waits_for_who_still_reads_what_was_removed(tmp_path, monkeypatch, path):
    """While somebody reads, SQLite keeps it in its journal."""
    connect = sqlite3.connect
    monkeypatch.setattr(  # else each attempt takes ten seconds
        sqlite3, "connect", lambda path, **_fields: connect(path, timeout=0.01)
    )
    file = open_records(path)
    records = file.of_tenant("")
    put(records, "a", "a secret that somebody has told " * 1_000)
    assert file.flush(MAX_WAIT_SECONDS)
    reader = connect(path)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM records").fetchall()

    records.remove(b"a")
    assert not file.flush(0.5)
    reader.close()
    assert file.flush(MAX_WAIT_SECONDS)

    left = b"".join(p.read_bytes() for p in tmp_path.iterdir())
    assert b"a secret" not in left


def test_file_that_is_only_locked_or_full_is_not_deleted(monkeypatch, path, file):
    put(file.of_tenant(""), "a", "one")
    assert file.flush(10.0)

    def refuse(_path: Path) -> sqlite3.Connection:
        error = sqlite3.OperationalError("database is locked")
        error.sqlite_errorcode = sqlite3.SQLITE_BUSY
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(s, "_connect", refuse)
        locked = open_records(path)
        put(locked.of_tenant(""), "b", "two")
        assert not locked.flush(1.0)

    assert loaded(path) == {"a": "one"}


def fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be written into any database, as on a full disk; it can be read."""
    connect = sqlite3.connect

    def connect_to_full(*args: object, **fields: object) -> sqlite3.Connection:
        database = connect(*args, **fields)  # type: ignore[call-overload]
        database.execute("PRAGMA query_only = ON")
        return database  # type: ignore[no-any-return]

    monkeypatch.setattr(sqlite3, "connect", connect_to_full)


def test_what_cannot_be_saved_now_is_saved_later(monkeypatch, caplog, path, file):
    monkeypatch.setattr(s, "_RETRY_SECONDS", 0.01)
    put(file.of_tenant(""), "a", "one")
    put(file.of_tenant(""), "b", "two")
    assert file.flush(10.0)

    with monkeypatch.context() as patch:
        fill(patch)
        full = open_records(path)
        records = full.of_tenant("")
        records.remove(b"a")
        put(records, "c", "three", parent="b")
        wait_until(lambda: bool(full.failure))
        put(records, "d", "four", parent="c")
        time.sleep(0.2)
    wait_until(lambda: not full.failure)

    assert full.flush(10.0)
    assert caplog.text.count("nothing is saved for now") == 1
    assert loaded(path) == {"b": "two", "c": "three", "d": "four"}


def test_file_that_cannot_be_saved_for_long_is_begun_anew(
    monkeypatch, caplog, path, file
):
    """Or what people have forgotten meanwhile would be there at the next start."""
    monkeypatch.setattr(s, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(s, "_MAX_WAITING_CHANGES", 3)
    put(file.of_tenant(""), "a", "one")
    assert file.flush(10.0)

    with monkeypatch.context() as patch:
        fill(patch)
        full = open_records(path)
        for _ in range(4):
            full.of_tenant("").remove(b"a")
        wait_until(lambda: "has to be begun anew" in caplog.text)
    put(full.of_tenant(""), "c", "three")
    wait_until(lambda: not full.failure)

    assert full.flush(10.0)
    assert loaded(path) == {"c": "three"}


def test_flush_does_not_wait_for_a_file_that_is_erased_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(s, "_SAVE_DELAY_SECONDS", 0.5)
    file = open_records(tmp_path / "records")
    put(file.of_tenant(""), "a", "one")
    assert file.flush(20.0)
    change = file.change

    def change_and_erase(what: s._Change) -> None:
        change(what)
        file.erase()  # before the other thread has seen the change

    monkeypatch.setattr(file, "change", change_and_erase)

    assert file.flush(20.0)
    assert loaded(tmp_path / "records") == {}


def test_everything_is_forgotten_on_a_full_disk(tmp_path, monkeypatch, path):
    monkeypatch.setattr(s, "_RETRY_SECONDS", 0.01)
    put(open_records(path).of_tenant(""), "a", "a secret of one")
    file = open_records(path)
    put(file.of_tenant("x"), "b", "a secret of two")
    assert file.flush(10.0)
    with monkeypatch.context() as patch:
        fill(patch)
        full = open_records(path)
        put(full.of_tenant(""), "b", "waits for the disk")
        assert not full.flush(10.0)

        full.erase()

        for left in tmp_path.iterdir():
            with suppress(FileNotFoundError):  # SQLite's journal comes and goes
                assert b"a secret" not in left.read_bytes()
    put(full.of_tenant(""), "c", "new")
    wait_until(lambda: not full.failure)
    assert full.flush(10.0)
    assert loaded(path) == {"c": "new"}


def test_file_is_deleted_between_two_transactions(tmp_path, monkeypatch):
    monkeypatch.setattr(s, "_SAVE_DELAY_SECONDS", 0.001)
    file = open_records(tmp_path / "records")
    records = file.of_tenant("")
    failures = []

    for number in range(30):
        put(records, f"{number}", "x" * 100_000)
        time.sleep(number % 10 / 1000)
        file.erase()
        failures.append(file.failure)

    put(records, "last", "one")
    assert file.flush(20.0)
    assert set(failures) == {""}
    assert loaded(tmp_path / "records") == {"last": "one"}


def test_file_is_for_its_owner_alone(tmp_path):
    file = open_records(tmp_path / "records")
    put(file.of_tenant(""), "a", "one")
    assert file.flush(10.0)

    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()
    }

    assert set(modes.values()) == {0o600}, modes
