"""The command line: `gainstage demo`, `doctor`, `report` and `xray`."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gainstage import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the command-line arguments, by default those of the process.

    Returns:
        The exit status: 0, or 1 if a package is missing. Wrong arguments exit with 2.
    """
    parser = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = parser.parse_args(words)
        if arguments.command is None:
            parser.print_help()
            return 0
        if arguments.command == "doctor":
            return importlib.import_module("gainstage._doctor").main()
        if arguments.command == "report":
            import jax

            jax.config.update("jax_platforms", "cpu")  # the run may still use the accelerators
            report = importlib.import_module("gainstage.runs.report")
            page = arguments.output or arguments.run.with_suffix(".html")
            from_file = importlib.import_module("gainstage.xray.from_file")
            return report.main(arguments.run, page, from_file.commands(arguments.run.parent))
        if arguments.command == "xray":
            import jax

            if not os.environ.get("JAX_PLATFORMS"):
                jax.config.update("jax_platforms", "cpu")  # as for a report
            from_file = importlib.import_module("gainstage.xray.from_file")
            where = (arguments.loss, arguments.like, arguments.output)
            how = (arguments.has_aux, arguments.using, arguments.plan)
            return from_file.main(arguments.path, *where, *how)
        demo = importlib.import_module("gainstage.demo")
        about = (arguments.steps, arguments.seed, arguments.json, arguments.task)
        demo.main(arguments.output, *about)
    except ModuleNotFoundError as error:
        extra = {"xray": "report"}.get(words[0], words[0])
        wanted = f'Expected {error.name} to be installed; run: pip install "gainstage[{extra}]"'
        print(wanted, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gainstage",
        description="Loss scaling for float16 on JAX.",
        epilog="example: gainstage demo --output demo.png",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train one network in float32, bfloat16, float16, and float16 with loss scaling",
        description="Trains one network from the same seed in float32, bfloat16, float16, and "
        "float16 with loss scaling, and in float16 on smaller batches, to see where harm begins. "
        "Prints what suffered, what did not, and why, and draws it.",
        epilog="examples: gainstage demo --seed 3    gainstage demo --task digits    "
        "gainstage demo --json > numbers.json",
    )
    demo.add_argument(
        "--task",
        choices=("photographs", "digits"),
        default="photographs",
        help="remove noise from photographs (default), or tell digits apart and draw them again",
    )
    demo.add_argument(
        "--output",
        type=_picture,
        default="gainstage-demo.png",
        metavar="PATH",
        help="the picture's file (default: ./gainstage-demo.png)",
    )
    demo.add_argument(
        "--steps", type=_positive, metavar="N", help="steps of training (160; digits: 800)"
    )
    demo.add_argument("--seed", type=_natural, default=0, metavar="N", help="random seed (0)")
    demo.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    commands.add_parser(
        "doctor",
        help="show how this machine computes half precision, and check that scaling works",
        description="Prints versions, devices and how products in half precision are computed, "
        "then takes a few steps of each kind. Exits with 1 if one of them is wrong.",
    )
    report = commands.add_parser(
        "report",
        help="summarise a recorded run",
        description="Prints tables of a run that gainstage.diagnostics.JsonLines has recorded, and "
        "writes a page of it: its scale with the skipped steps and their causes, its loss, its "
        "tensors, advice, and what other rules would have done.",
        epilog="examples: gainstage report run.jsonl    gainstage report run.jsonl --output a.png",
    )
    report.add_argument("run", type=_recording, metavar="RUN.jsonl", help="the file of the run")
    report.add_argument(
        "--output",
        type=_page,
        metavar="PATH",
        help="the page's file, .html, or a picture's, .png, .pdf or .svg (default: RUN.html)",
    )
    xray = commands.add_parser(
        "xray",
        help="find the cause of a bad step that a run has kept",
        description="Reads a file that gainstage.diagnostics.StepRecorder wrote, computes the "
        "step again and prints which operation was not finite, in which layer, and what to do. "
        "Runs on the CPU unless the environment variable JAX_PLATFORMS says otherwise.",
        epilog="example: gainstage xray bad.npz --loss train:loss_fn --output bad.html",
    )
    xray.add_argument("path", type=Path, metavar="PATH", help="the file of the step")
    function = "MODULE:FUNCTION"
    xray.add_argument(
        "--loss",
        required=True,
        metavar=function,
        help="the loss function; its module is imported, from this directory too, so a script must "
        'train under `if __name__ == "__main__":` only',
    )
    xray.add_argument(
        "--like",
        metavar=function,
        help="a function without arguments that returns a model like that of the run, or a tuple "
        "of such arguments; needed for NNX and Equinox models",
    )
    xray.add_argument(
        "--plan",
        type=Path,
        metavar="PLAN.json",
        help="the file for a plan that keeps in float32 what was not finite, if the loss function "
        "is what gainstage.autocast returned (default: none)",
    )
    xray.add_argument(
        "--output", type=_html, metavar="PAGE.html", help="the page's file (default: none)"
    )
    xray.add_argument(
        "--has-aux", action="store_true", help="the loss function returns (loss, aux)"
    )
    xray.add_argument(
        "--using",
        metavar=function,
        help="the function that differentiates, such as train:my_value_and_grad (default: that of "
        "NNX or Equinox for their models, else jax:value_and_grad)",
    )
    return parser


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"Expected an integer >= 1; got {word}.")
    return int(word)


def _natural(word: str) -> int:
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"Expected an integer >= 0; got {word}.")
    return int(word)


def _picture(word: str, kinds: Sequence[str] = (".png", ".pdf", ".svg")) -> Path:
    """Checks, before the work, that a file can be written."""
    path = Path(word)
    if path.suffix.lower() not in kinds:
        names = " or ".join(filter(None, [", ".join(kinds[:-1]), kinds[-1]]))
        raise argparse.ArgumentTypeError(f"Expected a {names} file; got {word}.")
    try:
        try:
            path.open("xb").close()
            path.unlink()
        except FileExistsError:  # leave it unchanged until there is a result
            path.open("ab").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"Expected a file that can be written; got {word} ({error.strerror})."
        ) from error
    return path


def _recording(word: str) -> Path:
    if not Path(word).name:
        raise argparse.ArgumentTypeError(f"Expected the file of a run; got {word or 'no name'}.")
    return Path(word)


def _page(word: str) -> Path:
    return _picture(word, (".html", ".png", ".pdf", ".svg"))


def _html(word: str) -> Path:
    return _picture(word, (".html",))


if __name__ == "__main__":
    sys.exit(main())
