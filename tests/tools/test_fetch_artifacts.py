"""What tests read of other projects is fetched once, and what is missing is named."""

import json

import fetch_artifacts
import pytest


@pytest.fixture
def hub(tmp_path):
    """A hub that has all files, each with its own name in it; `asked` is what was fetched."""
    asked = []

    def fetch(repository, file):
        asked.append((repository, file))
        said = f"{repository} {file}"
        is_config = file == "tokenizer_config.json"
        path = tmp_path / f"{len(asked)}"
        path.write_text(json.dumps({"chat_template": said}) if is_config else said)
        return path

    fetch.asked = asked
    return fetch


def test_each_artifact_lies_where_tests_look_for_it(tmp_path, hub):
    folder = tmp_path / "artifacts"

    faults = fetch_artifacts.fetch_all(folder, hub)

    assert faults == []
    for artifact in fetch_artifacts.ARTIFACTS:
        said = (folder / artifact.path).read_text()
        assert said == f"{artifact.repository} {artifact.file}"


def test_what_is_there_is_not_fetched_again(tmp_path, hub):
    fetch_artifacts.fetch_all(tmp_path / "artifacts", hub)
    n_fetched = len(hub.asked)

    fetch_artifacts.fetch_all(tmp_path / "artifacts", hub)

    assert len(hub.asked) == n_fetched == len(fetch_artifacts.ARTIFACTS)


def test_one_that_cannot_be_had_is_named_and_the_others_come(tmp_path, hub):
    def gated(repository, file):
        if repository.startswith("google/"):
            raise OSError("access to it is restricted\nand more lines")
        return hub(repository, file)

    faults = fetch_artifacts.fetch_all(tmp_path / "artifacts", gated)

    assert [fault.split()[0] for fault in faults] == [
        "templates/gemma-3.jinja",
        "templates/gemma-4.jinja",
    ]
    assert all(fault.endswith("access to it is restricted") for fault in faults)
    n_files = sum(1 for path in (tmp_path / "artifacts").rglob("*") if path.is_file())
    assert n_files == len(fetch_artifacts.ARTIFACTS) - len(faults)
