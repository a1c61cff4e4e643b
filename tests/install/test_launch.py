"""scripts/helpers/launch.py: a client starts on the running server, and nothing is left of it.

The clients here are programs on PATH that write down what they were given. The server is a small
one that answers as start-llm and LiteLLM do, or the real one on a tiny model.
"""

import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
from contextlib import chdir, closing, contextmanager, suppress
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path

import launch
import pytest
import start_llm as s
from dotenv import dotenv_values
from nights import at_night
from server_fixture import Served, free_port, wait_until
from stub_server import StubHandler, running

ROOT = Path(__file__).parents[2]
NEWER_PYTHONS = sorted(Path.home().glob(".pyenv/versions/3.1[3-9]*/bin/python"))
KEY = "sk-written-in-env"
CONTEXT = 54_321
MODEL = "mlx-community/Some-Model-4bit"
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

RECORDER = """
import json, os, sys
from pathlib import Path

files = {}
words = [*sys.argv, *os.environ.values()]
for text in [part for word in words for part in word.split('"')]:
    if "start-llm-" in text and os.path.isfile(text):
        files[text] = Path(text).read_text()
seen = {"arguments": sys.argv[1:], "environment": dict(os.environ), "files": files}
Path(os.environ["RECORD"]).write_text(json.dumps(seen))
"""

# Says that it runs, counts SIGINTs and ends with their number when SIGTERM comes.
COUNTER = """
import os, signal, sys
from pathlib import Path

count = 0
def interrupt(number, frame):
    global count
    count += 1
    Path(os.environ["RECORD"]).write_text(f"interrupted {count}")
def terminate(number, frame):
    sys.exit(40 + count)
signal.signal(signal.SIGINT, interrupt)
signal.signal(signal.SIGTERM, terminate)
Path(os.environ["RECORD"]).write_text(f"running {os.getpid()}")
while True:
    signal.pause()
"""


class Answering(StubHandler):
    """GET from `server.answers`, by path; 401 without the server's key.

    /health alone is open, unless it is LiteLLM's: that has /model/info.
    An answer that is a list is one for each request; the last one stays.
    """

    def do_GET(self):
        self.server.paths.append(self.path)
        answer = self.server.answers.get(self.path, (404, {}))
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        status, body = answer
        sent_key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        is_open = self.path.startswith("/health") and "/model/info" not in (
            self.server.answers
        )
        if not is_open and sent_key != self.server.key:
            status = 401
            body = {"error": {"message": "no"}}

        self.answer(status, json.dumps(body).encode())


ENTRY = {"id": MODEL, "context_length": CONTEXT}
ANSWERS = {
    "/health": (200, {"status": "ok"}),
    "/health/liveliness": (200, {}),
    "/v1/models": (200, {"data": [ENTRY]}),
}


def with_model(model=MODEL, context=CONTEXT):
    """The answers of a server with this model and so many tokens of context."""
    entry = {"id": model, "context_length": context}
    return {**ANSWERS, "/v1/models": (200, {"data": [entry]})}


def with_proxy(*reports):
    """The answers of a server whose status has these reports of LiteLLM, one after another."""
    answers = [(200, {"proxy": report}) for report in reports]
    return {**ANSWERS, "/v1/status": answers}


def as_proxy(model=MODEL, context=CONTEXT):
    """The answers of LiteLLM before a server: names of models, and what it knows of them."""
    info = {"model_info": {"max_input_tokens": context}}
    return {
        "/health": (200, {"status": "ok"}),
        "/v1/models": (200, {"data": [{"id": model}]}),
        "/model/info": (200, {"data": [info]}),
    }


