"""Compare this server with mlx_lm.server on the same small models, and with the project's bars.

    .venv/bin/python benchmarks/compare.py [--quick] [--only SECTION ...]
                                           [--json FILE] [--markdown DOCUMENT]
                                           [--beside OLDER/start-llm.py]

Everything runs on this machine with random weights of fixed seeds. Times are compared as ratios of
neighbouring measurements, because machines differ and are never quiet; a table cell gives the
median and, in brackets, the extremes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import compared_servers
import report
import sections
from project_files import install_and_run, make_tiny_model
from report import Line
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

console = Console()


def with_openblas() -> str:
    """Start again with the BLAS that install_and_run.py gives the server; which one it is.

    Both servers and all that runs in this process inherit it.
    """
    environ = install_and_run().server_environment(Path(sys.prefix), os.environ)
    if environ.get("LD_PRELOAD") != os.environ.get("LD_PRELOAD"):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.argv], environ)
    if "blas" in environ.get("LD_PRELOAD", ""):
        library = Path(environ["LD_PRELOAD"]).name
        return f"{library}, {environ.get('OPENBLAS_NUM_THREADS', 'all')} thread(s)"
    return "MLX's own"


def machine(blas: str) -> str:
    import mlx.core as mx

    chip = platform.processor() or platform.machine()
    if platform.system() == "Linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if "model name" in line:
                chip = line.partition(":")[2]
                break
    elif platform.system() == "Darwin":
        chip = subprocess.check_output(
            ["sysctl", "-n", "machdep.cpu.brand_string"], text=True
        )
    cores = os.cpu_count()
    return (
        f"{chip.strip()}, {cores} cores, {platform.system()}, mlx {mx.__version__} on "
        f"{mx.default_device()}, BLAS of all processes: {blas}"
    )


class Bench:
    """What every section needs: models, a scratch folder, how thorough to be, where to report."""

    def __init__(
        self, scratch: Path, models: Path, progress: Progress, *, quick: bool
    ) -> None:
        self.scratch = scratch
        self.quick = quick
        self._models = models
        self._progress = progress
        self._task = progress.add_task("", total=None)

    def model(self, kind: str, **size: int) -> Path:
        """The folder of a model of this kind and size, fp32, made on first use."""
        maker = make_tiny_model()
        recipe = maker.choose_recipe(kind, **size)
        size_suffix = "".join(f"-{key}{value}" for key, value in size.items())
        folder = self._models / f"{kind}{size_suffix}"
        maker.make_model(folder, recipe)
        return folder

    def say(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def times(self, thorough: int) -> int:
        """How often to repeat a measurement."""
        return max(1, thorough // 3) if self.quick else thorough


@contextmanager
def bench(*, quick: bool) -> Iterator[Bench]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="start-llm-bench-") as scratch,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        models = Path(tempfile.gettempdir()) / "start-llm-bench-models"
        yield Bench(Path(scratch), models, progress, quick=quick)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="short prompts, few repetitions"
    )
    parser.add_argument(
        "--only", nargs="+", choices=sections.ALL, default=list(sections.ALL)
    )
    parser.add_argument(
        "--beside",
        type=Path,
        help="another start-llm.py, which is measured in the place of mlx_lm.server",
    )
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    return parser.parse_args()


def measure(name: str, *, quick: bool) -> list[Line]:
    """One section's lines; a failure is reported as a line, and other sections go on."""
    lines: list[Line] = []
    began = time.monotonic()
    with bench(quick=quick) as section_bench:
        try:
            for line in sections.ALL[name](section_bench):
                lines.append(line)
                console.print(" | ".join(line.cells), highlight=False, soft_wrap=True)
        except Exception as error:  # noqa: BLE001  one section must not cost the others
            console.print_exception()
            lines.append(Line(name, f"failed: {error!r:.80}", met=False))
    console.print(f"[dim]{name}: {time.monotonic() - began:.0f} s[/]")
    return lines


def main() -> int:
    arguments = read_arguments()
    if arguments.beside:
        compared_servers.compare_with(arguments.beside)
    about = f"Measured on {machine(with_openblas())}, with `{' '.join(['python', *sys.argv])}`."
    console.print(about, highlight=False, soft_wrap=True)

    lines: list[Line] = []
    for name in arguments.only:
        section_lines = measure(name, quick=arguments.quick)
        lines += section_lines
        if arguments.markdown:
            cells = [line.cells for line in section_lines]
            table = report.markdown(report.HEADINGS, cells, about)
            report.write_into(arguments.markdown, name, table)

    console.print(report.rich_table(lines))
    if arguments.json:
        written = {"about": about, "lines": report.as_json(lines)}
        arguments.json.write_text(json.dumps(written, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
