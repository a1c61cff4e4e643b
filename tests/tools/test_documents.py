"""README and docs: links lead somewhere, programs exist, and what is generated is current."""

import re
import subprocess
from functools import cache
from pathlib import Path

import choose_model
import launch
import list_settings
import pytest
import start_llm as s

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
PROGRAM = re.compile(
    r"(?<![\w/.-])((?:scripts|benchmarks|tests|docs|examples)/[\w./-]+\.\w+)"
)
CHOICE = r" (\S+), ([\d.]+) GB \| ([\d,]+) \(([\d,]+)\) \|"
TABLE_ROW = re.compile(rf"^\| (\d+) GB \|{CHOICE}{CHOICE}$", re.MULTILINE)
SETTING_ROW = re.compile(
    r"^\| `([A-Z0-9_]+)` \| (?:`(.*?)`|\(empty\)) \|", re.MULTILINE
)
AGENT_ROW = re.compile(
    r"^\| (.+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| (\d+) GB \|$", re.MULTILINE
)
MOST_README_LINES = 200


@cache
def documents():
    """All Markdown files of the project, but for notes to its authors."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.split() if not name.startswith(".context/")]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def anchor_of(heading):
    """The name that GitHub gives a heading."""
    text = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
    return text.replace(" ", "-")


def broken_links(text, folder):
    """The links of a document in `folder` that lead nowhere."""
    broken = []
    for match in LINK.finditer(text):
        link = match[1] or match[2]
        if re.match(r"https?:|mailto:|\$", link):
            continue
        path, _, anchor = link.partition("#")
        target = (folder / path) if path else None
        if target is not None and not target.exists():
            broken.append(link)
        elif anchor:
            page = target.read_text("utf-8") if target else text
            headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
            if anchor not in map(anchor_of, headings):
                broken.append(link)
    return broken


def missing_programs(text):
    """The files that a document names and the project does not have."""
    return [name for name in PROGRAM.findall(text) if not (ROOT / name).exists()]


def test_documents_have_no_broken_link():
    broken = {
        name: broken_links(read(name), (ROOT / name).parent) for name in documents()
    }
    assert not {name: links for name, links in broken.items() if links}


def test_documents_name_only_files_that_exist():
    missing = {name: missing_programs(read(name)) for name in documents()}
    assert not {name: files for name, files in missing.items() if files}


def test_readme_is_short_and_names_every_document():
    text = read("README.md")
    assert len(text.splitlines()) <= MOST_README_LINES
    unnamed = [path.name for path in (ROOT / "docs").glob("*.md")]
    assert [name for name in unnamed if f"(docs/{name})" not in text] == []


def test_docs_settings_is_what_config_and_the_example_make():
    groups = list_settings.read_example(read(".env.example"))
    schemas = s.Config.model_json_schema()["properties"]
    schemas = {name.upper(): schema for name, schema in schemas.items()}
    made = list_settings.make_markdown(read("docs/settings.md"), groups, schemas)
    assert read("docs/settings.md") == made, "run scripts/tools/list_settings.py"


def test_defaults_in_the_readme_are_those_of_config():
    rows = dict(SETTING_ROW.findall(read("README.md")))
    assert len(rows) == 8
    assert s.Config.from_env(rows) == s.Config()


def test_readme_says_which_models_fit_as_choose_model_does():
    rows = TABLE_ROW.findall(read("README.md"))
    assert len(rows) >= 6
    for gigabytes, *row in rows:
        assert row == fitting_row(int(gigabytes)), gigabytes


def fitting_row(gigabytes):
    """Of both choices: name, download, context, that with KV_BITS=8."""
    room = choose_model.usable_memory(gigabytes * 2**30, is_apple_silicon=True)
    machine = choose_model.Machine(True, room, disk_bytes=10**12)
    row = []
    for model in choose_model.list_offers(machine, []):
        n_tokens = machine.count_context(model)
        n_packed = machine.count_context(model, kv_share=choose_model.PACKED_SHARE)
        download = f"{model.nbytes / 1e9:.1f}"
        row += [model.name, download, f"{n_tokens:,}", f"{n_packed:,}"]
    return row


def test_readme_says_which_agents_have_room_as_launch_does():
    text = read("README.md")
    contexts = {
        int(gigabytes): int(context.replace(",", ""))
        for gigabytes, _, _, context, *_ in TABLE_ROW.findall(text)
    }
    assert AGENT_ROW.findall(text) == list(agent_rows(contexts))


def agent_rows(contexts):
    """Each agent, its first prompt, two contexts, the least memory that has the second."""
    for client in launch.CLIENTS.values():
        for is_small in (False, True) if client.small_prompt else (False,):
            least = client.least_context(is_small=is_small)
            hour = client.least_context(is_small=is_small, n_work=launch.HOUR_TOKENS)
            prompt = client.count_first_prompt(is_small=is_small)
            memory = min(n for n, context in contexts.items() if context >= hour)
            title = f"{client.title} `--small`" if is_small else client.title
            yield title, f"{prompt:,}", f"{least:,}", f"{hour:,}", str(memory)


@pytest.mark.parametrize("name", launch.CLIENTS)
def test_docs_clients_names_by_hand_what_launch_sets(name):
    client = launch.CLIENTS[name]
    port = 4000 if client.needs_proxy else 8080
    target = launch.Target(f"http://127.0.0.1:{port}", "unused", "local", 131_072)
    setup = client.set_up(target, "FOLDER")
    section = read("docs/clients.md").partition(f"## {client.title}\n")[2]
    section = section.partition("\n## ")[0]

    exports = dict(re.findall(r"^export (\w+)=(\S+)$", section, re.MULTILINE))
    assert exports.items() <= setup.environment.items()
    wanted = (
        f"`scripts/launch {name}`",
        f"`npm install -g {client.package}`",
        target.url,
    )
    assert [text for text in wanted if text not in section] == []


def test_figures_of_the_readme_are_those_of_the_benchmarks():
    benchmarks = read("docs/benchmarks.md")
    text = read("README.md")
    rows = re.findall(r"\| \*\*([\d.,]+)\*\* \| ([\d.,]+) \|", text)
    assert len(rows) == 3
    figures = [figure for row in rows for figure in row]
    claims = text.partition("## What it does")[2].partition("**Exact.**")[0]
    # Tokens, ratios, seconds and shares: "8,835", "1.45", "26 %"; no "Qwen3.5".
    figures += re.findall(r"(?<![\w.])(?:\d+,\d{3}|\d+\.\d+|\d+ ?%)", claims)
    assert len(figures) >= 16

    for figure in (figure.replace(" ", "") for figure in figures):
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}", benchmarks), figure


# Lessons


def lessons_of(text):
    """The numbers of a page's headings, and those of its table."""
    headings = re.findall(r"^## (L-\d+) \S", text, re.MULTILINE)
    rows = re.findall(r"^\| \[(L-\d+)\]\(#[\w-]+\) \| .+ \| .+ \|$", text, re.MULTILINE)
    return headings, rows


def test_each_lesson_has_a_row_and_a_number_of_its_own():
    pages = sorted((ROOT / "docs" / "lessons").glob("*.md"))
    listed = re.findall(
        r"L-\d+", read("docs/lessons/README.md").partition("Each file")[0]
    )
    found = []
    for page in pages:
        headings, rows = lessons_of(page.read_text("utf-8"))
        assert rows == headings, page.name
        found += headings
    assert len(found) == len(set(found)) > 100
    assert sorted(set(listed) - {"L-07"}) == sorted(set(found) - {"L-07"})
