"""From kernel sources to cubins: assembling, error places, the disk cache. No GPU; NVRTC where a test says so."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flash_rnnt_cupy.backends.cuda import compiler
from flash_rnnt_cupy.backends.cuda.compiler import ModuleSpec, Resources
from flash_rnnt_cupy.errors import BackendError, BackendUnavailableError, CompileError

PARAMS = np.dtype([("values", np.uint64), ("scale", np.float32), ("n", np.int64)], align=True)
SPEC = ModuleSpec("fill.cu", (("VALUE", 7), ("ELEMENT", "float")), (("FillParams", PARAMS),))
SOURCES = {
    "fill.cu": """\
// What       fill
#include "params.cuh"
#include <cuda_fp16.h>
#include "index.cuh"

extern "C" __global__ void fill(const __grid_constant__ FillParams p) {
  if (index() < p.n) p.values[index()] = VALUE * p.scale;
}
""",
    "params.cuh": """\
#pragma once
#include "index.cuh"
struct FillParams {
  ELEMENT* values;
  float scale;
  long long n;
};
""",
    "index.cuh": """\
#pragma once
__device__ __forceinline__ long long index() { return blockIdx.x * 256ll + threadIdx.x; }
""",
}
ASSEMBLED = """\
// fill.cu (VALUE=7, ELEMENT=float)
#define VALUE 7
#define ELEMENT float
#line 1 "fill.cu"
// What       fill
#line 1 "params.cuh"

#line 1 "index.cuh"

__device__ __forceinline__ long long index() { return blockIdx.x * 256ll + threadIdx.x; }
#line 3 "params.cuh"
struct FillParams {
  ELEMENT* values;
  float scale;
  long long n;
};
#line 3 "fill.cu"
#include <cuda_fp16.h>


