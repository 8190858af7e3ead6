"""Measures all claims, or those that are named, and writes their results, page and picture.

`python -m benchmarks programs` compiles for GPUs and TPUs instead; it has options of its own.
"""

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from . import harness, programs, report

CLAIMS = (
    "scaling_is_free_beside_optax",
    "clipping_shares_its_norm_with_the_check",
    "options_cost_what_they_cost_in_optax",
    "train_steps_do_not_notice_scaling",
    "telemetry_costs_nothing",
    "faster_than_the_peers",
    "many_tiny_tensors",
    "eager_apply",
    "dispatch",
    "beside_torch",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the scripts one after the other; each adds to the results as it goes."""
    first, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if first == programs.NAME:
        programs.main(rest)
        return
    parser = harness.parser(__doc__, prog="python -m benchmarks")
    parser.add_argument("claims", nargs="*", type=claim, help=f"some of: {', '.join(CLAIMS)}")
    parser.add_argument("--docs", default=report.DOCS, metavar="DIR", help="folder of the page")
    parser.add_argument("--torch-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--torch-threads", default="0", metavar="N")
    options = parser.parse_args(argv)
    words = [f"--{name}={getattr(options, name)}" for name in ("repeats", "budget", "output")]
    words += ["--quick"] if options.quick else []
    words += [f"--rounds={options.rounds}"] if options.rounds else []
    failed = []
    for name in options.claims or CLAIMS:
        torch = [
            f"--torch-python={options.torch_python}",
            f"--torch-threads={options.torch_threads}",
        ]
        try:
            importlib.import_module(f"benchmarks.{name}").main(
                words + torch * (name == "beside_torch")
            )
        except Exception:  # the others, and the page, are worth hours
            traceback.print_exc()
            failed.append(name)
    report.write(Path(options.output), Path(options.docs))
    if failed:
        sys.exit(f"Not measured to the end: {', '.join(failed)}.")


def claim(word: str) -> str:
    """The name of a claim."""
    if word not in CLAIMS:
        raise argparse.ArgumentTypeError(f"Expected one of {', '.join(CLAIMS)}; got {word}.")
    return word


if __name__ == "__main__":
    main()
