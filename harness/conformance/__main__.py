"""`python -m harness.conformance STRATEGY`: check one strategy and print its report card.

It does not know what is checked. Exit code 0: nothing failed; 1: something did; 2: it could not be asked.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    from rich.console import Console

    from harness.conformance.card import check, show
    from harness.conformance.doors import open_door
    from harness.conformance.promise import KINDS

    try:
        unknown = [kind for kind in options.kinds if kind not in KINDS]
        if unknown or options.examples < 1:
            raise UserError(
                f"--kinds takes letters of {''.join(KINDS)} and --examples 1 or more; got {options.kinds!r} and {options.examples}"
            )
        subject = open_door(options.strategy, options.backend, options.seed, options.examples, options.config_dir)
        console = Console()
        return 0 if show(subject, check(subject, options.kinds or list(KINDS), console), console) else 1
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m harness.conformance", description="Check a KV-cache strategy against the contract.")
    parser.add_argument(
        "strategy", help="a name in conf/strategy, or module:Class for a cache of your own (its module is imported, and so run)"
    )
    parser.add_argument("--backend", default="auto", help="kernels: auto, reference, cpu or triton (default: auto)")
    parser.add_argument("--seed", type=int, default=0, help="of rows and random lives (default: 0)")
    parser.add_argument("--examples", type=int, default=30, help="random lives of each sort (default: 30)")
    parser.add_argument("--kinds", default="", help="letters of the kinds to check, such as BPR (default: all)")
    parser.add_argument("--config-dir", type=Path, action="append", default=[], help="a folder with strategy/NAME.yaml files of your own")
    return parser


if __name__ == "__main__":
    sys.path.insert(0, "")
    sys.exit(main())
