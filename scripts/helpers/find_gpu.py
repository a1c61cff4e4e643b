#!/usr/bin/env python3
"""Say which NVIDIA GPU MLX can compute on, as one JSON object; nothing is installed or changed.

    {"name": "NVIDIA GeForce RTX 4090", "architecture": "sm_89", "memory_bytes": 25757220864}
    {"problem": "its driver supports CUDA 12.4, and MLX needs CUDA 13 (driver 580 or newer)",
     "name": "NVIDIA GeForce RTX 4090"}

It asks the driver's library (libcuda) and imports no package: MLX's CUDA build cannot even be
imported without a driver. It is a program of its own, since a driver that is broken may hang or
end the process that asks.

What MLX 0.32.4 needs: a GPU of compute capability 7.5, CUDA 13 (driver 580), glibc 2.35.
"""

import ctypes
import json
import platform

LEAST_CAPABILITY = (7, 5)
LEAST_CUDA = 13000  # as the driver states it: 1,000 for each major version
LEAST_GLIBC = (2, 35)
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # numbers of a device's attributes
LIBRARIES = ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1")  # the second: in WSL 2


class NoGpu(Exception):
    """Why MLX computes on no GPU; `name` is the GPU's, where one was found."""

    def __init__(self, problem: str, name: str = "") -> None:
        super().__init__(problem)
        self.name = name


def load_driver() -> ctypes.CDLL:
    """The driver's library, ready to be asked. Raises NoGpu."""
    for library in LIBRARIES:
        try:
            driver = ctypes.CDLL(library)
        except OSError:
            continue
        status = driver.cuInit(0)
        if status != 0:
            raise NoGpu(f"the NVIDIA driver does not start (cuInit: {status})")
        return driver
    raise NoGpu("there is no NVIDIA driver (libcuda.so.1 cannot be loaded)")


def ask_number(driver: ctypes.CDLL, function: str, *arguments: int) -> int:
    """The number that a function of the driver writes through its first argument."""
    number = ctypes.c_size_t(0)  # as large as the largest that a function writes
    status = getattr(driver, function)(ctypes.byref(number), *arguments)
    if status != 0:
        raise NoGpu(f"the NVIDIA driver fails ({function}: {status})")
    return number.value


def glibc_version() -> tuple[int, int] | None:
    """As (2, 36); None where the C library is another one."""
    library, version = platform.libc_ver()
    numbers = version.split(".")
    return (int(numbers[0]), int(numbers[1])) if library == "glibc" else None


def find_gpu() -> dict[str, str | int]:
    """The first GPU that the driver shows: name, architecture, memory. Raises NoGpu."""
    driver = load_driver()
    if ask_number(driver, "cuDeviceGetCount") == 0:
        raise NoGpu("the NVIDIA driver shows no GPU")
    device = ask_number(driver, "cuDeviceGet", 0)
    text = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(text, len(text), device)
    name = text.value.decode("utf-8", "replace")

    major = ask_number(driver, "cuDeviceGetAttribute", CAPABILITY_MAJOR, device)
    minor = ask_number(driver, "cuDeviceGetAttribute", CAPABILITY_MINOR, device)
    if (major, minor) < LEAST_CAPABILITY:
        fault = f"its compute capability is {major}.{minor}, and MLX needs 7.5"
        raise NoGpu(fault, name)
    cuda = ask_number(driver, "cuDriverGetVersion")
    if cuda < LEAST_CUDA:
        version = f"{cuda // 1000}.{cuda % 1000 // 10}"
        needs = "and MLX needs CUDA 13 (driver 580 or newer)"
        raise NoGpu(f"its driver supports CUDA {version}, {needs}", name)
    glibc = glibc_version()
    if glibc is None or glibc < LEAST_GLIBC:
        found = f"glibc {glibc[0]}.{glibc[1]}" if glibc else "no glibc"
        raise NoGpu(f"this system has {found}, and MLX needs glibc 2.35", name)

    return {
        "name": name,
        "architecture": f"sm_{major}{minor}",
        "memory_bytes": ask_number(driver, "cuDeviceTotalMem_v2", device),
    }


def main() -> None:
    try:
        print(json.dumps(find_gpu()))
    except NoGpu as problem:
        print(json.dumps({"problem": str(problem), "name": problem.name}))


if __name__ == "__main__":
    main()
