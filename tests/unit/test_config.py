"""CONFIG: one list of settings, every bad value told at once, nothing silently ignored."""

import re
from pathlib import Path

import pytest
import start_llm as s
from dotenv import dotenv_values
from hypothesis import given
from hypothesis import strategies as st

EXAMPLE = Path(__file__).parents[2] / ".env.example"
RESERVED = {"CACHE_SESSION_PARTITIONING", "QUANTIZED_KV_START"}
ALL = {name.upper() for name in s.Config.model_fields} | RESERVED
LINE = re.compile(r"^(#?)([A-Z][A-Z0-9_]*)=(.*)$", re.MULTILINE)

ORIGINAL = """
MODEL_PATH MODEL_FAMILY PROXY_MODEL_ID MLX_HOST MLX_PORT PROXY_PORT PROXY_STARTUP_WAIT_SECONDS
MAX_KV_SIZE KV_GROUP_SIZE KV_BITS KV_QUANT_SCHEME QUANTIZED_KV_START PROMPT_CACHE_MAX_ENTRIES_GLOBAL
PROMPT_CACHE_MAX_ENTRIES_PER_SESSION PROMPT_CACHE_TTL_SECONDS PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS
PROMPT_CACHE_BLOCK_SIZE CACHE_USE_BLOCK_INDEX CACHE_CANONICALIZE_TOOL_CONTEXT
CACHE_VLM_IMAGE_IDENTITY CACHE_SESSION_PARTITIONING CACHE_NORM_SAFETY_CHECK
NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT DEFAULT_TEMPERATURE DEFAULT_TOP_P DEFAULT_TOP_K
DEFAULT_MIN_P DEFAULT_REPETITION_PENALTY DEFAULT_REPETITION_CONTEXT_SIZE DEFAULT_MAX_TOKENS
DEFAULT_THINKING PRESERVE_THINKING GENERATION_WATCHDOG_SECONDS ENABLE_REQUEST_LOGGING LOG_ROOT
VLM_CACHE_DEBUG
"""

BAD = {
    "MLX_HOST": ["0.0.0.0", "::", "192.168.1.7", "localhost.lan", "*"],
    "PROXY_HOST": ["0.0.0.0"],
    "CACHE_ISOLATION": ["KEY", "session"],
    "MLX_PORT": ["0", "65536", "-1", "http", "80.5"],
    "PROXY_PORT": ["0", "70000"],
    "DEFAULT_TEMPERATURE": ["-0.1", "2.1", "warm", "nan", "inf"],
    "DEFAULT_TOP_P": ["0", "1.1"],
    "DEFAULT_TOP_K": ["-1", "1.5"],
    "DEFAULT_MIN_P": ["-0.1", "1.1"],
    "DEFAULT_REPETITION_PENALTY": ["0", "-1"],
    "DEFAULT_THINKING": ["maybe", "2"],
    "MODEL_FAMILY": ["llama"],
    "LOG_LEVEL": ["LOUD"],
    "MAX_BODY_BYTES": ["0", "64MiB"],
    "BATCH_PADDING_MAX": ["-0.01", "1.01"],
    "KEEPALIVE_SECONDS": ["0", "-1", "nan"],
    "PROMPT_CACHE_TTL_SECONDS": ["-1", "inf"],
    "PROMPT_CACHE_BLOCK_SIZE": ["0"],
}


def example_settings():
    return [m.groups() for m in LINE.finditer(EXAMPLE.read_text())]


def test_every_setting_of_the_original_exists():
    acting = {name.upper() for name in s.Config.model_fields}
    assert set(ORIGINAL.split()) <= acting | RESERVED
    assert not acting & RESERVED


def test_the_example_lists_every_setting_once_with_its_default():
    names = [name for _, name, _ in example_settings()]
    assert sorted(names) == sorted(ALL)

    values = {name: text for _, name, text in example_settings()}
    settings = {name: values[name] for name in values.keys() - RESERVED}
    assert s.Config.from_env(settings) == s.Config()

    # An empty default is written as empty, nothing else is.
    for name, text in settings.items():
        default = s.Config.model_fields[name.lower()].default
        assert (text == "") == (default in ("", None, frozenset())), name


