"""The shape of the package: directions of imports, what importing it costs, its wheel, and its records."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flash_rnnt_cupy
from flash_rnnt_cupy import backends, pipeline
from flash_rnnt_cupy.backends import Backend, cuda, numpy_cpu
from flash_rnnt_cupy.backends.cuda.facts import H200

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "flash_rnnt_cupy"

# a module may import those on lines above its own, and its own line's
LAYERS = (
    ("errors", "topology", "reference"),
    ("problem", "dtypes"),
    ("plan",),
    ("backends",),
    ("adapters.arrays", "pipeline", "validate"),
    ("api",),
    ("adapters", "selfcheck"),
    ("flash_rnnt_cupy",),
    ("demo", "__main__"),
)


def layer(module: str) -> int:
    """By the longest name that fits; `module` without "flash_rnnt_cupy."."""
    fitting = [
        (len(name), level)
        for level, names in enumerate(LAYERS)
        for name in names
        if module == name or module.startswith(f"{name}.")
    ]
    assert fitting, f"{module} has no place in LAYERS"
    return max(fitting)[1]


def sources() -> list[Path]:
    return [*PACKAGE.glob("*.py"), *(p for folder in subpackages() for p in folder.rglob("*.py"))]


def subpackages() -> list[Path]:
    return [folder for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()]


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts) or "flash_rnnt_cupy"


def imported(path: Path) -> Iterator[str]:
    """Absolute names of the modules that a file imports; of `from package import name` also `package.name`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = ["flash_rnnt_cupy", *path.relative_to(PACKAGE).parts[: -node.level]]
                base = ".".join([*above, *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def own_modules() -> set[str]:
    return {module_of(path) for path in sources()}


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_point_one_way(path: Path) -> None:
    known, here = own_modules(), module_of(path)
    for name in imported(path):
        other = name.removeprefix("flash_rnnt_cupy.")
        if name.startswith("flash_rnnt_cupy.") and other in known and other != here:
            same_package = here.startswith(f"{other}.") or other.startswith(f"{here}.")
            assert same_package or layer(other) <= layer(here), f"{here} imports {other}"


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_torch_stays_in_its_adapters_and_cupy_in_the_backend_and_arrays(path: Path) -> None:
    here = module_of(path)
    libraries = {name.partition(".")[0] for name in imported(path)}
    assert "torch" not in libraries or here.startswith(("adapters.pytorch", "adapters.torch", "demo."))
    assert "cupy" not in libraries or here.startswith(("backends.cuda", "adapters.", "selfcheck"))


def test_no_device_imports_in_the_planner() -> None:
    libraries = {
        name.partition(".")[0] for path in sources() if module_of(path).startswith("plan") for name in imported(path)
    }
    assert libraries <= {"flash_rnnt_cupy", "numpy", "__future__", *sys.stdlib_module_names}


def test_importing_the_package_imports_neither_torch_nor_cupy() -> None:
    lines = (
        "import sys, flash_rnnt_cupy as frc",
        "frc.joint_rnnt_loss_and_grad([[[1.]]], [[[0.]]], [[1.], [2.]], [0., 0.], [[]], [1], [0], backend='numpy')",
        "frc.plan_memory([5], [3], 8, 16, backend='numpy')",
        "print(*sorted({'torch', 'cupy', 'ml_dtypes', 'matplotlib', 'typer'} & set(sys.modules)))",
    )
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""


def test_the_version_stands_in_one_place() -> None:
    version = flash_rnnt_cupy.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    places = [path for path in [*sources(), ROOT / "pyproject.toml"] if f'"{version}"' in path.read_text()]
    assert places == [PACKAGE / "__init__.py"]


def test_all_public_names_exist_and_are_documented() -> None:
    for name in flash_rnnt_cupy.__all__:
        assert (getattr(flash_rnnt_cupy, name).__doc__ or "").strip(), name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, so that nothing is left in the tree."""
    copy, out = tmp_path_factory.mktemp("source") / "tree", tmp_path_factory.mktemp("wheel")
    copy.mkdir()
    for name in ("flash_rnnt_cupy", "adapters", "kernels_cu"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(out),
        str(copy),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_source_and_no_links(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    expected = {path.relative_to(ROOT).as_posix() for path in sources()}
    expected |= {f"flash_rnnt_cupy/kernels_cu/{path.name}" for path in (ROOT / "kernels_cu").glob("*.cu*")}
    expected |= {"flash_rnnt_cupy/py.typed", "flash_rnnt_cupy/adapters/arrays.py"}
    assert expected - names == set()
    assert not [info.filename for info in wheel.infolist() if (info.external_attr >> 16) & 0o170000 == 0o120000]
    outside = {name for name in names if not name.startswith("flash_rnnt_cupy")}
    assert outside == set(), outside


def test_the_wheel_is_pure_python_and_typed(wheel: zipfile.ZipFile) -> None:
    assert str(wheel.filename).endswith("-py3-none-any.whl")
    (metadata,) = [wheel.read(name).decode() for name in wheel.namelist() if name.endswith("METADATA")]
    assert f"Version: {flash_rnnt_cupy.__version__}" in metadata
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line]
    assert required == ["Requires-Dist: numpy>=2.0"]


STAGES = [field.name for field in dataclasses.fields(Backend) if field.name not in ("name", "facts")]


def documented_stages() -> dict[str, int]:
    """How many arguments the docstring of `Backend` gives each stage."""
    found = re.findall(r"^ +(\w+)\((.*?)\)", str(Backend.__doc__), re.MULTILINE)
    return {name: len(arguments.split(",")) for name, arguments in found}


@pytest.mark.parametrize("name", backends.NAMES)
def test_stages_have_the_documented_signatures(name: str) -> None:
    record: Any = {
        "numpy": numpy_cpu.BACKEND,
        "cuda": cuda.make_backend(None, H200, 132, numpy_cpu.allocate),  # type: ignore[arg-type]
    }[name]
    assert record.name == name
    documented = documented_stages()
    assert set(documented) | {"supports"} == set(STAGES)
    missing = {stage for stage in documented if getattr(record, stage) is None}
    assert missing == ({"score", "grad_scores"} if name == "numpy" else set())
    for stage in documented.keys() - missing:
        n_arguments = documented[stage]
        parameters = inspect.signature(getattr(record, stage)).parameters
        assert len(parameters) == n_arguments, stage


def test_the_record_of_a_backend_is_all_that_the_pipeline_calls() -> None:
    called = set(re.findall(r"backend\.(\w+)\(", inspect.getsource(pipeline)))
    assert called <= set(STAGES)
    assert set(STAGES) - called <= {"supports", "allocate", "begin"}
