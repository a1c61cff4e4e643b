"""The report on a machine: complete, anonymous, and red where warm differs from cold."""

import getpass
import json
import socket
from dataclasses import replace
from pathlib import Path

import machine_report as report
import pytest
from tiny_models import DENSE

ROOT = Path(__file__).resolve().parents[2]
SHORT = replace(
    report.QUICK, prompt_tokens=(600,), shared_tokens=60, file_lines=3, parity_tokens=8
)
STATUS = {
    "version": "1.0.0",
    "model": {"id": "demo", "family": "qwen3", "bytes": 1, "context_length": 4_096},
}


@pytest.mark.slow
def test_machine_report_measures_all_and_warm_equals_cold(
    models, tmp_path, monkeypatch
):
    monkeypatch.setattr(report, "QUICK", SHORT)
    report_file = tmp_path / "report.json"
    folder = str(models(DENSE))

    status = report.main(
        ["--quick", "--model", folder, "--out", str(report_file), "--json"]
    )

    figures = json.loads(report_file.read_text("utf-8"))["figures"]
    unknown = {name for name, value in figures.items() if value is None}
    assert status == 0
    assert figures["parity_equal"] == figures["parity_prompts"] >= 7
    assert figures["parity_cached_share"] > 0.5
    assert figures["first_token"][0]["warm_cached_share"] > 0.9
    assert figures["eight_prefix_computed"] < 2
    assert unknown <= {"wired_peak_bytes", "rewrite_tokens_per_second"}


def test_machine_report_is_anonymous(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    folder = tmp_path / "my-private-model"
    folder.mkdir()

    new_report = report.make_report(
        report.Figures(), STATUS, asked=str(folder), is_quick=False
    )

    text = json.dumps(new_report)
    assert new_report["model"]["name"] == "a folder"
    for private in (socket.gethostname(), str(Path.home()), "hf_secret", folder.name):
        assert (
            f'"{private}"' not in text and private not in new_report["machine"].values()
        )
    assert f"/{getpass.getuser()}" not in text


@pytest.mark.parametrize(
    ("name", "is_public"),
    [
        ("demo", True),
        ("mlx-community/Qwen3-4B-4bit", True),
        ("/Users/ann/models/x", False),
        ("~/x", False),
        ("./models/x", False),
        ("ann/models/x", False),
        ("private", False),
        ("scripts/tools/clients", False),  # a folder here
    ],
)
def test_machine_report_names_only_repositories(name, is_public, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert report.is_public_name(name) is is_public


def test_machine_report_exits_with_1_where_a_warm_reply_differs(tmp_path, monkeypatch):
    figures = report.Figures(parity_prompts=7, parity_equal=6)
    monkeypatch.setattr(report, "measure", lambda model, is_quick: (figures, STATUS))
    assert report.main(["--out", str(tmp_path / "x.json"), "--json"]) == 1


def test_machine_report_compares_text_and_end_of_replies(monkeypatch):
    answer = {"choices": [{"text": "a", "finish_reason": "stop"}]}
    longer = {"choices": [{"text": "ab", "finish_reason": "stop"}]}
    cut = {"choices": [{"text": "a", "finish_reason": "length"}]}
    assert report.shown_reply(answer) != report.shown_reply(longer)
    assert report.shown_reply(answer) != report.shown_reply(cut)


def test_machine_report_exits_with_2_where_no_server_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "ROOT", tmp_path)  # no start-llm.py is here
    report_file = tmp_path / "x.json"
    assert report.main(["--out", str(report_file)]) == 2
    assert not report_file.exists()


@pytest.mark.parametrize(
    ("speed", "most_tokens", "prompts"),
    [
        (5_000, 200_000, (2_000, 8_000, 16_000, 32_000)),
        (5_000, 32_768, (2_000, 8_000, 16_000)),
        (120, 200_000, (2_000, 8_000)),
        (10, 200_000, (750,)),
    ],
)
def test_machine_report_asks_what_fits_into_ten_minutes(speed, most_tokens, prompts):
    plan = report.make_plan(speed, most_tokens=most_tokens)
    assert plan.prompt_tokens == prompts
    assert sum(prompts) / speed < 200 or len(prompts) == 1
    assert plan.shared_tokens <= prompts[0]


def test_machine_report_knows_how_much_of_a_file_was_repeated():
    text = report.make_program(30)
    renamed = text.replace("greet_0", "welcome_0")
    assert report.repeated_share(text, f"```python\n{renamed}```") == 1
    assert report.repeated_share(text, "Done.") == 0
