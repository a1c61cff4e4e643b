"""KV that survives a restart: written while nothing runs, loaded when it is asked for."""

import errno
import os
import shutil
import stat
import threading

import numpy as np
import pytest
import start_llm as s
from engine_fixture import TOLERANCE, Bench, words
from nights import at_night
from server_fixture import wait_until, wait_until_idle
from tiny_models import tiny_model

KINDS = ["qwen3", "qwen3_5", "gemma3_text"]


@pytest.fixture
def restart(tmp_path, models, monkeypatch):
    """Starts an engine on one folder; the one before on the same port has ended."""
    benches = {}

    def start(kind="qwen3", **settings):
        port = settings.get("mlx_port")
        if port in benches:
            benches[port].engine.stop()
        folder = str(tmp_path / "kv")
        bench = Bench(models(kind), monkeypatch, cache_disk_folder=folder, **settings)
        benches[port] = bench
        return bench

    yield start
    for bench in benches.values():
        bench.engine.stop()


def on_model_thread(bench, function):
    return bench.engine.call(lambda scheduler: function(scheduler.disk))


def save(bench, *prompts, session=""):
    """Write what rests, as at the end of the program, after each of these prompts."""
    for prompt in prompts:
        bench.ask(prompt, n=1, owner=s.RequestOwner("", session))
        save(bench)
    on_model_thread(bench, lambda disk: disk.save_all(60.0))
    on_model_thread(bench, lambda disk: disk.files.update())


PROMPT = words(np.random.default_rng(1), 600)


def restart_and_save(restart, **settings):
    """An engine whose only conversation, PROMPT, is in a file."""
    bench = restart(**settings)
    save(bench, PROMPT)
    return bench


def saved_segments(bench):
    """Of each file, by position."""
    found = on_model_thread(
        bench, lambda disk: [file.segment for file in disk.files._files.values()]
    )
    return sorted(found, key=lambda segment: (segment.start, segment.end))


def segments(bench):
    """(start, end) of each file, by position."""
    return [(segment.start, segment.end) for segment in saved_segments(bench)]


def files_in(folder):
    return sorted(folder.rglob("*.safetensors"))


def set_time(bench, now):
    on_model_thread(bench, lambda disk: setattr(disk.files, "_clock", lambda: now))


def difference(bench, prompt, **fields):
    """(cached tokens, largest difference to a cold run, the reply's ids)."""
    ids, end, handle = bench.ask(prompt, **fields)
    return end.cached_tokens, bench.largest_difference(handle, ids), ids


# -- what comes back ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_disk_cache_goes_on_after_a_restart_between_any_two_requests(
    kind, restart, rng
):
    prompt = words(rng, 700)
    n_known = 0

    for _ in range(5):
        bench = restart(kind)
        cached, error, ids = difference(
            bench, prompt, n=12, boundaries=[200, len(prompt) - 2]
        )
        assert cached >= n_known - 1
        assert error <= TOLERANCE.get(kind, 0.0)
        prompt += ids
        n_known = len(prompt) - 1
        prompt += words(rng, 260)

    assert bench.metrics.snapshot()["disk_hits"] == 1


def test_a_fault_while_the_disk_is_opened_costs_the_disk_alone(
    restart, monkeypatch, caplog
):
    def fail(*_args):
        raise KeyError("planted")

    monkeypatch.setattr(s, "open_kv_files", fail)
    bench = restart()
    _, error, ids = difference(bench, words(np.random.default_rng(5), 50), n=2)

    assert (error, len(ids)) == (0.0, 2)
    assert bench.engine.disk is None
    assert "planted" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_entry_is_branched_edited_and_extended_like_others(kind, restart, rng):
    head = words(rng, 600)
    first = head + words(rng, 300)
    bench = restart(kind)
    _, _, ids = difference(bench, first, n=8, boundaries=[600, 898])

    bench = restart(kind)
    longer = first + ids + words(rng, 30)
    branch = head + words(rng, 50)
    edited = first[:800] + words(rng, 60)
    cached = {}
    for name, prompt in {"branch": branch, "longer": longer, "edited": edited}.items():
        cached[name], error, _ = difference(
            bench, prompt, n=8, boundaries=[len(prompt) - 2]
        )
        assert error <= TOLERANCE.get(kind, 0.0), name

    assert cached["branch"] == 600
    assert cached["longer"] >= 906
    assert cached["edited"] == (800 if kind == "qwen3" else 600)


