"""From kernel sources to loaded kernels: one assembled text, one key, one cubin.

    assemble   constants + sources with their headers inlined + layout checks    -> text
    build      text -> NVRTC -> cubin, kept on disk under a hash of all that went in
    load       cubin -> kernels on the current device, kept for the life of the process

Compiling needs NVRTC and the CUDA headers but no GPU. Nothing here runs, and CuPy is not imported, before the
first of these calls.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flash_rnnt_cupy.errors import BackendError, BackendUnavailableError, CompileError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

SYSTEM_INCLUDE = Path("/usr/local/cuda/include")
FEATURE_ARCHITECTURES = {"90": "90a"}  # wgmma and setmaxnreg exist there alone

_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')
_ONCE = re.compile(r"\s*#\s*pragma\s+once")
_OFFSET_OF = """\
#ifdef __CUDACC_RTC__  // NVRTC has no offsetof
#define OFFSET_OF(type, member) __INTADDR__(&((type*)0)->member)
#else
#define OFFSET_OF(type, member) __builtin_offsetof(type, member)
#endif"""


@dataclass(frozen=True)
class ModuleSpec:
    """One specialisation of one source file.

    file       name in kernels_cu/
    constants  become ``#define NAME value`` lines, in this order
    records    parameter structs: name in C++, and the launcher's dtype of the same layout
    """

    file: str
    constants: tuple[tuple[str, str | int], ...] = ()
    records: tuple[tuple[str, np.dtype[Any]], ...] = ()

    def __hash__(self) -> int:
        """Computed once: launches look their kernels up by it."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.file, self.constants, self.records))

    def __str__(self) -> str:
        """One line."""
        return f"{self.file} ({', '.join(f'{name}={value}' for name, value in self.constants)})"


class Cubin(NamedTuple):
    """Machine code, and what the compiler said."""

    image: bytes
    log: str


class Resources(NamedTuple):
    """What one kernel takes: registers a thread, bytes a thread of spills and stack, static shared bytes a block."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True, eq=False)
class Module:
    """A loaded module."""

    spec: ModuleSpec
    raw: Any  # cupy.RawModule
    _kernels: dict[str, Any] = field(default_factory=dict, repr=False)

    def get(self, entry: str) -> Any:
        """The kernel of that name, a cupy.RawKernel."""
        if entry not in self._kernels:
            self._kernels[entry] = self.raw.get_function(entry)
        return self._kernels[entry]


def kernels_folder() -> Traversable:
    """Where the sources are."""
    return files("flash_rnnt_cupy") / "kernels_cu"


def assemble(spec: ModuleSpec) -> str:
    """The whole translation unit.

    Each ``#include "x.cuh"`` of our own is inlined once, at its first place, which must not be conditional;
    ``#line`` keeps file and line of the original in messages.
    """
    lines = [f"// {spec}", *(f"#define {name} {value}" for name, value in spec.constants)]
    lines += _inlined(spec.file, set())
    lines += [_OFFSET_OF, f'#line 1 "{spec.file}, layout of its records"']
    for name, dtype in spec.records:
        lines += _layout_checks(name, dtype)
    return "\n".join(lines) + "\n"


def _inlined(name: str, seen: set[str]) -> Iterator[str]:
    """Lines of a source file with its headers in place; blank where one is there already."""
    seen.add(name)
    yield f'#line 1 "{name}"'
    for number, line in enumerate((kernels_folder() / name).read_text(encoding="utf-8").splitlines(), 1):
        include = _INCLUDE.match(line)
        if include and include[1] not in seen:
            yield from _inlined(include[1], seen)
            yield f'#line {number + 1} "{name}"'
        else:
            yield "" if include or _ONCE.match(line) else line


def _layout_checks(name: str, dtype: np.dtype[Any]) -> Iterator[str]:
    """Assertions that the struct has the dtype's size, and each field its place and size."""
    yield f'static_assert(sizeof({name}) == {dtype.itemsize}, "the launcher has another size of {name}");'
    for member, (kind, offset, *_) in (dtype.fields or {}).items():
        same = f"OFFSET_OF({name}, {member}) == {offset} && sizeof({name}::{member}) == {kind.itemsize}"
        yield f'static_assert({same}, "the launcher has another place or size of {name}::{member}");'


def architecture(capability: str) -> str:
    """What to compile for, from CuPy's capability string: "90" -> "90a", "120" -> "120"."""
    return FEATURE_ARCHITECTURES.get(capability, capability)


