"""The command line: `python -m flash_rnnt_cupy info | selfcheck | plan | demo`."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Sequence

import flash_rnnt_cupy
from flash_rnnt_cupy import backends
from flash_rnnt_cupy.errors import BackendError, InputError
from flash_rnnt_cupy.problem import FLOATS

PACKAGES = ("numpy", "ml_dtypes", "cupy-cuda13x", "cupy-cuda12x", "torch")


def info() -> int:
    """Versions, and which backend is active and why others are not."""
    print(f"flash_rnnt_cupy {flash_rnnt_cupy.__version__}, Python {platform.python_version()}")
    for package in PACKAGES:
        try:
            print(f"  {package:<14}{importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"  {package:<14}not installed")
    reasons = {name: backends.unavailable(name) for name in backends.NAMES}
    active = next(name for name, reason in reasons.items() if not reason)
    for name, reason in reasons.items():
        state = f"unavailable: {reason}" if reason else backends.planning_facts(name).name
        print(f"{'*' if name == active else ' '} {name:<14}{state}")
    print('* is what "auto" plans with; a call runs where its arrays are')
    return 0


def selfcheck(backend: str) -> int:
    """Properties that any correct loss has, on this machine."""
    return 0 if flash_rnnt_cupy.selfcheck(backend) else 1


def plan(arguments: argparse.Namespace) -> int:
    """Memory of a training step, part by part, beside that of the dense scores."""
    account = flash_rnnt_cupy.plan_memory(
        [arguments.frames] * arguments.batch,
        [arguments.labels] * arguments.batch,
        arguments.joint_width,
        arguments.vocabulary,
        dtype=arguments.dtype,
        parameter_dtype=arguments.parameter_dtype,
        tile_rows=arguments.tile_rows,
        workspace_bytes=arguments.workspace_bytes,
        backend=arguments.backend,
    )
    print(account)
    return 0


def _tile_rows(text: str) -> int | str | None:
    return {"auto": "auto", "none": None}[text] if text in ("auto", "none") else int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flash_rnnt_cupy", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    backend_help = f"auto, {', '.join(backends.NAMES)}"
    commands.add_parser("info", help=info.__doc__)
    check = commands.add_parser("selfcheck", help=selfcheck.__doc__)
    check.add_argument("--backend", default="auto", help=backend_help)
    memory = commands.add_parser("plan", help=plan.__doc__)
    for short, name, description in (
        ("-B", "batch", "utterances"),
        ("-T", "frames", "frames an utterance"),
        ("-U", "labels", "labels an utterance"),
        ("-H", "joint-width", "width of the joint network"),
        ("-V", "vocabulary", "scores a node, blank included"),
    ):
        memory.add_argument(short, f"--{name}", type=int, required=True, help=description)
    memory.add_argument("--dtype", default="float16", choices=FLOATS, help="of encoder and predictor states")
    memory.add_argument("--parameter-dtype", default="float32", choices=FLOATS, help="of weight and bias")
    memory.add_argument("--tile-rows", default="auto", type=_tile_rows, help="rows of a tile, auto, or none (untiled)")
    memory.add_argument("--workspace-bytes", type=int, help="bound for a tile")
    memory.add_argument("--backend", default="auto", help=f"{backend_help}; cuda plans for an H200 if there is no GPU")
    demo = commands.add_parser("demo", help="Trains a small streaming recogniser through this library.")
    demo.add_argument("--data", default="morse", choices=("morse", "speech"))
    demo.add_argument("--output", default="demo.png", help="where the picture goes")
    demo.add_argument("--seed", type=int, default=0)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status."""
    given = _parser().parse_args(arguments)
    try:
        if given.command == "info":
            return info()
        if given.command == "selfcheck":
            return selfcheck(given.backend)
        if given.command == "plan":
            return plan(given)
        from flash_rnnt_cupy.demo import train  # noqa: PLC0415  needs PyTorch

        train.main(data=given.data, seed=given.seed, output=given.output)
    except (InputError, BackendError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
