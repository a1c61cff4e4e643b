"""The steps of agents, asked of a server by both APIs: what is sent, counted and told."""

import json

import agent_steps
import pytest
from nights import at_night

SHORT = ["--tokens", "120", "--result-tokens", "20", "--reply-tokens", "12"]


@pytest.fixture(scope="module")
def server(served):
    return f"http://127.0.0.1:{served.state.config.mlx_port}"


def run(tmp_path, *options):
    """The steps of each server, after the program has ended well."""
    file = tmp_path / "steps.json"
    assert agent_steps.main([*options, "--json", str(file)]) == 0
    return [server["steps"] for server in json.loads(file.read_text())["servers"]]


@pytest.mark.parametrize("api", [at_night("openai"), "anthropic"])
def test_each_agent_finds_its_past_and_the_fewest_are_about_right(
    server, api, tmp_path, capsys
):
    (steps,) = run(tmp_path, "--url", server, "--api", api, "--steps", "4", *SHORT)

    kinds = {(step["agent"], step["kind"]) for step in steps}
    assert {agent for agent, _ in kinds} == set(agent_steps.AGENTS)
    assert {"title", "sub-agent", "edit", "compaction"} <= {kind for _, kind in kinds}
    for step in steps:
        assert 0 < step["first_token"] <= step["seconds"]
        if step["kind"] == "first":
            assert step["fewest_tokens"] == step["prompt_tokens"]
            assert step["read_tokens"] > 0.8 * step["prompt_tokens"]
        if step["kind"] == "step":
            assert step["fewest_tokens"] < step["prompt_tokens"] / 2
            # A template ends and begins turns: what it writes there is in no reply.
            assert step["read_tokens"] < step["fewest_tokens"] + 120
    printed = capsys.readouterr().out
    for label in ("openclaw, step", "to 4,000 tokens", "all "):
        assert label in printed


def test_two_servers_are_asked_the_same_in_turns(server, tmp_path):
    options = ["--url", server, "--against", server, "--agents", "pi", "--steps", "2"]
    first, second = run(tmp_path, *options, *SHORT)

    assert [s["kind"] for s in first] == [s["kind"] for s in second]
    assert [s["prompt_tokens"] for s in first] == [s["prompt_tokens"] for s in second]


def test_a_server_that_refuses_is_named_with_its_words(server, capsys):
    options = ["--url", server, "--agents", "pi"]
    assert agent_steps.main([*options, "--tokens", "200000"]) == 2
    assert "/v1/chat/completions answers 400: " in capsys.readouterr().err

    assert agent_steps.main(["--url", "http://127.0.0.1:9"]) == 2
    assert "does not answer" in capsys.readouterr().err