def compile_cubin(text: str, name: str, arch: str) -> Cubin:
    """Compiles for sm_``arch``; ``name`` is for messages.

    Raises CompileError, or BackendUnavailableError where NVRTC or the headers are missing or too old.
    """
    nvrtc, options = _nvrtc(), _options(arch)
    if int(arch.rstrip("af")) not in nvrtc.getSupportedArchs():
        version = ".".join(map(str, nvrtc.getVersion()))
        raise BackendUnavailableError(f"NVRTC {version} is too old for sm_{arch}: {_hint('newer')}")
    program = nvrtc.createProgram(text, name, (), ())
    try:
        nvrtc.compileProgram(program, options)
        return Cubin(nvrtc.getCUBIN(program), nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as error:
        raise CompileError(name, nvrtc.getProgramLog(program) or str(error)) from error
    finally:
        nvrtc.destroyProgram(program)


def _options(arch: str) -> tuple[str, ...]:
    """Of NVRTC: IEEE arithmetic with fused multiply-add, and subnormals kept, as NumPy keeps them."""
    return (
        "--std=c++17",
        f"-arch=sm_{arch}",
        "-ftz=false",
        "-lineinfo",
        "--ptxas-options=-v",
        f"-I{_include_folder()}",
    )


@functools.cache
def _nvrtc() -> Any:
    """CuPy's NVRTC binding, with the library loaded."""
    try:
        from cupy.cuda import nvrtc  # noqa: PLC0415  CuPy is imported on demand

        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BackendUnavailableError(f"NVRTC cannot be loaded: {_hint()} ({reason})") from error
    return nvrtc


@functools.cache
def _include_folder() -> str:
    """Of the CUDA headers: from the wheels, conda, CUDA_PATH, or the system's toolkit."""
    pathfinder = importlib.import_module("cuda.pathfinder")  # comes with CuPy, without types
    for folder in (pathfinder.find_nvidia_header_directory("cudart"), SYSTEM_INCLUDE):
        if folder and Path(folder, "cuda_fp16.h").exists():
            return str(folder)
    raise BackendUnavailableError(f"the CUDA headers are missing: {_hint()}")


def _hint(adjective: str = "") -> str:
    """How to get the libraries that belong to the CuPy in use."""
    try:
        import cupy  # noqa: PLC0415  CuPy is imported on demand

        major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    except ImportError:
        major = 13
    what = f"{adjective} CUDA libraries" if adjective else "them"
    return f"`pip install flash-rnnt-cupy[cuda{major}-ctk]` brings {what}"


def resources(log: str) -> dict[str, Resources]:
    """Of every kernel in a compiler log."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:
        stack, stores, loads = _numbers(part, "stack frame", "spill stores", "spill loads")
        registers = re.search(r"Used (\d+) registers", part)
        assert registers, log
        found[part.partition("'")[0]] = Resources(int(registers[1]), stores + loads, stack, *_numbers(part, "smem"))
    return found


def _numbers(text: str, *names: str) -> list[int]:
    """The byte counts before these words, 0 for those that are not there."""
    matches = [re.search(rf"(\d+) bytes {name}", text) for name in names]
    return [int(match[1]) if match else 0 for match in matches]


def build(spec: ModuleSpec, arch: str) -> Path:
    """The cubin's file, from the cache or newly compiled."""
    text = assemble(spec)
    ingredients = (text, *_options(arch), repr(_nvrtc().getVersion()))
    key = hashlib.sha256("\0".join(ingredients).encode()).hexdigest()
    with contextlib.suppress(OSError, RuntimeError):
        return _find(_cache_folder(), key)
    image = compile_cubin(text, str(spec), arch).image
    with contextlib.suppress(OSError, RuntimeError):
        return _store(_cache_folder(), key, image)
    return _store(_temporary_folder(), key, image)


def _cache_folder() -> Path:
    """FLASH_RNNT_CACHE, else flash_rnnt_cupy in the user's cache folder; RuntimeError where there is no home."""
    if "FLASH_RNNT_CACHE" in os.environ:
        return Path(os.environ["FLASH_RNNT_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flash_rnnt_cupy"


@functools.cache
def _temporary_folder() -> Path:
    """This process's own, for where the cache folder cannot be written; removed at exit."""
    folder = tempfile.mkdtemp(prefix="flash_rnnt_cupy_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _find(folder: Path, key: str) -> Path:
    """The stored file of that key; a name carries its contents' hash, so a damaged file is no file."""
    for path in folder.glob(f"{key}-*.cubin"):
        if path.name == _file_name(key, path.read_bytes()):
            return path
    raise FileNotFoundError(key)


def _store(folder: Path, key: str, image: bytes) -> Path:
    """Writes a file under its final name at once, whole: readers and other writers never see half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _file_name(key, image)
    handle, temporary = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(image)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
    return path


def _file_name(key: str, image: bytes) -> str:
    return f"{key}-{hashlib.sha256(image).hexdigest()[:32]}.cubin"


def load(spec: ModuleSpec) -> Module:
    """The module on the current device; compiled at most once a machine, loaded once a process and device."""
    import cupy  # noqa: PLC0415  CuPy is imported on demand

    return _load(spec, cupy.cuda.runtime.getDevice())


@functools.cache
def _load(spec: ModuleSpec, device: int) -> Module:
    import cupy  # noqa: PLC0415  CuPy is imported on demand

    capability = cupy.cuda.Device(device).compute_capability
    path = build(spec, architecture(capability))
    raw = cupy.RawModule(path=str(path))
    try:
        raw.module  # noqa: B018  loads it
    except cupy.cuda.driver.CUDADriverError as error:
        toolkit, driver = _nvrtc().getVersion(), cupy.cuda.runtime.driverGetVersion()
        versions = f"compute capability {capability}, NVRTC {toolkit[0]}.{toolkit[1]}, driver for CUDA {driver}"
        raise BackendError(f"{spec} does not load on device {device} ({versions}): {error}") from error
    return Module(spec, raw)


def write_sources(folder: Path, specs: Iterable[ModuleSpec]) -> None:
    """Writes the assembled texts, to read or to compile by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    for spec in specs:
        text = assemble(spec)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        (folder / f"{Path(spec.file).stem}-{digest}.cu").write_text(text, encoding="utf-8")
