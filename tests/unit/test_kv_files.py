"""Files of KV: which there are, whose they are, and the folders that they are in."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import start_llm as s

SALT = b"salt"


@pytest.fixture
def open_files(tmp_path):
    """Opens a folder as a server does at its start; the one before has ended."""
    opened = []

    def start(max_bytes=1 << 30):
        while opened:
            opened.pop().close()
        folder = tmp_path / ("a" * 16)
        folder.mkdir(exist_ok=True)
        files = s.KVFiles(
            s._take_lock(folder, patience=10.0),
            max_bytes=max_bytes,
            max_bytes_per_day=1 << 40,
        )
        opened.append(files)
        return files

    yield start
    while opened:
        opened.pop().close()


def key_of(tokens):
    return s.TokenKey(SALT, np.asarray(tokens, np.int32), [])


def write(files, tokens, *, start=0, session="", tenant=""):
    """Write KV [start, end) of these tokens; returns the name of the file."""
    key = key_of(tokens)
    segment = s.Segment(
        name=s.name_segment(key, len(tokens)),
        parent=s.name_segment(key, start),
        start=start,
        end=len(tokens),
        tenant=tenant,
        session=session,
    )
    arrays = {
        "tokens": key.tokens[start:],
        "kv.0": np.zeros(8 * (len(tokens) - start), np.uint8),
    }
    files.write(segment, arrays)
    files.wait(10.0)
    files.update()
    return segment.name


def names_in(files):
    return {path.stem for path in files.folder.glob("*.safetensors")}


def make_unreadable(monkeypatch, *names):
    """As where no more files can be open, or the disk has a fault."""
    safe_open = s.safe_open

    def refuse(path, *args, **kwargs):
        if path.stem in names:
            raise FileNotFoundError(f"No such file or directory: {path}")
        return safe_open(path, *args, **kwargs)

    monkeypatch.setattr(s, "safe_open", refuse)


# -- what could not be read at the start --------------------------------------------------


@pytest.fixture
def unread(open_files, monkeypatch, rng):
    """Files of a prompt, of which the first could not be read at the start.

    That one is of session a, the one that continues it, and another prompt's, of b.
    """
    files = open_files()
    prompt = list(rng.integers(0, 9000, 900))
    parent = write(files, prompt[:600], session="a")
    child = write(files, prompt, start=600, session="b")
    other = write(files, list(rng.integers(0, 9000, 500)), session="b")
    with monkeypatch.context() as patch:
        make_unreadable(patch, parent)
        files = open_files()
    assert names_in(files) == {parent, child, other}
    assert files.find(key_of(prompt)).depth == 0
    return SimpleNamespace(
        files=files, prompt=prompt, parent=parent, child=child, other=other
    )


@pytest.mark.parametrize("is_readable_again", [True, False])
def test_what_could_not_be_read_at_the_start_is_forgotten_with_its_session(
    is_readable_again, unread, open_files, monkeypatch
):
    """While it cannot be read, nobody knows whose it is: to read it again costs less."""
    if not is_readable_again:
        make_unreadable(monkeypatch, unread.parent)

    n_files, fault = unread.files.forget("", "a")

    assert (n_files, fault, names_in(unread.files)) == (2, "", {unread.other})
    assert len(open_files()._files) == 1


def test_what_can_be_read_again_is_found_and_kept_when_another_session_is_forgotten(
    unread,
):
    unread.files.forget("", "c")

    assert names_in(unread.files) == {unread.parent, unread.child, unread.other}
    assert unread.files.find(key_of(unread.prompt)).depth == 900


def test_file_that_is_written_again_takes_the_place_of_one_that_continues_an_unread_one(
    unread,
):
    """It has the same name, as it ends after the same tokens."""
    write(unread.files, unread.prompt)

    match = unread.files.find(key_of(unread.prompt))
    assert [(part.start, part.end) for part in match.segments] == [(0, 900)]
    assert unread.files.read(match.segments[0], ("kv.",)) is not None


def test_file_whose_parent_turns_out_to_be_damaged_is_deleted_with_it(unread):
    (unread.files.folder / f"{unread.parent}.safetensors").write_bytes(b"damaged")

    unread.files.forget("", "nobody")

    assert names_in(unread.files) == {unread.other}


@pytest.mark.parametrize(
    ("n_unread", "n_files", "n_room"),
    [(1, 4, 3.5), (3, 6, 4)],  # half of the room stays for the others
)
def test_what_could_not_be_read_takes_room_but_no_more_than_half(
    n_unread, n_files, n_room, open_files, monkeypatch
):
    files = open_files()
    names = [write(files, range(n, n + 600)) for n in range(n_files)]
    file_bytes = files.nbytes // n_files
    make_unreadable(monkeypatch, *names[:n_unread])

    files = open_files(max_bytes=int(file_bytes * n_room))

    assert names_in(files) == {*names} - {names[n_unread]}


# -- folders that go while they are opened ----------------------------------------------------


IDENTITY = "a" * 16


def test_lock_of_a_folder_that_was_just_deleted_is_not_taken(tmp_path, monkeypatch):
    """The next server would make the folder anew, and have its lock as well."""
    folder = tmp_path / IDENTITY
    folder.mkdir()
    flock = s.fcntl.flock

    def flock_too_late(*arguments):
        monkeypatch.setattr(s.fcntl, "flock", flock)
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "lock").touch()
        flock(*arguments)

    monkeypatch.setattr(s.fcntl, "flock", flock_too_late)
    with s._take_lock(folder, patience=10.0), pytest.raises(BlockingIOError):
        s._take_lock(folder)


@pytest.mark.parametrize("last_call", ["mkdir", "chmod", "touch", "flock"])
def test_folder_that_vanishes_while_it_is_opened_does_not_turn_the_cache_off(
    last_call, tmp_path, monkeypatch
):
    """Another server may delete it, for room or to forget all."""
    owner = s.fcntl if last_call == "flock" else s.Path
    call = getattr(owner, last_call)

    def call_and_delete(target, *args, **kwargs):
        call(target, *args, **kwargs)
        if last_call == "flock" or IDENTITY in str(target):
            monkeypatch.setattr(owner, last_call, call)
            shutil.rmtree(tmp_path / "kv" / IDENTITY)

    monkeypatch.setattr(owner, last_call, call_and_delete)
    config = s.Config(cache_disk_folder=str(tmp_path / "kv"))

    files = s.open_kv_files(config, IDENTITY)
    write(files, list(range(600)))

    assert len(names_in(files)) == 1
    with pytest.raises(BlockingIOError):
        s._take_lock(files.folder)
    files.close()


def test_folder_that_goes_by_itself_is_no_fault_of_forgetting(tmp_path, monkeypatch):
    folder = tmp_path / IDENTITY
    folder.mkdir()
    (folder / "lock").touch()
    find_folders = s._find_folders

    def find_and_delete(root):
        found = find_folders(root)
        shutil.rmtree(folder)
        return found

    monkeypatch.setattr(s, "_find_folders", find_and_delete)
    config = s.Config(cache_disk_folder=str(tmp_path), cache_disk="on")

    assert s.delete_other_folders(config) == (0, "")
    assert not folder.exists()


def test_folder_with_a_file_that_cannot_be_deleted_is_found_again(
    tmp_path, monkeypatch
):
    """Else the second time all would be said to be gone, with the file still there."""
    config = s.Config(cache_disk_folder=str(tmp_path), cache_disk="on")
    files = s.open_kv_files(config, IDENTITY)
    name = write(files, list(range(600)))
    (files.folder / "records").touch()
    (files.folder / "inner").mkdir()
    files.close()
    unlink = s.os.unlink

    def refuse(path, *args, **kwargs):
        if str(path).endswith(name + ".safetensors"):
            raise PermissionError(s.errno.EPERM, "Operation not permitted")
        unlink(path, *args, **kwargs)

    monkeypatch.setattr(s.os, "unlink", refuse)

    for _ in range(2):
        assert s.delete_other_folders(config) == (0, "Operation not permitted")
    left = {path.name for path in files.folder.iterdir() if path.is_file()}
    assert left == {name + ".safetensors", "lock"}

    monkeypatch.undo()
    assert s.delete_other_folders(config) == (1, "")
    assert not files.folder.exists()


def test_file_in_the_place_of_a_folder_does_not_turn_the_cache_off(tmp_path):
    (tmp_path / IDENTITY).write_text("not ours")
    config = s.Config(cache_disk_folder=str(tmp_path), cache_disk="on")

    files = s.open_kv_files(config, IDENTITY)

    assert files.folder == tmp_path / f"{IDENTITY}-2"
    assert (tmp_path / IDENTITY).read_text() == "not ours"
    files.close()
