"""Load start-llm.py as a module: its name has a hyphen, so `import` cannot."""

import contextlib
import gc
import importlib.util
import os
import resource
import signal
import sys
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path
from types import MappingProxyType, ModuleType

import hypothesis
import nights
import pytest
from exact_blas import load_exact_blas
from kernel_header import precompile_kernel_header

if sys.dont_write_bytecode:
    # Not beside the sources, then: else each program that is started compiles its libraries.
    bytecode = Path(__file__).parents[1] / ".pytest_cache" / "bytecode"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(bytecode)
    sys.dont_write_bytecode = False

exact_library = load_exact_blas()  # before anything imports MLX
precompile_kernel_header()

# Tests and what they start would find each other's KV; those of the disk choose a folder.
os.environ.setdefault("CACHE_DISK", "off")

# Under nohup it is ignored, also by what is started; tests send it to that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Examples are not timed: hypothesis would fail one that the machine was too busy for. They
# are the same in each run, so that a commit does not fail by chance; new ones are looked for
# with `pytest -m hypothesis --hypothesis-profile explore`.
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.register_profile("night", deadline=None, derandomize=True)
hypothesis.settings.register_profile(
    "day", deadline=None, derandomize=True, max_examples=25
)
hypothesis.settings.load_profile("day")

pytest.register_assert_rewrite("drafting")  # its assertions are those of tests

SOURCE = Path(os.environ.get("START_LLM") or Path(__file__).parents[1] / "start-llm.py")


def load_start_llm() -> ModuleType:
    spec = importlib.util.spec_from_file_location("start_llm", SOURCE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    # before exec: dataclasses look their module up by name
    sys.modules["start_llm"] = module
    spec.loader.exec_module(module)
    return module


# As main() does: a test that serves needs more files than the 256 of macOS.
with contextlib.suppress(ValueError):
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard_limit))


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also what only runs at night")


def pytest_configure(config):
    """From here on, tests write `import start_llm`; a process that only hands them out does not."""
    if config.getoption("--all"):
        nights.is_night = True
        if not config.getoption("--hypothesis-profile"):
            hypothesis.settings.load_profile("night")
    if config.getoption("collectonly") or not config.getoption("numprocesses", None):
        gc.disable()  # until all is collected
        load_start_llm()


def pytest_collection_finish(session):
    """What is imported and collected stays to the end: garbage is not looked for in it."""
    gc.enable()
    gc.freeze()


def pytest_ignore_collect(collection_path, config):
    """By day, real clients (tests/clients) are not even imported: that takes seconds."""
    return (collection_path.name == "clients" and not config.getoption("--all")) or None


def pytest_collection_modifyitems(config, items):
    """By day, without `--all`: no slow tests, and of products a covering array."""
    if config.getoption("--all"):
        return

    left_out = {item for item in items if item.get_closest_marker("slow")}
    products = defaultdict(list)
    for item in items:
        covering = item.get_closest_marker("covering")
        if covering and item not in left_out:
            over_module = covering.kwargs.get("over") == "module"
            test = item.nodeid.split("::" if over_module else "[")[0]
            products[test, covering.args[0]].append(item)

    for (_, n_meeting), cases in products.items():
        left_out.update(set(cases) - choose_covering(cases, n_meeting))
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])


def choose_covering(cases, n_meeting):
    """Few of these cases in which any n values of parameters, or tests, still meet.

    Of cases that add as much the first is taken, so what matters most stands first.
    """
    meetings = {}
    for case in cases:
        parameters = case.callspec.params if hasattr(case, "callspec") else {}
        values = [(name, repr(value)) for name, value in parameters.items()]
        values.append(("the test", case.originalname))
        meetings[case] = set(combinations(values, n_meeting))

    missing = set().union(*meetings.values())
    chosen = set()
    while missing:
        best = max(cases, key=lambda case: len(meetings[case] & missing))
        missing -= meetings[best]
        chosen.add(best)
    return chosen


@pytest.fixture(autouse=True)
def signals_stay_open():
    """A test that leaves a signal blocked would have every later program here ignore it."""
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    yield

    new_mask = signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    assert new_mask == old_mask, f"the test left blocked: {new_mask - old_mask}"


@pytest.fixture
def table(record_property):
    """Adds a row of measured numbers, shown at the end whichever process ran the test."""
    return lambda row: record_property("row", row)


def pytest_report_header():
    if exact_library is not None:
        return "BLAS: tests/support/exact_blas.c"
    return "BLAS: MLX's own; with gcc on Linux the tests would take half the time"


def pytest_terminal_summary(terminalreporter):
    """The rows of `table`, and last what was not run, with what would run it."""
    properties = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                properties += report.user_properties

    for name, row in properties:
        if name == "row":
            terminalreporter.write_line(row)

    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in skipped
    )
    if reasons:
        counted = "; ".join(f"{n}: {reason}" for reason, n in reasons.most_common())
        terminalreporter.write_line(f"{len(skipped)} tests were not run ({counted})")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of tiny models, by kind."""
    from tiny_models import tiny_model

    return lambda kind, **size: tiny_model(kind, tmp_path_factory.getbasetemp(), **size)


@pytest.fixture(scope="session")
def folder(models):
    """That of a tiny dense model; modules that serve another one have their own."""
    from tiny_models import DENSE

    return models(DENSE)


@pytest.fixture(scope="module")
def dense(folder):
    """A server of that model, with no settings."""
    from server_fixture import Served

    with Served(folder) as served:
        yield served


@pytest.fixture(scope="module")
def served(dense):
    """The server of a module that has no other."""
    return dense


@pytest.fixture
def rng():
    """Random numbers, the same for each test."""
    import numpy as np

    return np.random.default_rng(1)


@pytest.fixture
def bench(models, monkeypatch):
    """Makes engines, which are stopped at the end of the test."""
    from engine_fixture import Bench

    benches = []

    def make(kind, size=MappingProxyType({}), **settings):
        benches.append(Bench(models(kind, **size), monkeypatch, **settings))
        return benches[-1]

    yield make

    for new_bench in benches:
        new_bench.engine.stop()


@pytest.fixture
def make_drafting(models, tmp_path_factory, monkeypatch):
    """Makes engines with drafts of one drafter, and without, which are stopped at the end."""
    from drafting import Drafting

    made = []

    def make(drafter, kind, **size):
        root = tmp_path_factory.getbasetemp()
        made.append(Drafting(drafter, kind, root, monkeypatch, models=models, **size))
        return made[-1]

    yield make

    for drafting in made:
        drafting.close()
