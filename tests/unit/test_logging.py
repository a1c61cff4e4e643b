"""LOG: one line per request, sessions in private files, counters that lose nothing."""

import json
import resource
import stat
import threading

import pytest
import start_llm as s


@pytest.fixture
def bare_log(monkeypatch):
    monkeypatch.setattr(s.logger, "handlers", [])
    monkeypatch.setattr(s.logger, "propagate", True)
    level = s.logger.level
    yield
    s.logger.setLevel(level)


def session_files(root):
    return sorted(path for path in root.rglob("*") if path.is_file())


def session_log(root, **settings):
    return s.SessionLog(s.Config(log_root=str(root), **settings))


def run_all(threads):
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.usefixtures("bare_log")
def test_lines_for_a_file_are_plain_and_whole(capsys):
    s.start_logging(s.Config())
    s.logger.info("start %s end", "x" * 300)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [
        line.endswith(f"start {'x' * 300} end") for line in printed.err.splitlines()
    ] == [True]


def test_logs_lie_beside_the_server_wherever_it_was_started(tmp_path, monkeypatch):
    """And not in somebody's project, or in / where a supervisor starts it."""
    elsewhere = tmp_path / "project"
    home = tmp_path / "start-llm"
    elsewhere.mkdir()
    home.mkdir()
    monkeypatch.setattr(s, "__file__", str(home / "start-llm.py"))
    monkeypatch.chdir(elsewhere)
    session_log("logs").write("one", {})

    assert [path.parents[2] for path in session_files(tmp_path)] == [home]


def test_metrics_of_a_key_are_the_same_whoever_of_it_came_first():
    """Its first request and that of one of its users may come in one moment."""
    everybody = s.CacheMetrics()
    key_metrics = everybody.of_tenant("k")
    user_metrics = everybody.of_tenant("k/u")
    user_metrics.keep()
    user_metrics.bump("second_tries")

    assert key_metrics.snapshot()["second_tries"] == 1
    assert everybody.of_tenant("k").snapshot() == key_metrics.snapshot()


