"""One entry to all measurements: `python -m bench <command> [options]`; without a command it lists them."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "run": "every provider on every workload: accuracy, throughput and peak memory",
    "accuracy": "the lattice alone: posterior sums of long utterances, ours and other losses",
    "logits": "the loss of given logits beside reading and writing them",
    "cpu": "the NumPy backend beside plain PyTorch on the CPU: time and peak memory",
    "model": "a whole training step of a 100M-parameter model: time and peak memory",
    "stages": "time of every stage of a step",
    "first-call": "kernel compilation and its cache",
    "suite": "the test suite on a GPU, and the kernels under compute-sanitizer",
    "occupancy": "what leaving nodes out of backward costs in accuracy and saves in rows",
    "rng": "the dropout generator under TestU01",
    "demo": "the demo, its result and its picture",
    "report": "writes the tables of README.md and bench/NOTES.md from the newest records",
    "plot": "draws the figures of bench/figures/ from the newest records",
}


def main(arguments: list[str]) -> int:
    """The command's exit status."""
    command, *rest = arguments or ["help"]
    if command not in COMMANDS:
        print(__doc__)
        for name, words in COMMANDS.items():
            print(f"  {name:<12}{words}")
        return 0 if command in ("help", "-h", "--help") else 2
    module = importlib.import_module(f"bench.{command.replace('-', '_')}")
    return module.main(rest) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
