"""CONFIG: one list of settings, every bad value told at once, nothing silently ignored."""

import re
from pathlib import Path

import pytest
import start_llm
from dotenv import dotenv_values
from hypothesis import given
from hypothesis import strategies as st
from start_llm import Config, ConfigError

EXAMPLE = Path(__file__).parents[1] / ".env.example"
RESERVED = {"KV_BITS", "KV_GROUP_SIZE", "KV_QUANT_SCHEME", "QUANTIZED_KV_START"}
RESERVED |= {"CACHE_SESSION_PARTITIONING"}
ALL = {name.upper() for name in Config.model_fields} | RESERVED
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
    acting = {name.upper() for name in Config.model_fields}
    assert set(ORIGINAL.split()) <= acting | RESERVED
    assert not acting & RESERVED


def test_the_example_lists_every_setting_once_with_its_default():
    names = [name for _, name, _ in example_settings()]
    assert sorted(names) == sorted(ALL)
    settings = [each for each in example_settings() if each[1] not in RESERVED]
    assert Config.from_env({name: text for _, name, text in settings}) == Config()
    for _, name, text in settings:  # an empty default is written as empty, nothing else is
        default = Config.model_fields[name.lower()].default
        assert (text == "") == (default == ""), name


def test_the_example_marks_and_comments_out_what_does_not_act():
    commented = {name for hash_sign, name, _ in example_settings() if hash_sign}
    assert commented == RESERVED
    described = re.findall(r"^# (.+)\n#?([A-Z0-9_]+)=", EXAMPLE.read_text(), re.MULTILINE)
    assert {name for _, name in described} == ALL
    assert {name for text, name in described if "not yet acting" in text} == commented


def told_by_main(monkeypatch, written, environ):
    """What the program says of its settings' names before it ends for want of a model."""
    told = []

    def build(config):
        raise ConfigError("enough")

    monkeypatch.setattr(start_llm, "dotenv_values", lambda path: written)
    monkeypatch.setattr(start_llm, "build_state", build)
    monkeypatch.setattr(start_llm, "start_logging", lambda config: None)
    monkeypatch.setattr(start_llm.log, "warning", lambda text, *parts: told.append(text % parts))
    monkeypatch.setattr("os.environ", environ)
    monkeypatch.setattr("sys.argv", ["start-llm.py"])
    assert start_llm.main() == 2
    return [line.partition(" in .env: nothing acts on it")[0] for line in told]


def test_an_env_file_in_another_encoding_is_one_sentence(monkeypatch, capsys):
    def read(path):
        return {"A": b"\xe8".decode("utf-8")}

    monkeypatch.setattr(start_llm, "dotenv_values", read)
    monkeypatch.setattr("sys.argv", ["start-llm.py"])
    assert start_llm.main() == 2
    assert capsys.readouterr().err.startswith("start-llm: .env: 'utf-8' codec can't decode")


def test_a_copied_example_changes_nothing_and_warns_of_nothing(monkeypatch):
    env = dotenv_values(EXAMPLE)
    assert env
    assert Config.from_env(env) == Config()
    assert told_by_main(monkeypatch, env, {}) == []


@given(
    st.sets(st.sampled_from(sorted(BAD)), min_size=1).flatmap(
        lambda names: st.fixed_dictionaries({n: st.sampled_from(BAD[n]) for n in names})
    )
)
def test_all_bad_values_are_told_at_once(env):
    good = {"LOG_ROOT": "0.0.0.0", "MAX_KV_SIZE": "4096"}
    with pytest.raises(ConfigError) as caught:
        Config.from_env(env | good)
    lines = str(caught.value).splitlines()
    assert {line.partition("=")[0] for line in lines} == set(env)
    for name, text in env.items():
        told = [line for line in lines if line.startswith(f"{name}={text!r}: ")]
        assert len(told) == 1
        assert "should" in told[0] or "valid" in told[0]


def test_the_allowed_range_is_told():
    with pytest.raises(ConfigError, match=r"MLX_PORT='70000': should be .* 65535"):
        Config.from_env({"MLX_PORT": "70000"})
    with pytest.raises(ConfigError, match=r"LOG_LEVEL='LOUD': should be 'DEBUG', 'INFO', "):
        Config.from_env({"LOG_LEVEL": "LOUD"})


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
        ("PROXY_HOST", "LocalHost", "LocalHost"),
        ("CACHE_ISOLATION", "None", "none"),
    ],
)
def test_good_values_are_taken(name, text, value):
    config = Config.from_env({name: text})
    assert getattr(config, name.lower()) == value
    others = {n: v for n, v in config.model_dump().items() if n != name.lower()}
    assert others.items() <= Config().model_dump().items()


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
    told = ""
    try:
        assert Config.from_env(OPEN | keys).mlx_host == "0.0.0.0"
    except ConfigError as error:
        told = str(error)
    assert {line.partition("=")[0] for line in told.splitlines()} == refused
    assert all("API_KEY is set" in line for line in told.splitlines())


def test_empty_and_unknown_variables_are_not_settings():
    assert Config.from_env({"MLX_PORT": "", "LOG_LEVEL": "  ", "PATH": "/bin"}) == Config()
    assert Config.from_env({"mlx_port": "1"}) == Config()


def test_it_is_frozen_and_keeps_the_token_to_itself():
    config = Config(hf_token="hf_secret", api_key="sk_secret")
    with pytest.raises(ValueError, match="frozen"):
        config.mlx_port = 1
    assert "_secret" not in repr(config)
    with pytest.raises(ValueError, match="no_such_setting"):
        Config(no_such_setting=1)


def test_what_is_set_without_effect_is_named(monkeypatch):
    """A name misspelt or in small letters too, in .env, which is ours alone."""
    written = {"KV_BITS": "4", "MODEL_PTH": "x", "mlx_port": "1", "MLX_PORT": "8080", "API_KEY": ""}
    environ = {"PATH": "x", "HOME": "/", "OTHER": "y"}
    assert told_by_main(monkeypatch, written, environ) == ["KV_BITS", "MODEL_PTH", "mlx_port"]


def test_the_readme_lists_every_setting_once_with_its_default():
    readme = (EXAMPLE.parent / "README.md").read_text()
    rows = re.findall(r"^\| `([A-Z][A-Z0-9_]*)` \| (?:`(.*?)`|\(empty\)) \|", readme, re.MULTILINE)
    assert rows == [(name, value) for _, name, value in example_settings()]