def test_counters_start_at_zero_and_lose_nothing_between_threads():
    metrics = s.CacheMetrics()
    assert set(metrics.snapshot().values()) == {0}

    def work():
        for _ in range(2000):
            metrics.bump("vlm_retreat")
            metrics.bump("evicted_idle", 3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    run_all(threads)
    counted = {name: n for name, n in metrics.snapshot().items() if n}
    assert counted == {"vlm_retreat": 8000, "evicted_idle": 24000}
    metrics.snapshot()["vlm_retreat"] = 0
    assert metrics.snapshot()["vlm_retreat"] == 8000


def test_records_come_back_in_order_from_a_private_file_and_folder(tmp_path):
    root = tmp_path / "new" / "logs"
    sessions = session_log(root)
    records = [{"n": n, "text": "é\n\u2028 \ud800 " * n} for n in range(5)]
    for record in records:
        sessions.write("abc-1", record)
    (path,) = session_files(root)
    assert path.name == "cache-session-abc-1.log"
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent, root)]
    assert modes == [0o600, 0o700, 0o700]

    lines = [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]
    assert [line["n"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[2]["text"] == "é\n\u2028 ? " * 2
    assert all(path.parent.name == line["time"][:10] for line in lines)


def test_days_that_are_too_long_ago_are_deleted_when_a_new_one_begins(tmp_path):
    for name in ("2020-01-01", "2020-13-99", "keep-me"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cache-session-x.log").touch()
    (tmp_path / "2020-01-02").mkdir()
    (tmp_path / "2020-01-02" / "letters").touch()
    session_log(tmp_path, log_keep_days=3).write("s", {})
    left = {path.name for path in tmp_path.iterdir()}

    assert {"2020-13-99", "keep-me"} < left and "2020-01-01" not in left
    assert (tmp_path / "2020-01-02" / "letters").exists()  # a day, and not of ours
    assert len(left) == 4


def test_no_session_id_leaves_its_folder_or_shares_a_file(tmp_path):
    ids = ["", ".", "..", "../../x", "/etc/x", "a/b", "a_b", "a b"]
    ids += ["é" * 300, "x" * 300, "x" * 301, "a\0b", "con:", "\ud800", "?"]
    ids += ["abc", "ABC", "Abc"]  # one file where case does not count
    sessions = session_log(tmp_path / "root")
    for session_id in ids:
        sessions.write(session_id, {"session": ascii(session_id)})
    names = [
        path.stem.removeprefix("cache-session-") for path in session_files(tmp_path)
    ]
    ids += set(names) - set(ids)  # a client may call its sessions by our names
    for session_id in ids:
        sessions.write(session_id, {"session": ascii(session_id)})

    files = session_files(tmp_path)
    assert len({path.name.lower() for path in files}) == len(ids)
    assert {path.parent.parent for path in files} == {tmp_path / "root"}
    written = []
    for path in files:
        lines = path.read_text().splitlines()
        written.append({json.loads(line)["session"] for line in lines})
    assert sorted(map(sorted, written)) == sorted(
        [ascii(session_id)] for session_id in ids
    )


def test_lines_of_several_threads_never_mix(tmp_path):
    sessions = session_log(tmp_path)

    def work(name):
        for n in range(40):
            sessions.write("shared", {"n": n, "name": name, "text": name * 20_000})

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    run_all(threads)
    (path,) = session_files(tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(line["text"] == line["name"] * 20_000 for line in lines)
    assert [line["n"] for line in lines if line["name"] == "c"] == list(range(40))


@pytest.mark.usefixtures("bare_log")
def test_a_session_log_that_cannot_be_written_complains_once_and_never_raises(
    tmp_path, caplog
):
    (tmp_path / "file").write_text("in the way")
    sessions = session_log(tmp_path / "file")
    endless = {}
    endless["self"] = endless
    for record in ({"n": 1, "path": tmp_path}, {("a",): 1}, endless, {"n": 2}):
        sessions.write("s", record)
    assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1


def test_half_a_record_on_a_full_disk_is_taken_back(tmp_path):
    sessions = session_log(tmp_path)
    sessions.write("s", {"text": "a" * 3_000})
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, hard_limit))  # writes end there
    try:
        sessions.write("s", {"text": "b" * 3_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))
    sessions.write("s", {"text": "c"})

    (path,) = session_files(tmp_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["text"][0] for line in lines] == ["a", "c"]


def test_a_scrape_shows_what_was_counted_and_changes_nothing():
    metrics = s.CacheMetrics()
    metrics.observe_wait("queue", 0.2)
    metrics.observe(ended_facts(), saved_seconds=0.0)
    first = metrics.exposition({"queued": 2})
    lines = first.decode().splitlines()

    assert metrics.exposition({"queued": 2}) == first
    reason = 'reason="queue"'
    for line in (
        'start_llm_requests_total{finish="stop",match="append"} 1.0',
        "start_llm_prompt_tokens_total 20000.0",
        "start_llm_queued 2.0",
        f'start_llm_waiting_seconds_bucket{{le="0.1",{reason}}} 0.0',
        f'start_llm_waiting_seconds_bucket{{le="0.3",{reason}}} 1.0',
        f"start_llm_waiting_seconds_sum{{{reason}}} 0.2",
        'start_llm_waiting_seconds_count{reason="memory"} 0.0',
        'start_llm_ttft_seconds_bucket{le="0.3"} 0.0',
        'start_llm_ttft_seconds_bucket{le="1.0"} 1.0',
    ):
        assert line in lines


def ended_facts(**facts):
    return {
        "prompt": 20_000,
        "cached": 19_800,
        "out": 1,
        "prefill": 0.3,
        "match": "append",
        "finish": "stop",
        "decode": 0.1,
        "ttft_ms": 400,
        **facts,
    }


def test_no_more_seconds_are_saved_than_have_passed_for_each_request_at_work(
    monkeypatch,
):
    clock = 1000.0
    monkeypatch.setattr(s.time, "monotonic", lambda: clock)
    metrics = s.CacheMetrics()

    clock += 10.0
    metrics.observe(ended_facts(), saved_seconds=23.0, n_at_work=2)
    of_two = metrics.totals()["saved_seconds"]
    metrics.observe(ended_facts(), saved_seconds=23.0, n_at_work=1)
    of_one = metrics.totals()["saved_seconds"]
    clock += 30.0
    metrics.observe(ended_facts(), saved_seconds=5.0, n_at_work=1)

    assert of_two == 20.0
    assert of_one == 20.0, "a counter never falls"
    assert metrics.totals()["saved_seconds"] == 25.0