@contextmanager
def answering(answers, *, key="", paths=None):
    """The port of a server that gives these answers; `paths` are what it is asked for."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.answers = answers
    server.paths = [] if paths is None else paths
    server.key = key
    with running(server) as port:
        yield port


class Desk:
    """A person's shell: a home, a PATH with fake clients, and the server's settings."""

    def __init__(self, folder, port, capfd):
        self.capfd = capfd
        self.home = folder / "home"
        self.bin = folder / "bin"
        self.temporary = folder / "tmp"
        self.record = folder / "record"
        self.processes = []  # each leads a process group of its own

        for new_folder in (self.home, self.bin, self.temporary):
            new_folder.mkdir()
        self.environ = {
            "PATH": str(self.bin),
            "HOME": str(self.home),
            "TMPDIR": str(self.temporary),
            "RECORD": str(self.record),
            "MLX_PORT": str(port),
            "PROXY_PORT": str(port),
            "API_KEY": KEY,
            "PROXY_API_KEY": "",
        }

    def install(self, program, text):
        """Put a client on PATH."""
        path = self.bin / program
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(0o755)

    def command(self, *arguments, python=sys.executable):
        return [python, str(ROOT / "install_and_run.py"), "launch", *arguments]

    def run(self, *arguments, python=sys.executable):
        """Run it to its end, as a person does."""
        return subprocess.run(
            self.command(*arguments, python=python), env=self.environ, cwd=self.home,
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip

    def launch(self, *arguments):
        """Run its main() to its end in this process: a start is a quarter of a second."""
        handlers = {number: signal.getsignal(number) for number in PASSED_ON}
        self.capfd.readouterr()
        with pytest.MonkeyPatch.context() as patch, chdir(self.home):
            patch.setattr(os, "environ", dict(self.environ))
            patch.setattr(sys, "argv", ["launch.py", *arguments])
            patch.setattr(tempfile, "tempdir", str(self.temporary))
            try:
                status = launch.main()
            except SystemExit as end:
                status = end.code
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        return subprocess.CompletedProcess(arguments, status, *self.capfd.readouterr())

    def launch_at(self, answers, *arguments):
        """The same with a server that gives these answers."""
        with answering(answers, key=KEY) as port:
            self.environ["MLX_PORT"] = str(port)
            return self.launch(*arguments)

    def start(self, *arguments, **kwargs):
        """Start it in a session of its own, without a terminal."""
        process = subprocess.Popen(
            self.command(*arguments), env=self.environ, start_new_session=True,
            stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **kwargs,
        )  # fmt: skip
        self.processes.append(process)
        self.wait_for_record("running")
        return process

    def close(self):
        """Leave nothing running."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def wait_for_record(self, text):
        wait_until(lambda: self.record.exists() and text in self.record.read_text())

    def read_record(self):
        """The arguments, environment and files that RECORDER was given."""
        return json.loads(self.record.read_text())


@pytest.fixture(scope="module")
def port():
    with answering(ANSWERS, key=KEY) as number:
        yield number


@pytest.fixture
def desk(tmp_path, port, capfd):
    with closing(Desk(tmp_path, port, capfd)) as desk:
        yield desk


# What a client is given --------------------------------------------------------------------------


@pytest.mark.parametrize("name", launch.CLIENTS)
def test_a_client_is_given_url_key_model_and_context(desk, port, name):
    desk.install(name, RECORDER)

    result = desk.launch(name)

    assert result.returncode == 0, result.stderr
    record = desk.read_record()
    added_variables = {
        name: value
        for name, value in record["environment"].items()
        if name not in desk.environ
    }
    text = json.dumps([record["arguments"], added_variables, record["files"]])
    n_reply = CONTEXT // 8  # Copilot wants the tokens of prompt and reply apart
    context = CONTEXT - n_reply if name == "copilot" else CONTEXT
    for wanted in (f"http://127.0.0.1:{port}", KEY, MODEL, str(context)):
        assert wanted in text, wanted
    assert KEY not in json.dumps(record["arguments"])  # other users see those
    assert record["environment"]["HOME"] == str(desk.home)
    assert list(desk.home.iterdir()) == list(desk.temporary.iterdir()) == []  # after it


@pytest.mark.parametrize("name", ["pi", "openclaw", "opencode"])
def test_a_client_is_told_whether_the_model_sees(desk, name):
    """Else it leaves images out, or tells its model that it cannot send them."""
    desk.install(name, RECORDER)
    entry = {**ENTRY, "input_modalities": ["text", "image"]}

    for is_seeing, model in ((False, ENTRY), (True, entry)):
        answers = {**ANSWERS, "/v1/models": (200, {"data": [model]})}
        assert desk.launch_at(answers, name).returncode == 0
        record = desk.read_record()
        texts = [*record["environment"].values(), *record["files"].values()]
        text = "".join("".join(texts).split())
        assert ('"input":["text","image"]' in text) == is_seeing
        assert ('"input":["text"]' in text) != is_seeing


