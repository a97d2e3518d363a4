"""Every kernel compiles for every architecture we name, without a GPU, and stays within its registers.

Record layouts are asserted in the assembled texts themselves, so a text that compiles has the launcher's layout.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import pytest

from flash_rnnt_cupy.backends.cuda import compiler, specs
from flash_rnnt_cupy.backends.cuda.compiler import ModuleSpec, Resources
from flash_rnnt_cupy.errors import BackendUnavailableError

# Everything is compiled for MAIN; for the others, every source with either lattice dtype.
MAIN, OTHERS = "90a", ("75", "80", "86", "89", "100", "120")


class Budget(NamedTuple):
    """What a thread may take: registers, and bytes of loads and stores that spill them."""

    registers: int
    spill_bytes: int = 0


# With a float32 and with a float64 lattice. A multiprocessor has 65,536 registers: at 64 a thread 1024 threads are
# resident, at 128 half as many; a block of 1024 threads cannot have more than 64.
BUDGET = {
    "joint_forward": (Budget(56), Budget(80)),
    "joint_backward": (Budget(96), Budget(160)),
    "normalize_forward": (Budget(128), Budget(255, 36)),
    "normalize_backward": (Budget(168), Budget(255, 336)),
    "bias_partials": (Budget(64), Budget(64)),
    "bias_add": (Budget(40), Budget(48)),
    "zero_padding": (Budget(32), Budget(32)),
    "sum_alignments": (Budget(64), Budget(64, 8)),
    "posteriors": (Budget(64), Budget(64, 300)),
    "losses": (Budget(16), Budget(16)),
    "select_rows": (Budget(48), Budget(48)),
    "start_rows": (Budget(56), Budget(56)),
    "convert": (Budget(24), Budget(32)),
    "split_upstream": (Budget(32), Budget(40)),
    # 512 threads have 128 registers each at entry; roles then trade them. What spills is the builder's.
    "score": (Budget(128), Budget(0)),
    "grad_scores": (Budget(128, 256), Budget(0)),
    "pack": (Budget(32), Budget(0)),
}

PORTABLE = list(dict.fromkeys(specs.all_specs()))
SPECS = [*PORTABLE, *dict.fromkeys(specs.fused_specs())]  # these have instructions of MAIN alone


def lattice_dtype(spec: ModuleSpec) -> str:
    return str(dict(spec.constants).get("ACCUMULATOR", "float32"))


REPRESENTATIVES = list({(spec.file, lattice_dtype(spec)): spec for spec in PORTABLE}.values())
JOBS = [(spec, MAIN) for spec in SPECS] + [(spec, arch) for arch in OTHERS for spec in REPRESENTATIVES]
IDS = [f"{spec.file}-{SPECS.index(spec)}-{arch}" for spec, arch in JOBS]


def kernels(spec: ModuleSpec, arch: str) -> dict[str, Resources]:
    """What each of the module's kernels takes."""
    return compiler.resources(compiler.compile_cubin(compiler.assemble(spec), str(spec), arch).log)


Results = dict[tuple[ModuleSpec, str], "Future[dict[str, Resources]]"]


@pytest.fixture(scope="module")
def results() -> Iterator[Results]:
    """All jobs, in processes of their own: NVRTC compiles one text at a time in each."""
    try:
        compiler.compile_cubin("", "nothing", "80")
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        yield {job: pool.submit(kernels, *job) for job in JOBS}


@pytest.mark.parametrize(("spec", "arch"), JOBS, ids=IDS)
def test_a_module_compiles_within_its_budget(results: Results, spec: ModuleSpec, arch: str) -> None:
    found = results[spec, arch].result()
    assert found, spec
    for entry, taken in found.items():
        budget = BUDGET[entry][lattice_dtype(spec) == "float64"]
        assert taken.registers <= budget.registers, (entry, str(spec))
        assert taken.spill_bytes <= budget.spill_bytes, (entry, str(spec))


def test_every_source_and_every_budget_is_used(results: Results) -> None:
    sources = {path.name for path in compiler.kernels_folder().iterdir() if path.name.endswith(".cu")}
    assert {spec.file for spec in SPECS} == sources
    assert {entry for done in results.values() for entry in done.result()} == BUDGET.keys()
