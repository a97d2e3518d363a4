"""The planner: numbering of nodes, rectangles, tiles, tile sizes, and the account."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_rnnt_cupy import PlanError, plan_memory
from flash_rnnt_cupy.plan import DeviceFacts, Life, Packing, Part, Plan, Rows, TileRows, make_plan
from flash_rnnt_cupy.plan.tiling import cut_tiles
from flash_rnnt_cupy.problem import ITEMSIZE, Form, Options, Problem
from flash_rnnt_cupy.topology import RNNT


def scratch(problem: Problem, packing: Packing, gradients: frozenset[str]) -> tuple[Part, ...]:
    parts = [Part("a device's own", (problem.batch, packing.n_frames), "int64", Life.TILE)]
    return (*parts, Part("more of it", (10,), "float64", Life.BACKWARD)) if gradients else tuple(parts)


FACTS = DeviceFacts(
    name="a device",
    tile_bytes=1 << 20,
    half_products=True,
    shared_bytes=0,
    alpha_shape=lambda problem, packing: (problem.topology.reach, packing.n_nodes),
    sums_apart=frozenset({"encoder", "predictor", "weight", "bias"}),
    logits_multiple=1,
    scratch=scratch,
    against_fused=lambda _: ("there are none",),
    row_multiple=512,
)

batches = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=4)


def packing_of(batch: list[tuple[int, int]]) -> Packing:
    sizes = np.array(batch, np.int64).reshape(-1, 2)
    return Packing(sizes[:, 0], sizes[:, 1])


@st.composite
def banded_rows(draw: st.DrawFn) -> Rows:
    """Of every frame any run of states, empty ones too, and now and then all of them."""
    packing = packing_of(draw(batches))
    if draw(st.booleans()):
        return packing.all_rows()
    bounds = [
        sorted(draw(st.tuples(st.integers(0, U + 1), st.integers(0, U + 1))))
        for T, U in zip(packing.frames_b, packing.labels_b, strict=True)
        for _ in range(T)
    ]
    lo_f, hi_f = np.array(bounds, np.int32).reshape(-1, 2).T
    return packing.band_rows(lo_f, hi_f)


def plain_rows(rows: Rows) -> list[tuple[int, int, int]]:
    """(b, t, u) of each row, in order."""
    found, f = [], 0
    for b, T in enumerate(rows.packing.frames_b):
        for t in range(T):
            count = rows.row_start_f[f + 1] - rows.row_start_f[f]
            found += [(b, t, int(rows.lo_f[f]) + i) for i in range(count)]
            f += 1
    return found


@given(batches)
def test_nodes_are_numbered_as_in_a_plain_loop(batch: list[tuple[int, int]]) -> None:
    packing, n = packing_of(batch), 0
    for b, (T, U) in enumerate(batch):
        for t in range(T):
            for u in range(U + 1):
                assert packing.node_start_b[b] + t * packing.states_b[b] + u == n
                n += 1
    assert packing.n_nodes == n
    assert packing.n_frames == sum(T for T, _ in batch)
    assert packing.utterance_f.tolist() == [b for b, (T, _) in enumerate(batch) for _ in range(T)]
    for starts, counts in (
        (packing.frame_start_b, [T for T, _ in batch]),
        (packing.state_start_b, [U + 1 for _, U in batch]),
        (packing.label_start_b, [U for _, U in batch]),
    ):
        assert starts.tolist() == [sum(counts[:b]) for b in range(len(batch) + 1)]
        assert starts.dtype == np.int64


def test_node_numbers_do_not_overflow() -> None:
    packing = Packing(np.array([2**20, 2**20]), np.array([2**13, 0]))
    assert packing.node_start_b.tolist() == [0, 2**33 + 2**20, 2**33 + 2**21]


@given(batches)
def test_all_rows_are_all_nodes(batch: list[tuple[int, int]]) -> None:
    rows = packing_of(batch).all_rows()
    assert plain_rows(rows) == [(b, t, u) for b, (T, U) in enumerate(batch) for t in range(T) for u in range(U + 1)]


@given(rows=banded_rows(), max_rows=st.integers(1, 50), ends=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_rectangles_cover_every_row_once_and_in_order(rows: Rows, max_rows: int, ends: tuple[float, float]) -> None:
    begin, end = sorted(round(x * rows.n_rows) for x in ends)
    covered = []
    for rectangle in rows.rectangles(begin, end, max_rows):
        b, t_lo, t_hi, u_lo, u_hi, row = rectangle
        assert rectangle.shape == (t_hi - t_lo, u_hi - u_lo)
        assert 1 <= rectangle.row_end - row <= max_rows
        assert row == begin + len(covered)
        covered += [(b, t, u) for t in range(t_lo, t_hi) for u in range(u_lo, u_hi)]
    assert covered == plain_rows(rows)[begin:end]


@given(rows=banded_rows(), ends=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_nodes_of_a_run_of_rows(rows: Rows, ends: tuple[float, float]) -> None:
    begin, end = sorted(round(x * rows.n_rows) for x in ends)
    packing = rows.packing
    expected = [packing.node_start_b[b] + t * packing.states_b[b] + u for b, t, u in plain_rows(rows)[begin:end]]
    assert rows.nodes(begin, end).tolist() == expected


def test_rectangles_are_as_large_as_they_may_be() -> None:
    rows = packing_of([(10, 2), (4, 0)]).all_rows()
    shapes = [rectangle.shape for rectangle in rows.rectangles(0, rows.n_rows, 100)]
    assert shapes == [(10, 3), (4, 1)]
    assert [rectangle.shape for rectangle in rows.rectangles(1, 30, 7)] == [
        (1, 2),
        (2, 3),
        (2, 3),
        (2, 3),
        (2, 3),
        (1, 3),
    ]


@given(rows=banded_rows(), tile_rows=st.integers(1, 60))
def test_tiles_of_equal_size_cover_every_row(rows: Rows, tile_rows: int) -> None:
    starts = rows.row_start_f
    tiles = cut_tiles(starts, tile_rows)
    assert [tile.row_begin for tile in tiles[:1]] == [0] * bool(rows.n_rows)
    assert sum(tile.n_rows for tile in tiles) == rows.n_rows
    for before, after in pairwise(tiles):
        assert before.row_end == after.row_begin
    assert all(tile.n_rows == tile_rows for tile in tiles[:-1])
    for tile in tiles:
        assert 1 <= tile.n_rows <= tile_rows
        assert starts[tile.frame_begin] <= tile.row_begin < starts[tile.frame_begin + 1]
        assert starts[tile.frame_end - 1] < tile.row_end <= starts[tile.frame_end]


def joint_problem(**changes: Any) -> Problem:
    frames_b, labels_b = np.array([50, 20]), np.array([9, 30])
    problem = Problem(
        form=Form.JOINT,
        topology=RNNT,
        frames_b=frames_b,
        labels_b=labels_b,
        vocabulary=100,
        blank=99,
        dtype="float16",
        shapes={"encoder": (2, 50, 60), "predictor": (2, 31, 60), "weight": (100, 60), "bias": (100,)},
        options=Options(),
        joint_width=60,
        parameter_dtype="float32",
    )
    return replace(problem, **changes)


N = 50 * 10 + 20 * 31
ROW_BYTES = (60 + 100) * 2 + 8


@pytest.mark.parametrize(
    ("tile_rows", "workspace_bytes", "expected"),
    [
        (1, None, 1),
        (77, None, 77),
        (10**9, None, N),
        (None, None, N),
        ("auto", None, N),
        ("auto", 10 * ROW_BYTES, 10),
        ("auto", 11 * ROW_BYTES - 1, 10),
        ("auto", ROW_BYTES, 1),
        ("auto", 2**40, N),
        (77, 77 * ROW_BYTES, 77),
        (None, N * ROW_BYTES, N),
    ],
)
def test_tile_rows(tile_rows: TileRows, workspace_bytes: int | None, expected: int) -> None:
    plan = make_plan(joint_problem(), FACTS, tile_rows, workspace_bytes)
    assert plan.tile_rows == expected
    assert plan.untiled == (tile_rows is None)
    assert (plan.account["tile hidden"].shape, plan.account["tile logits"].shape) == ((expected, 60), (expected, 100))
    workspace = plan.account["tile hidden"].nbytes + plan.account["tile logits"].nbytes
    assert workspace_bytes is None or workspace <= workspace_bytes
    assert sum(tile.n_rows for tile in plan.tiles) == N
    assert plan.whole == (0, N, 0, 70)


def test_auto_aims_at_the_tile_bytes_of_the_device() -> None:
    for tile_bytes, expected in ((512 * ROW_BYTES, 512), (512 * ROW_BYTES - 1, 384), (1, 128)):
        assert make_plan(joint_problem(), replace(FACTS, tile_bytes=tile_bytes)).tile_rows == expected


@pytest.mark.parametrize(
    ("tile_rows", "workspace_bytes", "least"),
    [("auto", ROW_BYTES - 1, 1), (10, 10 * ROW_BYTES - 1, 10), (None, N * ROW_BYTES - 1, N)],
)
def test_a_tile_that_does_not_fit_raises(tile_rows: TileRows, workspace_bytes: int, least: int) -> None:
    message = rf"workspace_bytes: expected at least {least * ROW_BYTES} bytes for {least} row.*got {workspace_bytes}"
    with pytest.raises(PlanError, match=message):
        make_plan(joint_problem(), FACTS, tile_rows, workspace_bytes)


def account_of(**options: Any) -> dict[str, tuple[tuple[int, ...], str, str]]:
    problem, facts = options.pop("problem", joint_problem()), options.pop("facts", FACTS)
    plan = make_plan(problem, facts, options.pop("tile_rows", 64), **options)
    return {part.name: (part.shape, part.dtype, part.life.value) for part in plan.account.parts}


def test_the_parts_of_an_account() -> None:
    assert account_of() == {
        "encoder": ((2, 50, 60), "float16", "given"),
        "predictor": ((2, 31, 60), "float16", "given"),
        "weight": ((100, 60), "float32", "given"),
        "bias": ((100,), "float32", "given"),
        "scores": ((2, N), "float32", "saved"),
        "log likelihoods": ((2,), "float64", "saved"),
        "a device's own": ((2, 70), "int64", "tile"),
        "more of it": ((10,), "float64", "backward"),
        "weight as multiplied": ((100, 60), "float16", "saved"),
        "tile hidden": ((64, 60), "float16", "tile"),
        "tile logits": ((64, 100), "float16", "tile"),
        "tile active": ((64, 8), "uint8", "tile"),
        "normalizers": ((1, N), "float32", "saved"),
        "alpha": ((1, N), "float64", "saved"),
        "gradient of encoder": ((2, 50, 60), "float16", "backward"),
        "sums of encoder": ((2, 50, 60), "float32", "backward"),
        "gradient of predictor": ((2, 31, 60), "float16", "backward"),
        "sums of predictor": ((2, 31, 60), "float32", "backward"),
        "gradient of weight": ((100, 60), "float32", "backward"),
        "gradient of bias": ((100,), "float32", "backward"),
    }


def test_parts_that_depend_on_device_dtype_and_wanted_gradients() -> None:
    whole = account_of()
    no_backward = account_of(gradients=frozenset())
    assert set(whole) - set(no_backward) == {name for name, (*_, life) in whole.items() if life == "backward"} | {
        "normalizers",
        "alpha",
    }
    assert "gradient of weight" not in account_of(gradients=frozenset({"encoder"}))
    wide = account_of(facts=replace(FACTS, half_products=False))
    assert wide["tile logits"] == ((64, 100), "float32", "tile")
    assert "weight as multiplied" not in wide
    half = account_of(problem=joint_problem(parameter_dtype="float16"))
    assert half["bias as added"] == ((100,), "float32", "saved")
    assert "weight as multiplied" not in half
    assert account_of(tile_rows=None)["tile hidden"] == ((N, 60), "float16", "saved")
    double = account_of(problem=joint_problem(dtype="float64", parameter_dtype="float64"))
    assert double["scores"] == ((2, N), "float64", "saved")
    assert not any(name.startswith("sums of") for name in double)


@pytest.mark.parametrize("tile_rows", [64, None])
def test_logits_may_be_padded_and_active_bits_kept(tile_rows: TileRows) -> None:
    facts = replace(FACTS, logits_multiple=8)
    rows, life = (tile_rows, "tile") if tile_rows else (N, "saved")
    account = account_of(facts=facts, tile_rows=tile_rows)
    assert account["tile logits"] == ((rows, 104), "float16", life)
    assert account["tile active"] == ((rows, 8), "uint8", life)
    for options, has_bits in ((Options("tanh"), False), (Options("tanh", 1e-9), False), (Options("tanh", 0.1), True)):
        account = account_of(facts=facts, problem=joint_problem(options=options))
        assert ("tile active" in account) == has_bits
    row_bytes = (60 + 104) * 2 + 8
    assert make_plan(joint_problem(), facts, "auto", 10 * row_bytes).tile_rows == 10
    assert make_plan(joint_problem(), facts, "auto", 10 * row_bytes - 1).tile_rows == 9


def test_the_logits_form_has_one_tile_and_no_workspace() -> None:
    problem = joint_problem(
        form=Form.LOGITS, shapes={"logits": (N, 100)}, joint_width=0, parameter_dtype="", dtype="float32"
    )
    account = account_of(problem=problem)
    assert {"gradient of logits", "logits", "scores", "alpha"} <= set(account)
    assert not {"tile hidden", "tile logits", "weight as multiplied"} & set(account)
    plan = make_plan(problem, FACTS)
    assert len(plan.tiles) == 1
    assert not plan.untiled


@pytest.mark.parametrize("gradients", [True, False])
def test_sums_of_an_account(gradients: bool) -> None:
    plan = make_plan(joint_problem(), FACTS, 64, gradients=frozenset({"weight"} if gradients else ()))
    account = plan.account
    nbytes: dict[str, int] = {}
    for part in account.parts:
        size = ITEMSIZE[part.dtype] * int(np.prod(part.shape, dtype=int))
        assert part.nbytes == size
        nbytes[part.life.value] = nbytes.get(part.life.value, 0) + size
    assert account.given_bytes == nbytes["given"]
    assert account.saved_bytes == nbytes["saved"]
    assert account.forward_bytes == nbytes["given"] + nbytes["saved"] + nbytes["tile"]
    assert account.backward_bytes == account.forward_bytes + nbytes.get("backward", 0)
    assert account.peak_bytes == (account.backward_bytes if gradients else account.forward_bytes)
    assert account.dense_bytes == N * 100 * 2


def test_plan_memory_is_the_account_of_the_call() -> None:
    account = plan_memory([50, 20], [9, 30], 60, 100, dtype="float16", tile_rows=64)
    assert account["tile logits"].shape == (64, 100)
    assert account["encoder"].shape == (2, 50, 60)
    assert account["predictor"].shape == (2, 31, 60)
    without = plan_memory([50, 20], [9, 30], 60, 100, dtype="float16", tile_rows=64, bias=False, gradients=False)
    assert {"bias", "gradient of bias", "alpha"} & {part.name for part in without.parts} == set()
    assert without.peak_bytes < account.peak_bytes


def test_memory_beyond_one_tile_does_not_grow_with_the_vocabulary() -> None:
    def lattice_bytes(V: int) -> int:
        account = plan_memory([500], [100], 64, V, workspace_bytes=1 << 20)
        parameters = sum(p.nbytes for p in account.parts if "weight" in p.name or "bias" in p.name)
        return account.peak_bytes - parameters

    assert abs(lattice_bytes(8192) - lattice_bytes(128)) <= 1 << 20


def test_records_print_themselves() -> None:
    plan = make_plan(joint_problem(), FACTS, 64)
    assert str(plan.problem) == "rnnt joint: B=2 T<=50 U<=30 H=60 V=100 float16"
    assert str(plan) == f"{plan.problem} on a device: N={N}, 64 rows a tile, no fused kernels (there are none)"
    assert ", untiled, " in str(make_plan(joint_problem(), FACTS, None))
    title, *lines = str(plan.account).splitlines()
    assert title == f"{plan.problem} on a device, tiles of 64 rows, no fused kernels (there are none)"
    assert [line.split("  ")[1] for line in lines[: len(plan.account.parts)]] == [p.name for p in plan.account.parts]
    assert len({len(line) for line in lines}) == 1
    assert f"{plan.account.backward_bytes / 2**20:.2f} MiB" in lines[-2]
    assert "dense scores, never held" in lines[-1]


def test_empty_problems_have_plans() -> None:
    nothing = np.zeros(0, np.int64)
    shapes = {"encoder": (0, 0, 60), "predictor": (0, 1, 60), "weight": (100, 60)}
    plan: Plan = make_plan(joint_problem(frames_b=nothing, labels_b=nothing, shapes=shapes), FACTS)
    assert (plan.tiles, plan.rows.n_rows) == ((), 0)
    assert "B=0" in str(plan)