def test_two_branches_share_their_prefix_on_the_disk(restart, rng):
    head = words(rng, 1000)
    prompts = [head + words(rng, 400) for _ in range(3)]
    bench = restart()
    for prompt in prompts:
        bench.ask(prompt, n=1)
    save(bench)

    n_tokens = sum(end - start for start, end in segments(bench))

    assert n_tokens <= 1000 + 3 * 401
    bench = restart()
    for prompt in reversed(prompts):
        cached, error, _ = difference(bench, prompt, n=4)
        assert (cached, error) == (1399, 0.0)


def test_grown_entry_writes_only_what_is_new(restart, rng):
    bench = restart()
    prompt = words(rng, 600)
    written = []
    for _ in range(6):
        ids, _, _ = bench.ask(prompt, n=4)
        save(bench)
        written.append(sum(end - start for start, end in segments(bench)))
        prompt += ids + words(rng, 100)

    assert written[-1] == len(prompt) - 100
    assert [start for start, _ in segments(bench)] == [
        0,
        *(end for _, end in segments(bench)[:-1]),
    ]


def test_disk_has_more_of_a_prompt_than_memory_shares_with_another_one(restart, rng):
    prompt = words(rng, 700)
    restart().ask(prompt, n=1)
    bench = restart()
    other_prompt = prompt[:100] + words(rng, 300)
    bench.ask(other_prompt, n=1)  # too little of it is on the disk

    assert difference(bench, prompt, n=1)[:2] == (699, 0.0)
    assert difference(bench, other_prompt, n=1)[:2] == (len(other_prompt) - 1, 0.0)
    assert bench.metrics.snapshot()["disk_tokens"] == 699 - 100


def test_part_of_an_image_is_not_loaded(restart, monkeypatch):
    """Each lookup would retreat from it (L-57)."""
    bench = restart()
    text = np.arange(1, 1001, dtype=np.int32)
    tokens = s.inject_image_markers(text, slice(300, 900), digest="ab" * 32)
    segment = s.Segment(name="0" * 32, parent="0" * 32, start=0, end=700)
    match = s.DiskMatch((segment,), 700)

    def find_more(disk):
        monkeypatch.setattr(disk.files, "find", lambda _key: match)
        return disk.find_more(s.TokenKey(b"", tokens, []), s.NO_MATCH)

    assert on_model_thread(bench, find_more).depth == 300


# -- when it is written ---------------------------------------------------------------------------