def test_files_that_clients_read_exist_while_they_run_and_are_private(desk):
    desk.install(
        "openclaw",
        RECORDER + "print(oct(os.stat(Path(next(iter(files))).parent).st_mode))",
    )

    result = desk.launch("openclaw")

    [text] = desk.read_record()["files"].values()
    default_model = json.loads(text)["agents"]["defaults"]["model"]
    assert default_model["primary"] == f"start-llm/{MODEL}"
    assert result.stdout.strip().endswith("700")


def test_no_path_of_a_single_start_is_told_to_openclaw(desk):
    """It would be in its system prompt, and the next session's begin with another one."""
    desk.install("openclaw", RECORDER)

    desk.launch("openclaw")
    own_state = desk.read_record()["environment"]["OPENCLAW_STATE_DIR"]
    desk.environ["OPENCLAW_STATE_DIR"] = "/of/the/person"
    desk.launch("openclaw")

    assert own_state == str(desk.home / ".openclaw")
    assert desk.read_record()["environment"]["OPENCLAW_STATE_DIR"] == "/of/the/person"


def test_small_gives_claude_code_its_lean_prompt_and_the_key_it_reads_there(desk):
    """A key in the environment it would first ask about, with No as its advice."""
    desk.install("claude", RECORDER)
    desk.environ["ANTHROPIC_AUTH_TOKEN"] = "of somebody else"
    desk.environ["ANTHROPIC_API_KEY"] = "of somebody else"

    desk.launch("claude")
    full_environment = desk.read_record()["environment"]
    desk.launch("claude", "--small")
    lean_record = desk.read_record()
    lean_environment = lean_record["environment"]

    assert "CLAUDE_CODE_SIMPLE" not in full_environment
    assert full_environment["ANTHROPIC_AUTH_TOKEN"] == KEY
    assert lean_environment["CLAUDE_CODE_SIMPLE"] == "1"
    [text] = lean_record["files"].values()
    helper = json.loads(text)["apiKeyHelper"]
    printed_key = subprocess.run(
        ["/bin/sh", "-c", helper], env={**lean_environment, "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert printed_key.strip() == KEY and KEY not in helper
    assert "of somebody else" not in json.dumps([full_environment, lean_environment])


def test_a_small_model_is_for_sub_agents_and_behind_litellm(desk):
    desk.install("claude", RECORDER)
    answers = as_proxy()
    answers["/v1/models"] = (200, {"data": [{"id": MODEL}, {"id": "small"}]})
    answers["/health/liveliness"] = (200, {})
    with answering(answers, key=KEY) as proxy_port:
        url = f"http://127.0.0.1:{proxy_port}"
        server = with_proxy({"state": "up", "url": url})
        desk.launch_at(server, "claude", "--small-model", "small")
        environment = desk.read_record()["environment"]
        refused_result = desk.launch_at(server, "claude", "--small-model", "smal")

    assert environment["ANTHROPIC_BASE_URL"] == url
    assert environment["ANTHROPIC_MODEL"] == MODEL
    assert environment["ANTHROPIC_DEFAULT_SONNET_MODEL"] == MODEL
    assert environment["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "small"
    assert environment["CLAUDE_CODE_SUBAGENT_MODEL"] == "small"
    refused(refused_result, "no model 'smal'", f"{MODEL}, small", "PROXY_MODELS=smal=")


def test_the_demo_model_is_said_to_be_not_for_agents(desk):
    desk.install("claude", RECORDER)

    result = desk.launch_at(with_model("demo", 131_072), "claude")

    assert result.returncode == 0 and desk.record.exists()
    assert result.stderr.count("the demo model is not for agents") == 1
    assert "--small" not in result.stderr


# Room --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", launch.CLIENTS)
def test_a_client_starts_only_where_its_first_prompt_and_a_reply_have_room(name):
    client = launch.CLIENTS[name]
    least = client.least_context()
    n_prompt = client.first_prompt
    enough = launch.Target("http://here", "", MODEL, least)
    short = replace(enough, context=least - 1)

    assert launch.explain_no_room(client, enough) == ""
    sentence = launch.explain_no_room(client, short)
    for n in (least, least - 1, n_prompt):
        assert f"{n:,}" in sentence, n


def test_without_room_nothing_is_started_but_print_shows_it(desk):
    desk.install("pi", RECORDER)

    answers = with_model(context=2_000)
    refused(desk.launch_at(answers, "pi"), "PI needs", "2,000")
    shown = desk.launch_at(answers, "pi", "--print")

    assert not desk.record.exists()
    assert shown.returncode == 0 and "PI needs" in shown.stderr


def test_claude_code_keeps_an_eighth_of_the_context_for_a_reply(desk):
    """Else it keeps 20,000 tokens free, and refuses any prompt in a context as small."""
    desk.install("claude", RECORDER)

    desk.launch_at(with_model(context=24_000), "claude")

    record = desk.read_record()
    assert record["environment"]["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "3000"
    [settings] = record["files"].values()
    assert '"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "3000"' in settings


@pytest.mark.parametrize("name", launch.CLIENTS)
def test_the_least_context_has_room_for_prompt_reply_and_what_is_kept_free(name):
    client = launch.CLIENTS[name]
    for is_small in (False, True):
        least = client.least_context(is_small=is_small)
        n_prompt = client.count_first_prompt(is_small=is_small)
        target = launch.Target("", "", MODEL, least, is_small)
        assert n_prompt + client.spare + target.output <= least


# LiteLLM -----------------------------------------------------------------------------------------


@pytest.fixture
def other_proxy(desk):
    """LiteLLM of another server, at the port that the settings of this shell name."""
    with answering(with_model("of-another-server"), key=KEY) as port:
        desk.environ["PROXY_PORT"] = str(port)
        yield port


def test_codex_goes_to_the_proxy_of_the_server_that_is_asked(desk, other_proxy):
    desk.install("codex", RECORDER)

    with answering(with_model("shown-name"), key=KEY) as proxy_port:
        url = f"http://127.0.0.1:{proxy_port}"
        report = {"state": "up", "url": url}
        with answering(with_proxy(report), key=KEY) as port:
            result = desk.launch("codex", "--url", f"http://127.0.0.1:{port}")

    assert result.returncode == 0, result.stderr
    arguments = desk.read_record()["arguments"]
    assert f'model_providers.start-llm.base_url="{url}/v1"' in arguments
    assert 'model="shown-name"' in arguments
    assert str(other_proxy) not in json.dumps(arguments)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("off", "ENABLE_PROXY"),
        ("port_taken", "PROXY_PORT"),
        ("from a later version", "from a later version"),
    ],
)
def test_why_there_is_no_proxy_is_one_sentence(desk, other_proxy, state, words):
    desk.install("codex", RECORDER)

    result = desk.launch_at(with_proxy({"state": state, "url": None}), "codex")

    refused(result, words, desk.environ["MLX_PORT"], "needs what only LiteLLM has")

    assert not desk.record.exists()


def test_a_proxy_that_is_starting_is_waited_for(desk, other_proxy):
    desk.install("codex", RECORDER)
    starting = {"state": "starting", "url": None}

    with answering(ANSWERS, key=KEY) as proxy_port:
        url = f"http://127.0.0.1:{proxy_port}"
        reports = [starting, starting, {"state": "up", "url": url}]
        result = desk.launch_at(with_proxy(*reports), "codex")

    assert result.returncode == 0, result.stderr
    assert result.stderr.count("still starting") == 1
    assert url in json.dumps(desk.read_record()["arguments"])


def test_where_there_are_replicas_every_client_goes_to_the_proxy(desk):
    """A conversation is to stay on its server, and only LiteLLM knows which that is."""
    desk.install("pi", RECORDER)

    with answering(as_proxy("shown-name"), key=KEY) as proxy_port:
        url = f"http://127.0.0.1:{proxy_port}"
        status = {
            "proxy": {"state": "up", "url": url},
            "replicas": [{"url": "http://one"}, {"url": "http://two"}],
        }
        result = desk.launch_at({**ANSWERS, "/v1/status": (200, status)}, "pi")

    assert result.returncode == 0, result.stderr
    assert f"shown-name at {url}" in result.stderr
    assert f":{desk.environ['MLX_PORT']}" not in json.dumps(desk.read_record())


@pytest.mark.parametrize("name", ["claude", "codex"])
def test_the_url_of_a_proxy_is_understood(desk, name):
    """As through a tunnel, where the server itself cannot be reached."""
    desk.install(name, RECORDER)
    key = desk.environ["PROXY_API_KEY"] = "sk-of-the-proxy"
    paths = []

    with answering(as_proxy("shown-name"), key=key, paths=paths) as port:
        url = f"http://127.0.0.1:{port}"
        result = desk.launch(name, "--url", f"{url}/v1")

    assert result.returncode == 0, result.stderr
    assert f"shown-name at {url}, {CONTEXT:,} tokens" in result.stderr
    record = desk.read_record()
    assert url in json.dumps(record)
    assert key in record["environment"].values()


@pytest.mark.parametrize(
    ("proxy_url", "server_url", "url"),
    [
        ("http://127.0.0.1:4000", "http://127.0.0.1:8090", "http://127.0.0.1:4000"),
        ("http://127.0.0.1:4000", "http://10.0.0.7:8080", "http://10.0.0.7:4000"),
        ("http://[::1]:4000", "http://mac.local", "http://mac.local:4000"),
        ("http://10.0.0.7:4000", "http://10.0.0.8:8080", "http://10.0.0.7:4000"),
    ],
)
def test_the_proxy_of_another_machine_is_reached_there(proxy_url, server_url, url):
    assert launch.seen_from_here(proxy_url, server_url) == url


# Codex -------------------------------------------------------------------------------------------


def read_catalogue(desk):
    """The model that Codex was told of."""
    record = desk.read_record()
    [(path, text)] = record["files"].items()
    assert f"model_catalog_json={json.dumps(path)}" in record["arguments"]
    [model] = json.loads(text)["models"]
    return model


def test_codex_is_told_what_its_model_can_do(desk):
    """Else it warns that it knows nothing of it, and has no tool that edits files."""
    desk.install("codex", RECORDER)

    desk.launch("codex")

    model = read_catalogue(desk)
    assert model["slug"] == MODEL and model["context_window"] == CONTEXT
    assert model["apply_patch_tool_type"] == "freeform"
    assert model["supports_search_tool"] is False
    assert "*** Begin Patch" in model["base_instructions"]


@pytest.mark.parametrize(
    ("report", "efforts"),
    [
        ({"reasoning_efforts": ["low", "medium", "xhigh"]}, ["low", "medium", "xhigh"]),
        ({"reasoning_efforts": []}, []),
        ({}, ["low", "medium", "high"]),
    ],
)
def test_codex_offers_the_efforts_of_the_template(desk, port, report, efforts):
    desk.install("codex", RECORDER)
    proxy = {"state": "up", "url": f"http://127.0.0.1:{port}"}
    status = {"model": report, "proxy": proxy}

    desk.launch_at({**ANSWERS, "/v1/status": (200, status)}, "codex")

    levels = read_catalogue(desk)["supported_reasoning_levels"]
    assert [level["effort"] for level in levels] == efforts


# From any folder ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_linked", [at_night(False), True])
def test_the_script_starts_a_client_where_no_python_is_on_path(desk, is_linked):
    """pyenv knows python3.12 in the clone alone, by its .python-version."""
    desk.install("pi", RECORDER)
    script = ROOT / "scripts" / "launch"
    if is_linked:
        (desk.home / "agent").symlink_to(script)
        script = desk.home / "agent"
    for name in ("sh", "dirname", "readlink"):
        (desk.bin / name).symlink_to(f"/bin/{name}")

    result = subprocess.run(
        [str(script), "pi", "--", "two  words"],
        env=desk.environ, cwd=desk.home, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip

    assert result.returncode == 0, result.stderr
    record = desk.read_record()
    assert record["arguments"][-1] == "two  words"
    assert record["environment"]["PWD"] == str(desk.home)


def test_claude_code_has_its_variables_as_settings_too(desk):
    """Those in the person's settings.json win over the environment, not over --settings.

    Its automatic mode lets no call run that a service of Anthropic's has not seen.
    """
    desk.install("claude", RECORDER)

    desk.launch("claude")

    record = desk.read_record()
    assert record["arguments"][0] == "--settings"
    settings = json.loads(record["files"][record["arguments"][1]])
    assert settings["env"]["ANTHROPIC_AUTH_TOKEN"] == KEY
    assert settings["env"]["CLAUDE_CODE_TOTAL_TOKENS_REMINDER"] == "off"
    assert settings["env"].items() <= record["environment"].items()
    assert settings["disableAutoMode"] == "disable"


def test_variables_that_lead_a_client_elsewhere_do_not_reach_it(desk):
    desk.install("claude", RECORDER)
    elsewhere = {"ANTHROPIC_API_KEY": "sk-ant", "CLAUDE_CODE_USE_BEDROCK": "1"}
    desk.environ.update(elsewhere)
    desk.environ["HTTP_PROXY"] = "http://10.9.9.9:1"
    desk.environ["NO_PROXY"] = "x.org"

    result = desk.launch("claude")

    assert result.returncode == 0, result.stderr
    environment = desk.read_record()["environment"]
    assert not elsewhere.keys() & environment.keys()
    assert environment["NO_PROXY"] == "x.org,127.0.0.1"


def test_a_client_that_was_launched_is_answered_by_the_real_server(desk, folder):
    desk.install("qwen", """
import json, os, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "max_tokens": 8,
        "messages": [{"role": "user", "content": "Hello"}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
print(json.load(urllib.request.urlopen(request))["usage"]["completion_tokens"])
""")  # fmt: skip

    with Served(folder, api_key=KEY) as served:
        desk.environ["MLX_PORT"] = str(served.state.config.mlx_port)
        result = desk.launch("qwen")

    assert result.returncode == 0, result.stderr
    assert 1 <= int(result.stdout) <= 8


@pytest.mark.parametrize("python", NEWER_PYTHONS, ids=lambda path: path.parts[-3])
def test_a_newer_python_launches_as_well(desk, python):
    desk.install("pi", RECORDER)

    result = desk.run("pi", python=str(python))

    assert result.returncode == 0, result.stderr
    assert "--provider" in desk.read_record()["arguments"]


# What is shown -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", launch.CLIENTS)
def test_print_shows_everything_but_the_key_and_starts_nothing(desk, port, name):
    desk.install(name, RECORDER)

    result = desk.launch(name, "--print")

    assert result.returncode == 0 and not desk.record.exists()
    assert f"http://127.0.0.1:{port}" in result.stdout and MODEL in result.stdout
    assert KEY not in result.stdout + result.stderr
    assert launch.MASK in result.stdout and "--show-key" in result.stderr
    assert list(desk.temporary.iterdir()) == []


def test_what_print_shows_is_what_a_shell_runs(desk):
    desk.install("qwen", RECORDER)
    shown = desk.launch("qwen", "--print", "--show-key", "--", "it's $HOME").stdout

    subprocess.run(["/bin/sh", "-c", shown], env=desk.environ, check=True, timeout=60)

    record = desk.read_record()
    assert record["arguments"] == ["--auth-type", "openai", "it's $HOME"]
    assert record["environment"]["OPENAI_API_KEY"] == KEY


# Its end -----------------------------------------------------------------------------------------


def test_the_exit_status_is_that_of_the_client(desk):
    desk.install("pi", "raise SystemExit(7)")
    assert desk.run("pi").returncode == 7

    desk.install("pi", "import os; os.kill(os.getpid(), 9)")
    assert desk.run("pi").returncode == 128 + 9


@pytest.mark.parametrize("name", [at_night("codex"), "openclaw"])  # with files
def test_a_signal_reaches_the_client_and_its_end_is_awaited(desk, name):
    desk.install(name, COUNTER)
    process = desk.start(name)

    process.send_signal(signal.SIGINT)
    desk.wait_for_record("interrupted 1")
    process.terminate()

    assert process.wait(60) == 41
    assert list(desk.temporary.iterdir()) == []


def test_ctrl_c_at_a_terminal_reaches_the_client_once(desk):
    desk.install("claude", COUNTER)
    terminal, inner = pty.openpty()
    program = (
        "import fcntl, os, sys, termios;"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *desk.command("claude")], env=desk.environ,
        stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
    )  # fmt: skip
    os.close(inner)
    desk.processes.append(process)
    desk.wait_for_record("running")

    os.write(terminal, b"\x03")
    desk.wait_for_record("interrupted")
    process.terminate()

    assert process.wait(60) == 41  # a second one would make it 42
    os.close(terminal)


# Mistakes ----------------------------------------------------------------------------------------


def refused(result, *words):
    """Check that a launch ended with 2 and one sentence that has these words."""
    assert result.returncode == 2 and result.stdout == ""
    [line] = result.stderr.splitlines()
    for word in words:
        assert word in line, line
    assert KEY not in line


def test_without_a_server_the_sentence_starts_one(desk):
    desk.environ["MLX_PORT"] = str(free_port())

    result = desk.launch("claude")

    refused(result, "no server answers", "install_and_run.py", "--url")


@pytest.mark.parametrize(
    ("health", "words"),
    [
        ((503, {"status": "loading"}), "still loads its model"),
        ((503, {"status": "error", "error": "out of memory"}), "out of memory"),
        ((200, {}), "is no start-llm"),
        ((404, {"status": "ok"}), "is no start-llm"),
    ],
)
def test_a_server_that_cannot_answer_now_is_named(desk, health, words):
    desk.install("claude", RECORDER)
    refused(desk.launch_at({**ANSWERS, "/health": health}, "claude"), words)
    assert not desk.record.exists()


def test_a_client_that_is_not_installed_is_named_with_its_npm_line(desk):
    for name, client in launch.CLIENTS.items():
        refused(desk.launch(name), f"npm install -g {client.package}")


def test_a_key_that_the_server_refuses_is_named_as_such(desk):
    desk.environ["API_KEY"] = "sk-wrong"
    refused(desk.launch("claude"), "does not take the key", "API_KEY", "--key")


def test_a_url_that_is_none_is_one_sentence(desk):
    for url in ("http://127.0.0.1:80x", "nonsense", "http://"):
        refused(desk.launch("claude", "--url", url), "no server answers")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "client"),
        (["nobody"], "no client 'nobody'. There are claude, "),
        (["claud"], "no client 'claud': did you mean claude?"),
        (["pi", "--small"], "--small is for claude"),
        (["claude", "-p", "Hello"], "after --"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_with_the_usage(desk, arguments, words):
    result = desk.launch(*arguments)

    assert result.returncode == 2 and words in result.stderr
    assert "Traceback" not in result.stderr


# Settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "MLX_PORT=9000\nAPI_KEY=one,two\n",
        "export MLX_PORT='9001' # mine\nAPI_KEY=\" , three \"\n",
        "PORT=9002\nMLX_PORT=${PORT}\nAPI_KEY=\n# API_KEY=four\n",
        "MLX_PORT\nMLX_HOST=::1\n",
        "\ufeffMLX_PORT=9003\r\nAPI_KEY=a#b\r\n",
    ],
)
def test_settings_are_read_as_the_server_reads_them(tmp_path, monkeypatch, text):
    env_file = tmp_path / ".env"
    env_file.write_text(text, encoding="utf-8")
    monkeypatch.delenv("MLX_PORT", raising=False)
    options = launch.read_arguments(["pi"])

    settings = launch.read_settings(env_file, {})
    server, _ = launch.find_places(options, settings)

    config = s.Config.from_env(dotenv_values(env_file))
    keys = s.split_list(config.api_key)
    assert server.url == launch.url_of(config.mlx_host, str(config.mlx_port))
    assert server.key == (keys[0] if keys else "")


def test_the_environment_wins_over_env_and_an_empty_variable_is_none(tmp_path):
    env_file = tmp_path / ".env"
    env_file.write_text("MLX_PORT=9000\nPROXY_PORT=9001\n")
    environ = {"MLX_PORT": "9002", "PROXY_PORT": ""}

    assert launch.read_settings(env_file, environ) == {"MLX_PORT": "9002"}
