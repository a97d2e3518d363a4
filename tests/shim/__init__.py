"""Kernels on the CPU: the assembled CUDA texts, compiled by g++ against `cuda_shim.h` and called on NumPy memory."""

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from flash_rnnt_cupy.backends.cuda.compiler import ModuleSpec, assemble

NEEDED = ("cuda_fp16.h", "crt/host_defines.h")
HEADER = Path(__file__).parent / "cuda_shim.h"
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-Wno-attributes"]
SANITIZE = ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]

SANITIZE_VARIABLE = "FLASH_RNNT_SHIM_SANITIZE"

_ENTRY = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(')


class ShimError(RuntimeError):
    """A launch that a GPU would hang on, or leave undefined; says what and where."""


def missing() -> str:
    """What the shim needs and is not here; empty if all is."""
    if shutil.which("g++") is None:
        return "g++ is not installed"
    if not include_folders():
        return "the CUDA headers (with crt/host_defines.h and nv/target) are not installed"
    return ""


@functools.cache
def include_folders() -> tuple[Path, ...]:
    """Of the CUDA headers for a host compiler: the wheels cuda-runtime, cuda-crt and CuPy's CCCL, or a toolkit."""
    toolkits = [Path(os.environ.get("CUDA_PATH", "/usr/local/cuda")) / "include"]
    libraries = [toolkits[0], toolkits[0] / "cccl"]
    if importlib.util.find_spec("nvidia") is not None:
        for root in importlib.import_module("nvidia").__path__:
            toolkits += Path(root).glob("*/include")
    cupy = importlib.util.find_spec("cupy")
    if cupy is not None and cupy.origin is not None:
        libraries.append(Path(cupy.origin).parent / "_core/include/cupy/_cccl/libcudacxx")
    toolkit = [
        folder for folder in toolkits if (folder / "cuda_fp16.h").exists() and (folder / "crt/host_defines.h").exists()
    ]
    library = [folder for folder in libraries if (folder / "nv/target").exists()]
    return (toolkit[0], library[0]) if toolkit and library else ()


def sanitizer_environment() -> dict[str, str]:
    """Variables for a process that loads sanitized modules."""
    asan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
    return {SANITIZE_VARIABLE: "1", "LD_PRELOAD": asan.strip(), "ASAN_OPTIONS": "detect_leaks=0"}


class Library:
    """One module's kernels on the CPU."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def run(
        self,
        entry: str,
        grid: Sequence[int],
        block: Sequence[int],
        record: npt.NDArray[Any],
        shared_bytes: int = 0,
        reverse: bool = False,
    ) -> None:
        """One launch; ``record`` holds the parameter struct, pointers being addresses of NumPy memory."""
        function = getattr(self._library, f"shim_{entry}")
        function.restype = ctypes.c_char_p
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, _Dim, _Dim, ctypes.c_size_t, ctypes.c_int]
        error = function(
            record.ctypes.data, record.nbytes, _Dim(*_three(grid)), _Dim(*_three(block)), shared_bytes, reverse
        )
        if error:
            raise ShimError(f"{entry}: {error.decode()}")


_Dim = ctypes.c_uint * 3


def _three(sizes: Sequence[int]) -> list[int]:
    return [*sizes, 1, 1][:3]


@functools.cache
def load(spec: ModuleSpec, sanitize: bool = False) -> Library:
    """The module's kernels, compiled at most once a machine and text."""
    text = assemble(spec)
    entries = _ENTRY.findall(text)
    assert entries, f"no kernels in {spec}"
    exports = "".join(f"SHIM_ENTRY({entry})\n" for entry in entries)
    # The unnamed namespace keeps statics of inline functions in the shared-memory section.
    source = f'namespace {{\n{text}}}  // namespace\n#line 1 "entries"\n{exports}'
    flags = [f"-I{_precompiled(sanitize).parent}", *_flags(sanitize), "-include", HEADER.name, "-shared"]
    return Library(_compiled(source, "module.cpp", "module.so", flags))


@functools.cache
def _precompiled(sanitize: bool) -> Path:
    """The header, parsed once for all modules."""
    flags = [*_flags(sanitize), "-x", "c++-header"]
    return _compiled(HEADER.read_text(), HEADER.name, f"{HEADER.name}.gch", flags)


def _flags(sanitize: bool) -> list[str]:
    return [*FLAGS, *(SANITIZE if sanitize else []), *(f"-I{folder}" for folder in include_folders())]


def _compiled(source: str, source_name: str, name: str, flags: list[str]) -> Path:
    """The compiler's output for this text and these flags, kept between runs in a temporary folder of the user."""
    command = ["g++", *flags]
    key = hashlib.sha256("\0".join([source, *command]).encode()).hexdigest()[:32]
    folder = Path(tempfile.gettempdir()) / f"flash_rnnt_shim_{os.getuid()}" / key
    if not (folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            (Path(scratch) / source_name).write_text(source)
            command += [source_name, "-o", name]
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ShimError(f"g++ failed:\n{done.stderr}")
            for file in (source_name, name):
                os.replace(Path(scratch) / file, folder / file)
    return folder / name