def test_entry_is_written_while_the_engine_is_idle(restart, monkeypatch):
    monkeypatch.setattr(s, "SAVE_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(s, "IDLE_SECONDS", 0.01)
    bench = restart()
    bench.ask(words(np.random.default_rng(1), 700), n=2)

    wait_until(lambda: (bench.engine.disk or {}).get("files") == 1)

    assert bench.engine.disk["written_today_bytes"] == bench.engine.disk["bytes"] > 0


@pytest.mark.parametrize("is_busy", [False, True])
def test_agent_that_never_rests_is_written_at_a_pause_now_and_then(
    is_busy, restart, monkeypatch, rng
):
    """Else a kill would cost all that it has done since its last rest."""
    for name in ("SAVE_AFTER_SECONDS", "SAVE_BUSY_SECONDS"):
        monkeypatch.setattr(s, name, 1e9)
    bench = restart()
    prompt = words(rng, 300)
    found = []

    def pause(disk):
        disk._not_before = 0.0
        while disk.save_some(is_busy=is_busy):
            disk.files.wait(10.0)
            disk._not_before = 0.0

    for n_new in (0, 2000, 300, 1000, 900):
        prompt += words(rng, n_new)
        bench.ask(prompt, n=1)
        on_model_thread(bench, pause)
        found.append(segments(bench))

    first, second = (0, 2301), (2300, 4501)
    assert found == [[], [first], [first], [first], [first, second]]


def test_running_entry_is_not_written_and_a_continued_one_is_abandoned(
    restart, tmp_path, rng
):
    bench = restart()
    prompt = words(rng, 700)
    bench.ask(prompt, n=1)

    def begin_to_write(disk):
        job = disk._begin(disk._cache.entries[0])
        next(job)
        return job

    job = on_model_thread(bench, begin_to_write)
    cached, error, _ = difference(bench, prompt + words(rng, 40), n=2)
    on_model_thread(bench, lambda _disk: list(job))
    on_model_thread(bench, lambda disk: disk.files.wait(10.0))

    assert (cached, error) == (700, 0.0)
    assert files_in(tmp_path / "kv") == []
    assert not list(tmp_path.rglob("*.new"))
    save(bench)
    assert segments(bench) == [(0, 742)]


def test_conversation_that_replaces_a_saved_one_is_written(restart, rng):
    bench = restart()
    head = words(rng, 700)
    for _ in range(2):  # of the same length, and the second takes over the entry
        save(bench, head + words(rng, 300))

    assert segments(bench) == [(0, 1001), (700, 1001)]


@pytest.mark.parametrize("loss", ["by hand", "damaged", "idle"])
def test_what_files_have_lost_is_written_again(loss, restart, tmp_path):
    """Memory still had it, but took it for written: after a restart it was gone."""
    bench = restart_and_save(restart)
    (file,) = files_in(tmp_path / "kv")

    def lose(scheduler):
        files = scheduler.disk.files
        key = scheduler.cache.entries[0].key
        if loss == "idle":
            files.remove_idle(-1.0)
        elif loss == "damaged":
            file.write_bytes(b"damaged")
            assert s._read_kv(files, files.find(key)) is None
        else:
            file.unlink()

    bench.engine.call(lose)
    save(bench)

    assert segments(bench) == [(0, 601)]
    assert files_in(tmp_path / "kv") == [file]


def test_what_is_deleted_for_room_is_not_written_again(restart, rng):
    """Else the files of two conversations, with room for one, would push out each other."""
    bench = restart(cache_disk_max_bytes=400_000)
    save(bench, words(rng, 700), words(rng, 700))
    written = on_model_thread(bench, lambda disk: disk.files.report())
    assert written["files"] == 1

    save(bench)

    assert on_model_thread(bench, lambda disk: disk.files.report()) == written


def test_conversations_that_share_few_tokens_have_files_of_their_own(restart, rng):
    """As a first token, or what a template begins with: to forget one keeps the other."""
    bench = restart()
    head = words(rng, 3)
    for session, n_more in (("a", 900), ("b", 600)):
        save(bench, head + words(rng, n_more), session=session)
    assert segments(bench) == [(0, 604), (0, 904)]

    on_model_thread(bench, lambda disk: disk.files.forget("", "a"))

    assert segments(bench) == [(0, 604)]


def test_parent_of_what_is_used_is_used(restart, rng):
    bench = restart(prompt_cache_ttl_seconds=3600.0)
    prompt = words(rng, 600)
    save(bench, prompt)

    later = s.time.time() + 3000
    set_time(bench, later)
    save(bench, prompt + words(rng, 300))
    set_time(bench, later + 3000)
    bench.engine.call(lambda scheduler: scheduler.evict_idle())

    assert len(segments(bench)) == 2


# Of gemma, states go before KV.
@pytest.mark.parametrize("kind", ["qwen3", at_night("qwen3_5")])
def test_what_memory_has_no_room_for_is_written_before_it_goes(
    kind, restart, monkeypatch, rng
):
    """Agents in turn whose conversations do not all fit: each comes back in a moment."""
    for name in ("SAVE_AFTER_SECONDS", "SAVE_BUSY_SECONDS"):
        monkeypatch.setattr(s, name, 1e9)
    monkeypatch.setattr(s, "IDLE_SECONDS", 0.01)
    bench = restart(kind, memory_limit_bytes=8 << 20)
    capacity = bench.engine.report["capacity_tokens"]
    prompts = [words(rng, capacity // 5) for _ in range(7)]
    for prompt in prompts:
        bench.ask(prompt, n=1)
        wait_until(
            lambda: bench.engine.call(lambda at: not at.disk.save_some(is_busy=False))
        )

    for prompt in prompts:
        cached, error, _ = difference(bench, prompt + words(rng, 40), n=2)
        assert cached >= len(prompt) - 1
        assert error <= TOLERANCE.get(kind, 0.0)
    assert bench.engine.report["lines"] < len(prompts)


def test_disk_cache_keeps_within_its_bytes_and_drops_what_was_used_first(
    restart, tmp_path, rng
):
    prompts = [words(rng, 700) for _ in range(4)]
    bench = restart()
    seen = []  # the files in the order in which they came
    for prompt in prompts:
        save(bench, prompt)
        seen += [file for file in files_in(tmp_path / "kv") if file not in seen]
    n_bytes = bench.engine.call(lambda scheduler: scheduler.disk.files.nbytes)

    bench = restart(cache_disk_max_bytes=n_bytes * 5 // 8)
    files = files_in(tmp_path / "kv")

    assert files == sorted(seen[2:])
    assert sum(file.stat().st_size for file in files) < n_bytes * 5 // 8 + 20_000


def test_records_beside_files_take_of_the_same_space(restart, tmp_path, rng):
    bench = restart()
    save(bench, *(words(rng, 700) for _ in range(4)))
    files = files_in(tmp_path / "kv")
    n_bytes = bench.engine.call(lambda scheduler: scheduler.disk.files.nbytes)
    (files[0].parent / "records-wal").write_bytes(bytes(n_bytes // 2))

    restart(cache_disk_max_bytes=n_bytes * 5 // 4)

    assert len(files_in(tmp_path / "kv")) == 3


def test_what_continues_another_one_is_deleted_for_room_before_it(restart, rng):
    bench = restart()
    prompt = words(rng, 700)
    for _ in range(2):
        ids, _, _ = bench.ask(prompt, n=1)
        save(bench)
        prompt = prompt + ids + words(rng, 300)
    assert len(segments(bench)) == 2

    def make_room(disk):
        disk.files.max_bytes = disk.files.nbytes - 1
        disk.files.update()

    on_model_thread(bench, make_room)

    assert segments(bench) == [(0, 701)]


@pytest.mark.parametrize("n_room", [100, 600, *map(at_night, (256, 300, 900, 1300))])
def test_saving_ends_on_a_disk_that_is_smaller_than_a_conversation(
    n_room, restart, rng
):
    """What is deleted for room as soon as it is there would be written without end."""
    bench = restart()
    head = words(rng, 800)
    for prompt in (head, words(rng, 700)):
        bench.ask(prompt, n=1)
        for _ in range(2):
            bench.ask(prompt + words(rng, 300), n=1)
    written = []

    def save_all(disk):
        write = disk.files.write

        def write_and_note(segment, arrays):
            written.append(segment.name)
            assert written.count(segment.name) <= 3, "written again and again"
            write(segment, arrays)

        disk.files.write = write_and_note
        disk.files.max_bytes = n_room * disk._spec.token_bytes
        disk._max_tokens = 256
        disk.save_all(60.0)
        disk.files.update()
        return disk.files.nbytes <= disk.files.max_bytes, disk._job

    assert on_model_thread(bench, save_all) == (True, None)


def test_no_more_is_written_a_day_than_allowed(restart, rng):
    bench = restart_and_save(restart)
    n_bytes = bench.engine.call(lambda scheduler: scheduler.disk.files.nbytes)

    bench = restart(cache_disk_max_bytes_per_day=2 * n_bytes + n_bytes // 2)
    save(bench, *(words(rng, 700) for _ in range(3)))

    assert len(segments(bench)) == 3, "two of this server, and one of the last"
    set_time(bench, s.time.time() + 86_400)
    save(bench)
    assert len(segments(bench)) == 4


@pytest.mark.parametrize(
    ("start", "end", "chosen"),
    [
        (0, 1000, [300, 800, 1000]),  # not 500: three would be larger than the KV
        (400, 1000, [1000]),
        (0, 800, [300, 500, 800]),
        (0, 300, [300]),  # the last one and the head's at once
        (0, 200, [100]),  # in a file of its own it is the last
        (0, 90, []),
    ],
)
def test_file_has_the_state_at_its_end_that_of_the_head_and_what_is_cheap(
    start, end, chosen
):
    """KV of 1,000 tokens has 8,000 bytes here, each state 3,000."""
    span = s.KVSpan([s.mx.zeros((1, 1, 1000, 2), s.mx.float32)], 1000)
    states = {p: s.StateCheckpoint((), 3000) for p in (100, 300, 500, 800, 1000)}
    key = s.TokenKey(b"", np.arange(1000, dtype=np.int32), [])
    entry = s.CacheEntry(key, end=1000, span=span, checkpoints=states, head_end=300)

    assert s._choose_states(entry, start, end) == chosen


@pytest.mark.parametrize("kind", ["gemma3_text", at_night("qwen3_5")])
def test_head_that_sessions_share_goes_on_after_a_restart(kind, restart, rng):
    """Its state is kept where later ones take all the bytes that states may have."""
    head = words(rng, 400)
    first = head + words(rng, 500)
    bench = restart(kind)
    bench.ask(first, n=1, boundaries=[400, *range(410, 900, 4)])

    bench = restart(kind)
    cached, error, _ = difference(
        bench, head + words(rng, 300), n=4, boundaries=[400, 698]
    )

    assert cached == 400
    assert error <= TOLERANCE.get(kind, 0.0)


# -- damage ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written_file(tmp_path_factory):
    """(model, folder with one file of it, the prompt)"""
    folder = tmp_path_factory.mktemp("written")
    path = tiny_model("qwen3_5", folder)
    prompt = words(np.random.default_rng(11), 600)
    with pytest.MonkeyPatch.context() as patch:
        bench = Bench(path, patch, cache_disk_folder=str(folder / "kv"))
        bench.ask(prompt, n=2, boundaries=[400, 598])
        bench.engine.stop()
    return path, folder / "kv", prompt


def damage_file(file, damage, rng):
    data = bytearray(file.read_bytes())
    if damage == "truncated":
        data = data[: int(rng.integers(0, len(data)))]
    elif damage == "flipped":
        # Every second one in the header, which is small.
        end = (
            len(data) if rng.random() < 0.5 else 8 + int.from_bytes(data[:8], "little")
        )
        data[int(rng.integers(0, end))] ^= 1 << int(rng.integers(0, 8))
    elif damage == "longer":
        data += bytes(8)
    elif damage == "another format":
        data = data.replace(b'\\"format\\":4', b'\\"format\\":3')
    elif damage == "empty":
        data = bytearray()
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "n"),
    [
        ("truncated", 20),
        ("flipped", 30),
        ("longer", 1),
        ("another format", 1),
        ("empty", 1),
    ],
)
def test_damaged_file_is_a_miss_and_is_deleted(damage, n, written_file, tmp_path, rng):
    _, folder, prompt = written_file
    key = s.TokenKey(b"r", np.asarray(prompt, np.int32), [])
    undamaged = read_arrays(next(folder.glob("*/")), key)
    assert undamaged is not None
    for number in range(n):
        copy = tmp_path / str(number)
        shutil.copytree(next(folder.glob("*/")), copy)
        (file,) = copy.glob("*.safetensors")
        damage_file(file, damage, rng)

        arrays = read_arrays(copy, key)

        # The bit may be of an array that nobody asks for: a state in the middle.
        assert arrays is None or (damage == "flipped" and arrays == undamaged)
        assert file.exists() == (arrays is not None)


def read_arrays(folder, key):
    """The bytes of all that is loaded for a prompt; None if nothing is."""
    files = s.KVFiles(
        s._take_lock(folder), max_bytes=1 << 30, max_bytes_per_day=1 << 30
    )
    match = files.find(key)
    loaded = s._read_kv(files, match) if match.segments else None
    files.close()
    if loaded is None:
        return None
    span, states = loaded
    arrays = list(span.arrays)
    for state in states.values():
        arrays += s._arrays_in(state.leaves)
    return [np.array(array).tobytes() for array in arrays]


@pytest.mark.parametrize("lost", ["first", "middle"])
def test_segment_without_its_parent_is_deleted(lost, restart, tmp_path, rng):
    bench = restart()
    prompt = words(rng, 600)
    for _ in range(3):
        save(bench, prompt)
        prompt += words(rng, 300)
    segment = saved_segments(bench)[0 if lost == "first" else 1]
    bench.engine.stop()
    next((tmp_path / "kv").rglob(segment.name + ".safetensors")).unlink()

    bench = restart()

    assert len(segments(bench)) == (0 if lost == "first" else 1)
    assert len(files_in(tmp_path / "kv")) == len(segments(bench))
    _, error, _ = difference(bench, prompt, n=2)
    assert error == 0.0


def test_half_written_file_is_deleted_at_the_start(restart):
    bench = restart()
    folder = on_model_thread(bench, lambda disk: disk.files.folder)
    bench.engine.stop()
    (folder / ("0" * 32 + ".new")).write_bytes(b"half")
    (folder / ".tmpAw3D3I").write_bytes(b"half")  # as safetensors names it

    restart()

    assert not list(folder.glob("*.new"))
    assert not list(folder.glob(".tmp*"))


def test_kv_of_other_weights_is_not_found(restart, monkeypatch, rng):
    prompt = words(rng, 700)
    restart().ask(prompt, n=1)
    other = restart()
    identity = other.engine.call(lambda scheduler: scheduler.kv_identity())
    monkeypatch.setattr(s, "version_of_package", lambda name: "0.0")

    bench = restart()

    assert bench.engine.call(lambda scheduler: scheduler.kv_identity()) != identity
    cached, error, _ = difference(bench, prompt, n=2)
    assert (cached, error) == (0, 0.0)


# -- a folder that cannot be used ------------------------------------------------------------------


def test_servers_of_one_model_find_their_own_folders_again(restart, rng):
    """Whichever of them starts first; before, a second one was cold after each start."""
    prompts = {port: words(rng, 600) for port in (8101, 8102)}
    for port, prompt in prompts.items():
        restart(mlx_port=port).ask(prompt, n=1)

    for first in prompts:
        benches = [restart(mlx_port=port) for port in prompts]
        for bench in benches:
            bench.engine.stop()
        for port in sorted(prompts, key=lambda port: port != first):
            cached, error, _ = difference(restart(mlx_port=port), prompts[port], n=1)
            assert (cached >= 598, error) == (True, 0.0)


def test_server_on_another_port_finds_what_the_last_one_has_left(restart, rng):
    prompt = words(rng, 600)
    first = restart(mlx_port=8101)
    first.ask(prompt, n=1)
    first.engine.stop()

    cached, _, _ = difference(restart(mlx_port=8102), prompt, n=1)

    assert cached >= 598


def test_folder_is_waited_for_while_the_last_server_of_the_port_ends(restart, tmp_path):
    first = restart(mlx_port=8101)
    folder = on_model_thread(first, lambda disk: disk.files.folder)
    config = s.Config(cache_disk_folder=str(tmp_path / "kv"), mlx_port=8101)
    timer = threading.Timer(0.5, first.engine.stop)
    timer.start()

    disk = s.open_kv_files(config, folder.name)
    disk.close()
    timer.join()

    assert disk.folder == folder


def test_folder_is_kept_until_the_last_file_is_written(tmp_path, monkeypatch):
    files = s.KVFiles(
        s._take_lock(tmp_path), max_bytes=1 << 20, max_bytes_per_day=1 << 20
    )
    may_go_on = threading.Event()
    monkeypatch.setattr(s, "write_segment", lambda *_arguments: may_go_on.wait(60.0))
    files.write(None, {})

    files.close()

    with pytest.raises(BlockingIOError):
        s._take_lock(tmp_path)
    may_go_on.set()
    s._take_lock(tmp_path, patience=10.0).close()


def test_second_server_may_write_though_the_first_has_filled_the_space(restart):
    first = restart(mlx_port=8101, cache_disk_max_bytes=400_000)
    save(first, words(np.random.default_rng(1), 700))
    assert first.engine.call(lambda at: at.disk.files.nbytes) > 200_000

    second = restart(mlx_port=8102, cache_disk_max_bytes=400_000)

    assert second.engine.disk["max_bytes"] == 200_000


def test_server_goes_on_where_the_folder_has_vanished(restart, tmp_path, caplog, rng):
    bench = restart()
    prompt = words(rng, 700)
    bench.ask(prompt, n=1)
    shutil.rmtree(tmp_path / "kv")

    for _ in range(2):
        save(bench)
        prompt += words(rng, 600)
        _, error, _ = difference(bench, prompt, n=1)
        assert error == 0.0

    wait_until_idle(bench.engine)
    assert caplog.text.count("nothing is written for now") == 1
    wait_until(lambda: "off" in bench.engine.disk)


@pytest.mark.parametrize("trouble", ["full disk", "copying fails"])
def test_kv_is_written_again_after_a_failure(trouble, restart, tmp_path, monkeypatch):
    monkeypatch.setattr(s, "SAVE_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(s, "WRITE_AGAIN_SECONDS", 0.2)
    bench = restart()
    prompt = words(np.random.default_rng(16), 700)

    def refuse(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        name = "save_file" if trouble == "full disk" else "_copy_array"
        patch.setattr(s, name, refuse)
        bench.ask(prompt, n=1)
        wait_until(lambda: "off" in bench.engine.disk)
        assert files_in(tmp_path / "kv") == []

    wait_until(lambda: len(files_in(tmp_path / "kv")) == 1)
    wait_until(lambda: "off" not in bench.engine.disk)


def test_files_are_for_their_owner_alone(restart, tmp_path):
    restart_and_save(restart)

    (file,) = files_in(tmp_path / "kv")

    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((file.parent / "secret").stat().st_mode) == 0o600


# -- what is forgotten ----------------------------------------------------------------------------


def test_others_that_continued_a_forgotten_session_are_written_again(restart, rng):
    bench = restart()
    head = words(rng, 600)
    save(bench, head, session="a")
    save(bench, head + words(rng, 300), session="b")
    assert segments(bench) == [(0, 601), (600, 901)]

    bench.engine.call(lambda scheduler: scheduler.drop_kv("", "a"))
    save(bench)

    assert segments(bench) == [(0, 901)]
    assert saved_segments(bench)[0].session == "b"


def test_what_others_share_with_a_forgotten_session_loses_its_id(
    restart, tmp_path, rng
):
    """One that parts from a long conversation early on needs its beginning."""
    bench = restart()
    head = words(rng, 300)
    for session, n_more in (("forgotten", 800), ("b", 400)):
        owner = s.RequestOwner("", session)
        bench.ask(head + words(rng, n_more), n=1, owner=owner)
    save(bench)

    bench.engine.drop_kv("", "forgotten")
    save(bench)

    assert segments(bench) == [(0, 300), (300, 701)]
    contents = [file.read_bytes() for file in files_in(tmp_path / "kv")]
    assert not [content for content in contents if b"forgotten" in content]
    entries = bench.engine.call(lambda scheduler: scheduler.describe_cache())
    assert {entry["session"] for _, entry in entries} == {"b"}


@pytest.mark.parametrize(
    ("forgotten", "n_left"), [(("one", "a"), 2), (("one", None), 1), (("", None), 0)]
)
def test_what_is_forgotten_is_gone_from_the_disk(
    forgotten, n_left, restart, tmp_path, rng
):
    """A session, all of one tenant, or all there is, and nothing else."""
    bench = restart()
    for owner in (("one", "a"), ("one", "b"), ("two", "a")):
        bench.ask(words(rng, 600), n=1, owner=s.RequestOwner(*owner))
    save(bench)
    tenant, session = forgotten

    dropped = bench.engine.drop_kv(tenant, session)

    assert (dropped.n_files, dropped.fault) == (3 - n_left, "")
    assert len(files_in(tmp_path / "kv")) == len(saved_segments(bench)) == n_left
    left = {(segment.tenant, segment.session) for segment in saved_segments(bench)}
    assert forgotten not in left
    assert n_left != 1 or left == {("two", "a")}


def test_what_is_forgotten_while_it_is_written_does_not_appear(restart, tmp_path, rng):
    bench = restart()
    for session in ("a", "b", "c"):
        bench.ask(words(rng, 600), n=1, owner=s.RequestOwner("", session))

    def forget_in_the_middle(scheduler):
        disk = scheduler.disk
        entries = {entry.owner.session: entry for entry in scheduler.cache.entries}
        list(disk._begin(entries["a"]))  # wholly on its way, and not in the index
        disk.files.wait(10.0)
        disk._job = disk._begin(entries["b"])  # half of it is
        next(disk._job)
        scheduler.drop_kv("", "a")
        scheduler.drop_kv("", "b")

    bench.engine.call(forget_in_the_middle)
    save(bench)

    assert [segment.session for segment in saved_segments(bench)] == ["c"]
    assert len(files_in(tmp_path / "kv")) == 1
    assert not list((tmp_path / "kv").rglob("*.new"))


def test_what_a_slow_disk_writes_is_forgotten_once_it_is_there(
    restart, tmp_path, monkeypatch, rng
):
    bench = restart()
    bench.ask(words(rng, 600), n=1, owner=s.RequestOwner("", "a"))
    monkeypatch.setattr(s, "FORGET_SECONDS", 0.01)
    may_go_on = threading.Event()

    def forget_in_the_middle(scheduler):
        disk = scheduler.disk
        disk.files._executor.submit(may_go_on.wait)
        list(disk._begin(scheduler.cache.entries[0]))
        scheduler.drop_kv("", "a")

    bench.engine.call(forget_in_the_middle)
    may_go_on.set()
    save(bench)

    assert files_in(tmp_path / "kv") == []


def test_fault_of_the_disk_cache_does_not_end_the_server(
    restart, tmp_path, monkeypatch, caplog
):
    bench = restart_and_save(restart)
    assert len(files_in(tmp_path / "kv")) == 1

    def fail(*_arguments, **_options):
        raise RuntimeError("planted")

    monkeypatch.setattr(s.DiskCache, "save_some", fail)
    wait_until(lambda: "a fault while KV was copied" in caplog.text)

    cached, error, _ = difference(bench, words(np.random.default_rng(2), 600), n=2)
    assert (cached, error) == (0, 0.0)
    bench.engine.call(lambda scheduler: scheduler.drop_kv("", None))
    assert files_in(tmp_path / "kv") == [], "what is forgotten goes all the same"


def test_old_kv_is_gone_from_the_disk(restart, tmp_path):
    bench = restart_and_save(restart, prompt_cache_ttl_seconds=3600.0)
    assert len(files_in(tmp_path / "kv")) == 1

    set_time(bench, s.time.time() + 4000)
    bench.engine.call(lambda scheduler: scheduler.evict_idle())

    assert files_in(tmp_path / "kv") == []


def test_kv_that_a_request_failed_on_is_gone_from_the_disk(restart, monkeypatch, rng):
    prompt = words(rng, 700)
    restart().ask(prompt, n=1)
    bench = restart()
    bench.may_try_again = True
    load_span = s.load_span

    def fail_once(layer_caches, span):
        monkeypatch.setattr(s, "load_span", load_span)
        raise RuntimeError("planted")

    monkeypatch.setattr(s, "load_span", fail_once)
    cached, error, _ = difference(bench, prompt, n=2)

    assert (cached, error) == (0, 0.0)
    assert segments(bench) == []


@pytest.mark.parametrize(
    ("settings", "is_wanted"),
    [
        ({}, True),
        ({"cache_disk": "off"}, False),
        ({"mlx_host": "0.0.0.0", "api_key": "k"}, False),
        ({"proxy_host": "0.0.0.0", "api_key": "k"}, False),
        ({"cache_isolation": "user"}, False),
        ({"cache_isolation": "user", "cache_disk": "on"}, True),
        ({"prompt_cache_max_entries_global": 0, "cache_disk": "on"}, False),
    ],
)
def test_disk_cache_is_on_for_one_person_on_this_machine(settings, is_wanted):
    assert s.wants_disk_cache(s.Config(**settings)) is is_wanted


def test_folders_of_other_models_go_the_one_used_first_first(tmp_path):
    old, new, own = (digit * 16 for digit in "abc")
    for number, name in enumerate(["photos", old, new + "-2", own]):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "x.safetensors").write_bytes(bytes(1000))
        (folder / "lock").touch()
        os.utime(folder / "lock", (number, number))
    (tmp_path / (new + "-2") / "deleted.safetensors").symlink_to("nowhere")  # meanwhile

    loop = "d" * 16
    (tmp_path / loop).mkdir()
    (tmp_path / loop / "lock").symlink_to("lock")

    n_bytes = s._limit_other_folders(tmp_path / own, 1500)

    assert n_bytes == 1000
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [new + "-2", own, loop, "photos"], "photos are not ours"


def test_all_models_together_keep_within_the_limit(restart, tmp_path):
    bench = restart()
    bench.engine.stop()
    other = tmp_path / "kv" / ("a" * 16)
    other.mkdir()
    (other / "lock").touch()
    (other / "x.safetensors").write_bytes(bytes(400_000))

    bench = restart(cache_disk_max_bytes=1_000_000)

    assert other.exists()
    assert bench.engine.disk["max_bytes"] == 600_000


# -- what is no file, and what cannot be deleted ---------------------------------------------------


def put_in_place(path, kind):
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["a pipe", "a link to itself"])
@pytest.mark.parametrize("name", ["lock", "secret", "a segment"])
def test_what_is_no_file_does_not_hang_or_switch_the_cache_off(
    kind, name, restart, tmp_path
):
    bench = restart_and_save(restart)
    bench.engine.stop()
    (file,) = files_in(tmp_path / "kv")
    put_in_place(file if name == "a segment" else file.parent / name, kind)

    bench = restart()
    prompt = words(np.random.default_rng(1), 600)
    cached, error, _ = difference(bench, prompt, n=1)

    assert bench.engine.disk is not None
    assert error == 0.0
    assert (cached > 500) is (name != "a segment")
    save(bench, words(np.random.default_rng(2), 600))
    assert len(files_in(tmp_path / "kv")) == 2


@pytest.mark.parametrize("fault", ["Read-only", "No such file"])
def test_what_cannot_be_deleted_now_is_said_and_deleted_later(
    fault, restart, tmp_path, monkeypatch
):
    bench = restart_and_save(restart)
    folder = files_in(tmp_path / "kv")[0].parent

    def refuse(path, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        if fault == "Read-only":
            patch.setattr(s.Path, "unlink", refuse)
        else:
            folder.rename(tmp_path / "gone")
        dropped = bench.engine.drop_kv("", None)
        # Later, the model thread may have tried again before this looks.
        assert len([*tmp_path.rglob("*.safetensors")]) == 1
    if fault == "No such file":
        (tmp_path / "gone").rename(folder)

    assert fault in dropped.fault
    save(bench)
    assert files_in(tmp_path / "kv") == []


def test_file_that_cannot_be_looked_at_now_is_kept(restart, tmp_path, monkeypatch):
    bench = restart_and_save(restart)
    key = bench.engine.call(lambda scheduler: scheduler.cache.entries[0].key)

    def refuse(path, **_options):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(s.Path, "stat", refuse)
        match = on_model_thread(bench, lambda disk: disk.files.find(key))
        assert (
            on_model_thread(bench, lambda disk: s._read_kv(disk.files, match)) is None
        )
    on_model_thread(bench, lambda disk: disk.files.update())

    assert len(files_in(tmp_path / "kv")) == 1
    assert on_model_thread(bench, lambda disk: disk.files.find(key)).depth == 601