extern "C" __global__ void fill(const __grid_constant__ FillParams p) {
"""

NVRTC_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
ptxas         .     352 bytes stack frame, 208 bytes spill stores, 236 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 352 bytes cumulative stack size
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers, used 1 barriers, 400 bytes smem, 368 bytes cmem[0]
"""


class NVRTCError(Exception):
    pass


class FakeNvrtc(SimpleNamespace):
    """Its image is the text; ``programs`` counts compilations. A text with #error does not compile."""

    def __init__(self, version: tuple[int, int] = (13, 0)) -> None:
        super().__init__(NVRTCError=NVRTCError, programs=0, version=version)

    def getVersion(self) -> tuple[int, int]:  # noqa: N802  NVRTC's names
        return self.version

    def getSupportedArchs(self) -> tuple[int, ...]:  # noqa: N802
        return 75, 80, 90, 120

    def createProgram(self, text: str, name: str, headers: tuple[()], names: tuple[()]) -> str:  # noqa: N802
        del name, headers, names
        self.programs += 1
        return text

    def compileProgram(self, program: str, options: tuple[str, ...]) -> None:  # noqa: N802
        assert "-ftz=false" in options
        if "#error" in program:
            raise NVRTCError("NVRTC_ERROR_COMPILATION (6)")

    def getCUBIN(self, program: str) -> bytes:  # noqa: N802
        return program.encode()

    def getProgramLog(self, program: str) -> str:  # noqa: ARG002, N802
        return 'index.cuh(2): error: #error directive: no\n1 error detected in the compilation of "fill.cu".\n'

    def destroyProgram(self, program: str) -> None:  # noqa: N802
        pass


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of kernels in place of the package's, to be changed at will."""
    folder = tmp_path / "kernels_cu"
    folder.mkdir()
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(compiler, "kernels_folder", lambda: folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FLASH_RNNT_CACHE", str(folder))
    return folder


@pytest.fixture
def nvrtc(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvrtc:
    del sources, cache
    fake = FakeNvrtc()
    monkeypatch.setattr(compiler, "_nvrtc", lambda: fake)
    monkeypatch.setattr(compiler, "_include_folder", lambda: "/include")
    return fake


@pytest.fixture
def real_nvrtc() -> None:
    try:
        compiler.compile_cubin("", "nothing", "80")
    except BackendUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing found earlier is remembered, nor what the test finds."""
    found = (compiler._nvrtc, compiler._include_folder, compiler._load)
    for function in found:
        function.cache_clear()
    yield
    monkeypatch.undo()
    for function in found:
        function.cache_clear()


@pytest.fixture
def forget_temporary() -> Iterator[None]:
    compiler._temporary_folder.cache_clear()
    yield
    compiler._temporary_folder.cache_clear()


# ---- assembling ------------------------------------------------------------------------------------------------------


def test_own_headers_are_inlined_once_and_lines_keep_their_numbers(sources: Path) -> None:
    del sources
    assert compiler.assemble(SPEC).startswith(ASSEMBLED)


def test_a_source_is_a_function_of_its_constants(sources: Path) -> None:
    del sources
    other = ModuleSpec(SPEC.file, (("VALUE", 8), ("ELEMENT", "float")), SPEC.records)
    assert hash(SPEC) == hash(ModuleSpec("fill.cu", SPEC.constants, (("FillParams", np.dtype(PARAMS)),)))
    renamed = compiler.assemble(SPEC).replace("VALUE=7", "VALUE=8").replace("VALUE 7", "VALUE 8")
    assert compiler.assemble(other) == renamed


@pytest.mark.usefixtures("real_nvrtc")
@pytest.mark.parametrize(
    ("file", "line", "before", "after"),
    [
        ("fill.cu", 7, "VALUE * p.scale", "VALUE * p.unknown"),
        ("params.cuh", 5, "float scale", "flowt scale"),
        ("index.cuh", 2, "256ll", "256ll * unknown"),
    ],
)
def test_errors_name_the_file_and_line_as_written(sources: Path, file: str, line: int, before: str, after: str) -> None:
    (sources / file).write_text(SOURCES[file].replace(before, after))
    with pytest.raises(CompileError, match=rf"^{file}:{line}: .*\(compiling fill.cu \(VALUE=7") as caught:
        compiler.compile_cubin(compiler.assemble(SPEC), str(SPEC), "90a")
    assert (caught.value.file, caught.value.line) == (file, line)
    assert f"{file}({line}): error" in caught.value.log


@pytest.mark.usefixtures("real_nvrtc", "sources")
@pytest.mark.parametrize("arch", ["75", "90a", "120"])
def test_a_kernel_compiles_and_reports_what_it_takes(arch: str) -> None:
    cubin = compiler.compile_cubin(compiler.assemble(SPEC), str(SPEC), arch)
    assert cubin.image.startswith(b"\x7fELF")
    found = compiler.resources(cubin.log)
    assert found.keys() == {"fill"}
    assert 1 < found["fill"].registers <= 32
    assert found["fill"].spill_bytes == found["fill"].stack_bytes == found["fill"].shared_bytes == 0


@pytest.mark.usefixtures("real_nvrtc", "sources")
@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ([("values", np.uint64), ("scale", np.float32), ("n", np.int32)], "place or size of FillParams::n"),
        ([("values", np.uint64), ("scale", np.float64), ("n", np.int64)], "place or size of FillParams::scale"),
        ([("scale", np.float32), ("values", np.uint64), ("n", np.int64)], "place or size of FillParams::scale"),
        ([("values", np.uint64), ("n", np.int64)], "another size of FillParams"),
        ([("values", np.uint64), ("speed", np.float32), ("n", np.int64)], "speed"),
    ],
)
def test_a_record_of_another_layout_does_not_compile(fields: list[tuple[str, Any]], complaint: str) -> None:
    spec = ModuleSpec(SPEC.file, SPEC.constants, (("FillParams", np.dtype(fields, align=True)),))
    with pytest.raises(CompileError, match=r"^fill\.cu, layout of its records:") as caught:
        compiler.compile_cubin(compiler.assemble(spec), str(spec), "80")
    assert complaint in caught.value.log


def test_resources_of_either_log_format() -> None:
    assert compiler.resources(NVRTC_LOG) == {"second": Resources(32, 444, 352, 0), "first": Resources(14, 0, 0, 400)}
    assert compiler.resources("") == {}


@pytest.mark.parametrize(("capability", "arch"), [("75", "75"), ("90", "90a"), ("100", "100"), ("130", "130")])
def test_architecture(capability: str, arch: str) -> None:
    assert compiler.architecture(capability) == arch


def test_sources_can_be_written_out(sources: Path, tmp_path: Path) -> None:
    del sources
    compiler.write_sources(tmp_path / "texts", [SPEC])
    (written,) = (tmp_path / "texts").iterdir()
    assert written.name.startswith("fill-")
    assert written.read_text() == compiler.assemble(SPEC)


# ---- what is missing -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forget")
def test_without_cupy_the_hint_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install flash-rnnt-cupy\[cuda13-ctk\]") as caught:
        compiler.compile_cubin("", "nothing", "80")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize("what", ["NVRTC", "headers"])
def test_missing_libraries_are_named_with_the_extra(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so":\n  no such file')

    cupy, cuda, pathfinder = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("cuda.pathfinder")
    fake = FakeNvrtc()
    if what == "NVRTC":
        fake.getVersion = no_library  # type: ignore[method-assign, assignment]
    cuda.nvrtc, cuda.runtime = fake, SimpleNamespace(runtimeGetVersion=lambda: 12090)  # type: ignore[attr-defined]
    cupy.cuda = cuda  # type: ignore[attr-defined]
    pathfinder.find_nvidia_header_directory = {}.get  # type: ignore[attr-defined]
    for module in (cupy, cuda, pathfinder):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(compiler, "SYSTEM_INCLUDE", tmp_path)
    with pytest.raises(BackendUnavailableError, match=rf"{what} .*\[cuda12-ctk\]") as caught:
        compiler.compile_cubin("", "nothing", "80")
    assert "\n" not in str(caught.value)


def test_an_architecture_that_nvrtc_does_not_know(nvrtc: FakeNvrtc) -> None:
    with pytest.raises(BackendUnavailableError, match=r"NVRTC 13\.0 is too old for sm_130"):
        compiler.build(SPEC, "130")
    assert nvrtc.programs == 0


def test_an_error_keeps_the_log(nvrtc: FakeNvrtc, sources: Path) -> None:
    (sources / "index.cuh").write_text("#error no\n")
    with pytest.raises(CompileError, match=r"^index.cuh:2: #error directive: no \(compiling fill.cu") as caught:
        compiler.build(SPEC, "80")
    assert caught.value.spec == str(SPEC)
    assert caught.value.log == nvrtc.getProgramLog("")


def test_importing_the_compiler_imports_no_cupy() -> None:
    code = "import sys, flash_rnnt_cupy.backends.cuda.compiler; sys.exit('cupy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- the disk cache --------------------------------------------------------------------------------------------------


def test_a_text_is_compiled_once(nvrtc: FakeNvrtc, cache: Path) -> None:
    path = compiler.build(SPEC, "80")
    assert path.parent == cache
    assert path.read_text() == compiler.assemble(SPEC)
    assert compiler.build(SPEC, "80") == path
    assert nvrtc.programs == 1


def test_anything_that_goes_in_changes_the_key(nvrtc: FakeNvrtc, sources: Path) -> None:
    other = ModuleSpec(SPEC.file, (("VALUE", 8), ("ELEMENT", "float")), SPEC.records)
    paths = {compiler.build(SPEC, "80"), compiler.build(SPEC, "90a"), compiler.build(other, "80")}
    nvrtc.version = (13, 1)
    paths.add(compiler.build(SPEC, "80"))
    (sources / "index.cuh").write_text(SOURCES["index.cuh"] + "// more\n")
    paths.add(compiler.build(SPEC, "80"))
    assert len(paths) == nvrtc.programs == 5


@pytest.mark.parametrize(("kept", "added"), [(-1, b""), (0, b""), (-1, b"?"), (None, b"?")])
def test_a_damaged_file_is_built_anew(nvrtc: FakeNvrtc, kept: int | None, added: bytes) -> None:
    path = compiler.build(SPEC, "80")
    image = path.read_bytes()
    path.write_bytes(image[:kept] + added)
    assert compiler.build(SPEC, "80") == path
    assert path.read_bytes() == image
    assert nvrtc.programs == 2


def _no_space(*arguments: object) -> None:
    raise OSError(28, f"No space left on device: {arguments}")


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("reason", ["a file in the way", "disk full", "no home"])
def test_without_a_cache_folder_a_temporary_one_serves(
    reason: str, nvrtc: FakeNvrtc, cache: Path, monkeypatch: pytest.MonkeyPatch, forget_temporary: None
) -> None:
    del forget_temporary
    if reason == "a file in the way":
        cache.write_text("not a folder")
    elif reason == "disk full":
        replace = os.replace
        monkeypatch.setattr(os, "replace", lambda a, b: _no_space(a, b) if Path(b).parent == cache else replace(a, b))
    else:
        monkeypatch.delenv("FLASH_RNNT_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", _no_home)
    path = compiler.build(SPEC, "80")
    assert path.is_relative_to(tempfile.gettempdir())
    assert path.parent != cache
    assert path.read_text() == compiler.assemble(SPEC)
    assert nvrtc.programs == 1
    if reason == "disk full":
        assert list(cache.iterdir()) == []


def test_a_cache_folder_that_cannot_be_written_is_still_read(nvrtc: FakeNvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compiler.build(SPEC, "80")
    monkeypatch.setattr(tempfile, "mkstemp", _no_space)
    assert compiler.build(SPEC, "80") == path
    assert nvrtc.programs == 1


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FLASH_RNNT_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/flash_rnnt_cupy"),
        ({}, "/home/someone/.cache/flash_rnnt_cupy"),
        ({"XDG_CACHE_HOME": ""}, "/home/someone/.cache/flash_rnnt_cupy"),
    ],
)
def test_where_the_cache_is(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLASH_RNNT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert compiler._cache_folder() == Path(expected)


CONCURRENT = """\
import sys
from pathlib import Path
from flash_rnnt_cupy.backends.cuda import compiler
from tests.test_cuda_compiler import SPEC, FakeNvrtc

compiler.kernels_folder = lambda: Path(sys.argv[1])
compiler._nvrtc, compiler._include_folder = FakeNvrtc, lambda: "/include"
for value in range(50):
    spec = compiler.ModuleSpec(SPEC.file, (("VALUE", value), ("ELEMENT", "float")), SPEC.records)
    path = compiler.build(spec, "80")
    assert path.parent == compiler._cache_folder()
    assert path.read_text() == compiler.assemble(spec)
"""


def test_many_processes_may_build_at_once(sources: Path, cache: Path) -> None:
    command = [sys.executable, "-c", CONCURRENT, str(sources)]
    root = Path(__file__).parents[1]
    running = [subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    errors = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0] * 4, errors
    assert len(list(cache.iterdir())) == 50


# ---- loading ---------------------------------------------------------------------------------------------------------


class DriverError(Exception):
    pass


class FakeCupy(ModuleType):
    """One kind of device, and modules that remember where they came from."""

    def __init__(self, loads: bool = True) -> None:
        super().__init__("cupy")
        self.device = 0

        class RawModule:
            def __init__(self, path: str) -> None:
                self.path = Path(path)

            @property
            def module(self) -> None:
                if not loads:
                    raise DriverError("CUDA_ERROR_NO_BINARY_FOR_GPU")

            def get_function(self, entry: str) -> object:
                return (entry, object())

        self.RawModule = RawModule
        self.cuda = SimpleNamespace(
            Device=lambda device: SimpleNamespace(id=device, compute_capability="90"),
            driver=SimpleNamespace(CUDADriverError=DriverError),
            runtime=SimpleNamespace(getDevice=lambda: self.device, driverGetVersion=lambda: 12080),
        )


@pytest.mark.usefixtures("forget")
def test_a_module_is_loaded_once_a_device(nvrtc: FakeNvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    module = compiler.load(SPEC)
    assert compiler.load(SPEC) is module
    assert module.get("fill") is module.get("fill")
    assert module.raw.path == compiler.build(SPEC, "90a")
    cupy.device = 1
    assert compiler.load(SPEC) is not module
    assert nvrtc.programs == 1


@pytest.mark.usefixtures("forget", "nvrtc")
def test_a_module_that_does_not_load_names_device_toolkit_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(loads=False))
    expected = r"fill.cu .* on device 0 .*capability 90, NVRTC 13.0, driver for CUDA 12080.*NO_BINARY"
    with pytest.raises(BackendError, match=expected):
        compiler.load(SPEC)