def warnings_of_main(monkeypatch, written, environ):
    """What the program says of its settings' names before it ends for want of a model."""
    warnings = []

    def build(config, **_):
        raise s.ConfigError("enough")

    monkeypatch.setattr(s, "_read_env_file", lambda path: written)
    monkeypatch.setattr(s, "build_state", build)
    monkeypatch.setattr(s, "start_logging", lambda config: None)
    monkeypatch.setattr(
        s.logger, "warning", lambda text, *parts: warnings.append(text % parts)
    )
    monkeypatch.setattr("os.environ", environ)
    monkeypatch.setattr("sys.argv", ["start-llm.py"])

    assert s.main() == 2
    return warnings


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"A=1\nB=\xe8\n", "{path}, line 2: it is no UTF-8 text"),
        (b"# ours\n\nMLX_PORT 9000\n", "{path}, line 3: it is no NAME=value"),
        (b"MODEL_PATH='a\n", "{path}, line 1: it is no NAME=value"),
        (
            b"MLX_PORT=0\n",
            "MLX_PORT='0' in {path}: should be greater than or equal to 1",
        ),
    ],
)
def test_a_fault_in_the_env_file_names_the_file(
    monkeypatch, capsys, tmp_path, content, sentence
):
    path = tmp_path / ".env"
    path.write_bytes(content)
    monkeypatch.setattr(s, "__file__", str(tmp_path / "start-llm.py"))
    monkeypatch.setattr("sys.argv", ["start-llm.py"])
    monkeypatch.delenv("MLX_PORT", raising=False)

    assert s.main() == 2

    message = capsys.readouterr().err
    assert message == f"start-llm: {sentence.format(path=path)}\n"


def test_a_bad_value_names_where_it_stands(monkeypatch):
    monkeypatch.setattr(
        s, "_read_env_file", lambda _: {"MLX_PORT": "0", "PROXY_PORT": "0"}
    )
    monkeypatch.setattr("os.environ", {"MLX_PORT": "x", "DEFAULT_TOP_K": "-1"})

    with pytest.raises(s.ConfigError) as caught:
        s._read_config({"MLX_HOST": "0.0.0.0"})

    env_file = Path(s.__file__).parent / ".env"
    assert set(str(caught.value).splitlines()) == {
        "MLX_PORT='x' in the environment: should be a valid integer, "
        "unable to parse string as an integer",
        f"PROXY_PORT='0' in {env_file}: should be greater than or equal to 1",
        "DEFAULT_TOP_K='-1' in the environment: should be greater than or equal to 0",
        "MLX_HOST='0.0.0.0' on the command line: should be used only where API_KEY is set",
    }


def test_a_copied_example_changes_nothing_and_warns_of_nothing(monkeypatch):
    env = dotenv_values(EXAMPLE)
    assert env
    assert s.Config.from_env(env) == s.Config()
    assert warnings_of_main(monkeypatch, env, {}) == []


@given(
    st.sets(st.sampled_from(sorted(BAD)), min_size=1).flatmap(
        lambda names: st.fixed_dictionaries({n: st.sampled_from(BAD[n]) for n in names})
    )
)
def test_all_bad_values_are_told_at_once(env):
    good = {"LOG_ROOT": "0.0.0.0", "MAX_KV_SIZE": "4096"}
    with pytest.raises(s.ConfigError) as caught:
        s.Config.from_env(env | good)

    lines = str(caught.value).splitlines()
    assert {line.partition("=")[0] for line in lines} == set(env)
    for name, text in env.items():
        sentences = [line for line in lines if line.startswith(f"{name}={text!r}: ")]
        assert len(sentences) == 1
        assert "should" in sentences[0] or "valid" in sentences[0]


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        *(("PROXY_REPLICAS", *row) for row in (
            ("http://K3Y@other:80/v1", r": other:80/v1 is none"),
            ("other:8080", r"other:8080 is none"),
            ("http://K3Y@", r": {2}is none"),
            ("http://K3Y@other:x", r": other:x is none"),
            ("http://K3Y@other:0", r": other:0 is none"),
            ("http://K3Y@other:65536", r": other:65536 is none"),
            ("http://a:1,http://K3Y@a:1", r"http://a:1 is there twice"),
            ("http://A:1,http://a:1/", r"http://a:1 is there twice"),
            ("http://a,http://K3Y@a:80", r"http://a:80 is there twice"),
            ("http://K3Y@[FE80::1]:1,http://[fe80::1]:1", r"http://\[fe80::1\]:1 is there"),
            ("http://LocalHost:8080", r"http://127.0.0.1:8080 is this one"),
            ("http://0.0.0.0:8080/", r"http://127.0.0.1:8080 is this one"))),
        *(("PROXY_MODELS", *row) for row in (
            ("small", "small is none"),
            ("small=", "small= is none"),
            ("*=http://a:1", r"\*=http://a:1 is none"),
            ("=http://K3Y@a:1", "a:1 is none"),
            ("small=ftp://a", "ftp://a is none"),
            ("a=http://x:1,a=http://K3Y@y:2", "a is there twice"),
            ("small=http://localhost:8080", "http://127.0.0.1:8080 is this one"))),
    ],
)  # fmt: skip
def test_a_bad_server_in_a_list_is_told_without_its_key(name, text, fault):
    with pytest.raises(s.ConfigError, match=rf"{name}=.*{fault}") as caught:
        s.Config.from_env({name: text})
    assert "K3Y" not in str(caught.value)


