"""What tests read of other projects is fetched once, and what is missing is named."""

import json

import fetch_artifacts
import pytest


@pytest.fixture
def hub(tmp_path):
    """A hub that has all files, each with its own name in it; `requests` has those fetched."""
    requests = []

    def fetch(repository, file):
        requests.append((repository, file))
        content = f"{repository} {file}"
        if file == "tokenizer_config.json":
            content = json.dumps({"chat_template": content})

        path = tmp_path / f"{len(requests)}"
        path.write_text(content)
        return path

    fetch.requests = requests
    return fetch


def test_each_artifact_lies_where_tests_look_for_it(tmp_path, hub):
    folder = tmp_path / "artifacts"

    faults = fetch_artifacts.fetch_all(folder, hub)

    assert faults == []
    for artifact in fetch_artifacts.ARTIFACTS:
        content = (folder / artifact.path).read_text()
        assert content == f"{artifact.repository} {artifact.file}"


def test_what_is_there_is_not_fetched_again(tmp_path, hub):
    fetch_artifacts.fetch_all(tmp_path / "artifacts", hub)
    n_fetched = len(hub.requests)

    fetch_artifacts.fetch_all(tmp_path / "artifacts", hub)

    assert len(hub.requests) == n_fetched == len(fetch_artifacts.ARTIFACTS)


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
