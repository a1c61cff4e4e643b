"""A BLAS for the tests: the bits of the one in MLX's CPU wheel, in a tenth of the time.

The reference BLAS of that wheel (3 GFLOP/s) is nearly half of what the tests' models cost. What
takes its place is exact_blas.c; without gcc, or where MLX has no BLAS of its own (macOS), the
tests run as before, only longer.
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
# Neither sums in another order nor a product that is added before it is rounded.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-fast-math")


def reference_blas() -> Path | None:
    """The library that MLX's CPU wheel for Linux computes with."""
    spec = importlib.util.find_spec("mlx")
    if spec is None or not spec.submodule_search_locations:
        return None

    site_packages = Path(next(iter(spec.submodule_search_locations))).parent
    return next(site_packages.glob("mlx_cpu.libs/libblas-*.so*"), None)


@cache
def exact_blas() -> Path | None:
    """The compiled library, made once for each version of it; None where it is not to be had."""
    compiler = shutil.which("gcc")
    if sys.platform != "linux" or compiler is None or reference_blas() is None:
        return None

    digest = hashlib.sha256(SOURCE.read_bytes() + _processor()).hexdigest()[:16]
    library = SOURCE.parent / "__pycache__" / f"exact_blas-{digest}.so"
    if library.exists():
        return library

    # Processes that test at the same time may all come here.
    library.parent.mkdir(exist_ok=True)
    new_library = library.with_suffix(f".{os.getpid()}")
    command = [compiler, *FLAGS, "-fPIC", "-shared", "-o", new_library, SOURCE]
    compiled = subprocess.run(command, check=False, capture_output=True)
    if compiled.returncode != 0:
        return None
    new_library.replace(library)
    return library


def _processor() -> bytes:
    """What kind it is: a library for another one may not run."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    return b"".join(sorted({line for line in lines if line.startswith(b"flags")}))


def load_exact_blas() -> ctypes.CDLL | None:
    """Let this process compute with it. To be called before MLX is imported."""
    library = exact_blas()
    if library is None or os.environ.get("LD_PRELOAD"):
        return None
    # For all libraries that come after it, as a preloaded one would be.
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def preloading() -> dict[str, str]:
    """The environment in which a program started by a test computes with it."""
    library = exact_blas()
    if library is None or os.environ.get("LD_PRELOAD"):
        return {}
    return {"LD_PRELOAD": str(library)}