def test_replicas_have_keys_that_are_in_no_output():
    config = s.Config.from_env(
        {"PROXY_REPLICAS": "http://one.local:8080/, https://k/:y@two.local"}
    )
    assert s.read_replicas(config.proxy_replicas) == [
        ("http://one.local:8080", ""),
        ("https://two.local:443", "k/:y"),
    ]
    assert "two" not in repr(config)


def test_models_of_other_servers_have_names_of_their_own():
    text = "small=http://127.0.0.1:8081, org/Big-4bit=http://K3Y==@b.local"
    config = s.Config.from_env({"PROXY_MODELS": text})
    assert s.read_models(config.proxy_models) == {
        "small": ("http://127.0.0.1:8081", ""),
        "org/Big-4bit": ("http://b.local:80", "K3Y=="),
    }
    assert "K3Y" not in repr(config)
    with pytest.raises(s.ConfigError, match="small is PROXY_MODEL_ID"):
        s.Config.from_env({"PROXY_MODELS": text, "PROXY_MODEL_ID": "small"})


def test_rules_that_are_off_are_named():
    off = s.Config.from_env({"RULES_OFF": "timestamp, Reminder"}).rules_off
    assert off == {"timestamp", "reminder"}
    with pytest.raises(s.ConfigError, match=r"RULES_OFF='stamp': should be 'billing_"):
        s.Config.from_env({"RULES_OFF": "stamp"})
    assert s.check_names({"RULE_TIMESTAMP": "off"}, {}) == [
        "RULE_TIMESTAMP in .env: nothing acts on it; did you mean RULES_OFF?"
    ]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("LOG_LEVEL", "debug", "DEBUG"),
        ("MLX_PORT", " 9090 ", 9090),
        ("DEFAULT_TEMPERATURE", "0", 0.0),
        ("DEFAULT_THINKING", "False", False),
        ("BATCH_PADDING_MAX", "1", 1.0),
        ("PROMPT_CACHE_MAX_ENTRIES_GLOBAL", "0", 0),
        ("GENERATION_WATCHDOG_SECONDS", "0", 0.0),
        ("MODEL_PATH", "org/name", "org/name"),
        ("MLX_HOST", "127.1.2.3", "127.1.2.3"),
        ("MLX_HOST", "::1", "::1"),
        ("MLX_HOST", "[::1]", "::1"),
        ("PROXY_HOST", "LocalHost", "LocalHost"),
        ("CACHE_ISOLATION", "None", "none"),
    ],
)
def test_good_values_are_taken(name, text, value):
    config = s.Config.from_env({name: text})
    assert getattr(config, name.lower()) == value

    other_values = config.model_dump()
    del other_values[name.lower()]
    assert other_values.items() <= s.Config().model_dump().items()


@pytest.mark.parametrize("name", ["MLX_HOST", "PROXY_HOST"])
@pytest.mark.parametrize("text", ["http://127.0.0.1", "127.0.0.1:8080"])
def test_a_host_that_is_a_url_or_has_a_port_is_said_to_be_no_address(name, text):
    with pytest.raises(s.ConfigError, match="without http:// or port"):
        s.Config.from_env({name: text})


OPEN = {"MLX_HOST": "0.0.0.0", "PROXY_HOST": "0.0.0.0", "CACHE_ISOLATION": "key"}


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({}, set(OPEN)),
        ({"API_KEY": " , "}, set(OPEN)),
        ({"PROXY_API_KEY": "k"}, {"MLX_HOST", "CACHE_ISOLATION"}),
        ({"API_KEY": "k"}, set()),
        ({"API_KEY": "k, l", "PROXY_API_KEY": "m"}, set()),
    ],
)
def test_what_others_reach_needs_a_key(keys, refused):
    refusal = ""
    try:
        assert s.Config.from_env(OPEN | keys).mlx_host == "0.0.0.0"
    except s.ConfigError as error:
        refusal = str(error)
    assert {line.partition("=")[0] for line in refusal.splitlines()} == refused
    assert all("API_KEY is set" in line for line in refusal.splitlines())


def test_empty_and_unknown_variables_are_not_settings():
    assert (
        s.Config.from_env({"MLX_PORT": "", "LOG_LEVEL": "  ", "PATH": "/bin"})
        == s.Config()
    )
    assert s.Config.from_env({"mlx_port": "1"}) == s.Config()


