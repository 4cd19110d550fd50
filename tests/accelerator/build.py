"""Builds the stand-in accelerator, once per version of PyTorch and of its sources: `make accelerator`."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "device"
FOLDER = Path(__file__).parents[2] / "build" / "accelerator"
FLAGS = ["-O1", "-std=c++20", "-fPIC", "-Wall", "-Wno-sign-compare", "-DTORCH_EXTENSION_NAME=standin_device"]


class Absent(Exception):
    """The extension can't be built here; the text is the reason."""


def built() -> Path:
    """The extension's file, which is compiled if there is none yet. Processes that ask at the same time build once."""
    digest = hashlib.sha256(f"{torch.__version__} {sysconfig.get_config_var('SOABI')} {FLAGS}".encode())
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
    # cpp_extension.load() needs ninja, which nothing else here needs; its paths are all that is used of it.
    from torch.utils import cpp_extension

    compiler = shutil.which(os.environ.get("CXX", "g++"))
    headers = sysconfig.get_paths()["include"]
    if compiler is None:
        raise Absent("no C++ compiler: neither g++ nor $CXX")
    if not (Path(headers) / "Python.h").exists():
        raise Absent(f"no Python.h in {headers}")
    includes = [f"-isystem{path}" for path in (*cpp_extension.include_paths(), headers)]
    objects = []
    for source in sorted(SOURCES.glob("*.cpp")):
        objects.append(str(library.with_name(source.stem + ".o")))
        _run([compiler, *FLAGS, *includes, "-c", str(source), "-o", objects[-1]])
    paths = [flag for path in cpp_extension.library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    partial = library.with_suffix(".partial")
    libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    _run([compiler, "-shared", *objects, *paths, *libraries, "-o", str(partial)])
    partial.rename(library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    try:
        built()
        print("accelerator: built")
    except Absent as reason:
        print(f"accelerator: absent ({reason})")
