"""Builds the stand-in accelerator, once per version of PyTorch and of its sources: `make accelerator`."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from importlib.metadata import version
from pathlib import Path

SOURCES = Path(__file__).parent / "device"
FOLDER = Path(__file__).parents[2] / "build" / "accelerator"
FLAGS = ["-O1", "-std=c++20", "-fPIC", "-Wall", "-Wno-sign-compare", "-DTORCH_EXTENSION_NAME=standin_device"]


class Absent(Exception):
    """The extension can't be built here; the text is the reason."""


def built() -> Path:
    """The extension's file, which is compiled if there is none yet. Processes that ask at the same time build once."""
    digest = hashlib.sha256(f"{version('torch')} {sysconfig.get_config_var('SOABI')} {FLAGS}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    folder = FOLDER / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "standin_device.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    # cpp_extension.load() needs ninja, which nothing else here needs; only its paths are used. It imports PyTorch.
    from torch.utils import cpp_extension

    compiler = shutil.which(os.environ.get("CXX", "g++"))
    headers = sysconfig.get_paths()["include"]
    if compiler is None:
        raise Absent("no C++ compiler: neither g++ nor $CXX")
    if not (Path(headers) / "Python.h").exists():
        raise Absent(f"no Python.h in {headers}")
    # One translation unit: nearly all of the time goes into PyTorch's headers, which are then read once.
    first, *others = sorted(SOURCES.glob("*.cpp"))
    command = [compiler, *FLAGS, *(f"-isystem{path}" for path in (*cpp_extension.include_paths(), headers))]
    for source in others:
        command += ["-include", str(source)]
    for path in cpp_extension.library_paths():
        command += [f"-L{path}", f"-Wl,-rpath,{path}"]
    partial = library.with_suffix(".partial")
    command += [str(first), "-shared", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    partial.rename(library)


if __name__ == "__main__":
    try:
        built()
        print("accelerator: built")
    except Absent as reason:
        print(f"accelerator: absent ({reason})")