def test_it_is_frozen_and_keeps_the_token_to_itself():
    config = s.Config(hf_token="hf_secret", api_key="sk_secret")
    with pytest.raises(ValueError, match="frozen"):
        config.mlx_port = 1
    assert "_secret" not in repr(config)
    with pytest.raises(ValueError, match="no_such_setting"):
        s.Config(no_such_setting=1)


def test_every_unknown_name_in_the_env_file_is_named_with_the_nearest_setting(
    monkeypatch,
):
    """.env is ours alone, so a name in small letters is a mistake, too."""
    written = {
        "CAT": "tabby",
        "LOG_PATH": "/var/log",
        "PORT": "9000",
        "PROMPT_CACHE_MAX_BYTE": "1",
        "mlx_port": "1",
        "MLX_PORT": "8080",
        "API_KEY": "",
    }
    environ = {"PATH": "x", "HOME": "/", "OTHER": "y"}

    warnings = warnings_of_main(monkeypatch, written, environ)

    sentence = "in .env: nothing acts on it"
    assert warnings == [
        f"CAT {sentence}",
        f"LOG_PATH {sentence}; did you mean LOG_ROOT?",
        f"PORT {sentence}; did you mean MLX_PORT?",
        f"PROMPT_CACHE_MAX_BYTE {sentence}; did you mean PROMPT_CACHE_MAX_BYTES?",
        f"mlx_port {sentence}; did you mean MLX_PORT?",
    ]


def test_a_setting_in_small_letters_or_with_two_swapped_is_recognized():
    """But two are too short, and DEFAULT_TOPK_ is as near to DEFAULT_TOP_P."""
    too_short = {"API_KEY", "KV_BITS", "DEFAULT_TOP_K", "MODEL_PATH"}
    for setting in ALL - RESERVED - too_short:
        swapped = setting[:-2] + setting[-1] + setting[-2]
        for name in {swapped, setting.lower()} - ALL:
            (sentence,) = s.check_names({name: "x"}, {})
            assert f"did you mean {setting}?" in sentence


def test_the_environment_belongs_to_all_programs():
    assert s.check_names({}, {"MLX_PROT": "9000", "MODEL": "x", "PATH": "/"}) == []


@pytest.mark.parametrize(
    "name", ["MODELPATH", "MODEL", "model_path", "MODEL_PATHS", "MODLE_PATH"]
)
def test_a_near_miss_of_the_model_stops_the_start(monkeypatch, capsys, name):
    assert warnings_of_main(monkeypatch, {name: "some/Model"}, {}) == []
    assert capsys.readouterr().err == (
        f"start-llm: {name} in .env: nothing acts on it; "
        "did you mean MODEL_PATH? Rename or remove it: as it is, another model would "
        "be served\n"
    )


def test_the_model_of_an_option_is_meant_whatever_is_misspelt(monkeypatch):
    written = {"MODELPATH": "other/Model"}
    monkeypatch.setattr(s, "_read_env_file", lambda path: written)
    monkeypatch.setattr(s, "start_logging", lambda config: None)
    monkeypatch.setattr("os.environ", {})
    config = s._read_config({"MODEL_PATH": "some/Model"})
    assert config.model_path == "some/Model"
    with pytest.raises(s.ConfigError):
        s._read_config({})


@pytest.mark.parametrize("name", ["MODEL", "MODEL_NAME", "MODEL_ID", "MODEL_DIR"])
def test_what_can_only_mean_the_model_stops_the_start_in_the_env_file(name):
    with pytest.raises(s.ConfigError, match=r"did you mean MODEL_PATH\?"):
        s.check_names({name: "some/Model"}, {})
    assert s.check_names({name: "", "MLX_PORT": "1"}, {}) != []
    assert s.check_names({name: "x", "MODEL_PATH": "some/Model"}, {}) != []
    assert s.check_names({name: "x"}, {"MODEL_PATH": "some/Model"}) != []
    with pytest.raises(s.ConfigError):
        s.check_names({name: "x", "MODEL_PATH": ""}, {"MODEL_PATH": ""})


def test_an_option_wins_over_the_environment_and_the_env_file(monkeypatch):
    monkeypatch.setattr(
        s, "_read_env_file", lambda _: {"MLX_PORT": "1", "MODEL_PATH": "file"}
    )
    monkeypatch.setenv("MLX_PORT", "2")
    monkeypatch.delenv("MODEL_PATH", raising=False)

    config = s._read_config({"MLX_PORT": "3"})

    assert (config.mlx_port, config.model_path) == (3, "file")
    assert s._read_config({}).mlx_port == 2
    monkeypatch.setenv("MLX_PORT", "")
    assert s._read_config({}).mlx_port == 8080  # an empty variable hides .env's
