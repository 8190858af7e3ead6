"""The command line: `gainstage demo`, `doctor`, `advise`, `lint`, `report` and `xray`."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from gainstage import __version__
from gainstage._base.extras import missing_package


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the command-line arguments, by default those of the process.

    Returns:
        The exit status: 0, or 1 after an error. Wrong arguments exit with 2.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        return _run(arguments)
    except ModuleNotFoundError as error:
        extra = "demo" if arguments.command == "demo" else "report"
        print(missing_package(str(error.name), extra), file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace) -> int:
    import jax

    if arguments.command == "report":
        jax.config.update("jax_platforms", "cpu")  # the run may still use the accelerators
        from gainstage._xray.from_file import commands
        from gainstage.runs.report import main as report

        page = arguments.output or arguments.run.with_suffix(".html")
        return report(arguments.run, page, commands(arguments.run.parent))
    if arguments.command == "xray":
        if not os.environ.get("JAX_PLATFORMS"):
            jax.config.update("jax_platforms", "cpu")  # as for a report
        from gainstage._xray.from_file import main as xray

        where, how = (arguments.loss, arguments.like), (arguments.has_aux, arguments.using)
        return xray(arguments.path, *where, *how)
    try:
        jax.devices()
    except RuntimeError as error:  # JAX_PLATFORMS has a platform that is missing here
        print(error, file=sys.stderr)
        return 1
    if arguments.command == "advise":
        from gainstage._advise import main as advise

        about = (arguments.function, arguments.batches, arguments.card, arguments.has_aux)
        return advise(*about)
    if arguments.command == "lint":
        from gainstage._lint import main as lint

        return lint(arguments.function)
    if arguments.command == "doctor":
        from gainstage._doctor import main as doctor

        return doctor()
    from gainstage.demo import main as demo

    demo(arguments.output, arguments.steps, arguments.seed, arguments.json)
    return 0


class _Help(argparse.HelpFormatter):
    """Wraps each text except the examples, which have a line each."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class _Parser(argparse.ArgumentParser):
    """Lists examples in its help, and names the help in its errors."""

    def __init__(self, *, examples: Sequence[str], **options: Any):
        epilog = "\n  ".join(["examples:", *examples])
        super().__init__(epilog=epilog, formatter_class=_Help, **options)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Refuses unknown arguments here, with the usage of this command."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        super().error(f"{message.removesuffix('.')}. See {self.prog} --help.")


def _parser() -> _Parser:
    parser = _Parser(
        prog="gainstage",
        description="Loss scaling and mixed precision for JAX. The commands check this machine, "
        "show what loss scaling does, and look into the files of a run. The exit status is 0, 1 "
        "after an error, and 2 after a wrong argument. Errors go to standard error.",
        examples=[
            "gainstage doctor",
            "gainstage demo",
            "gainstage lint train:what_to_lint",
            "gainstage report run.jsonl",
            "gainstage xray bad.safetensors --loss train:loss_fn",
        ],
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train one network in float32, bfloat16, float16, and float16 with loss scaling",
        description="Trains one network from the same seed in float32, bfloat16, float16, and "
        "float16 with loss scaling, then in unscaled float16 on smaller batches. Prints the error "
        "of each and the reasons, and writes a picture. Takes about a minute on two CPU cores, "
        "and downloads nothing. The exit status is 0, or 1 if a package or a device is missing.",
        examples=[
            "gainstage demo --seed 3",
            "gainstage demo --output denoised.png",
            "gainstage demo --json > numbers.json",
        ],
    )
    demo.add_argument(
        "--output",
        type=_picture,
        default="gainstage-demo.png",
        metavar="PATH",
        help="the picture: .png, .pdf or .svg (default: ./gainstage-demo.png)",
    )
    demo.add_argument(
        "--steps",
        type=_positive,
        metavar="N",
        help="steps of training (default: 160)",
    )
    demo.add_argument(
        "--seed", type=_natural, default=0, metavar="N", help="random seed (default: 0)"
    )
    demo.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    commands.add_parser(
        "doctor",
        help="show how this machine computes half precision, and check that scaling works",
        description="Prints the versions, the devices, and how products in half precision are "
        "computed, then takes a few steps to check loss scaling. Reads and writes no files. The "
        "exit status is 0, or 1 if a check fails or JAX finds no device.",
        examples=["gainstage doctor", "JAX_PLATFORMS=cpu gainstage doctor"],
    )
    advise = commands.add_parser(
        "advise",
        help="measure what each precision costs on your model and batches",
        description="Imports a function without arguments that returns (loss_fn, params, batches), "
        "or (model, batches) with a Keras model. Computes gradients in float32, bfloat16, float16 "
        "and float8, and prints what each costs: noise, bias, memory and the time of products on "
        "paper. Says which to use, with the lines to write. Writes no files. The exit status is "
        "0, or 1 if the function cannot be imported or its gradients cannot be compared.",
        examples=[
            "gainstage advise train:what_to_advise",
            "gainstage advise train:what_to_advise --batches 8 --card T4",
            "gainstage advise train:what_to_advise > advice.txt",
        ],
    )
    advise.add_argument(
        "function",
        type=_function_to_advise,
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns (loss_fn, params, batches), as for "
        "gainstage.advise, or (model, batches), as for gainstage.interop.keras.advise. "
        "Its module is imported, also from this directory",
    )
    advise.add_argument(
        "--batches", type=_positive, metavar="N", help="use the first N batches (default: all)"
    )
    advise.add_argument(
        "--card",
        metavar="CARD",
        help="for the times on paper, such as H100, A100, L4, T4 or 'RTX 4090' (default: that of "
        "this machine; on a CPU an H100, with a table of all that are known)",
    )
    advise.add_argument(
        "--has-aux", action="store_true", help="the loss returns (loss, aux), as for jax.grad"
    )
    lint = commands.add_parser(
        "lint",
        help="find what is wrong with the loss scale in a step of your own",
        description="Imports a function without arguments that returns (step, arguments), traces "
        "the step, and follows the loss scale through its program, as gainstage.lint does. Prints "
        "each finding with its line and what to write instead. Computes and writes nothing. The "
        "exit status is 0, or 1 if something is found or the step cannot be traced.",
        examples=["gainstage lint train:what_to_lint"],
    )
    lint.add_argument(
        "function",
        type=lambda word: _function(word, "what_to_lint"),
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns (step, arguments), such as (step, (state, "
        "x, y)). Its module is imported, also from this directory",
    )
    report = commands.add_parser(
        "report",
        help="summarize a recorded run",
        description="Reads a run that gainstage.diagnostics.JsonLines recorded, and the step files "
        "in its folder. Prints tables and writes a page: the loss scale, the skipped steps with "
        "their causes, the loss, the tensors, and advice. "
        "The exit status is 0, or 1 if the run cannot be read or the page cannot be written.",
        examples=[
            "gainstage report run.jsonl",
            "gainstage report run.jsonl --output run.png",
        ],
    )
    report.add_argument("run", type=_recording, metavar="RUN.jsonl", help="the recorded run")
    report.add_argument(
        "--output",
        type=_page,
        metavar="PATH",
        help="the page, .html, or a picture, .png, .pdf or .svg (default: RUN.html)",
    )
    xray = commands.add_parser(
        "xray",
        help="find the cause of a bad step from a step file",
        description="Reads a step file that gainstage.diagnostics.StepRecorder wrote, imports the "
        "loss function, and computes the step again. Prints the operation where non-finite "
        "numbers start, its layer, and the changes that help. Writes no files. Runs on "
        "the CPU unless the environment variable JAX_PLATFORMS is set. The exit status is 0, or 1 "
        "if the file cannot be read or the step cannot be computed.",
        examples=[
            "gainstage xray bad.safetensors --loss train:loss_fn",
            "gainstage xray bad.safetensors --loss train:loss_fn --like train:make_model",
        ],
    )
    xray.add_argument("path", type=Path, metavar="STEP.safetensors", help="the step file")
    function: dict[str, Any] = {"type": _function, "metavar": "MODULE:FUNCTION"}
    xray.add_argument(
        "--loss",
        required=True,
        **function,
        help="the loss function. Its module is imported, also from this directory, so a script "
        'must train only under `if __name__ == "__main__":`',
    )
    xray.add_argument(
        "--like",
        **function,
        help="a function without arguments that returns a model like that of the run, or a tuple "
        "of the first arguments; needed for NNX and Equinox models",
    )
    xray.add_argument(
        "--has-aux", action="store_true", help="the loss function returns (loss, aux)"
    )
    xray.add_argument(
        "--using",
        **function,
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
        advice = "Choose another path" if path.parent.is_dir() else "Create its folder first"
        raise argparse.ArgumentTypeError(
            f"Expected a file that can be written; got {word} ({error.strerror}). {advice}."
        ) from error
    return path


def _recording(word: str) -> Path:
    if not Path(word).name:
        raise argparse.ArgumentTypeError(f"Expected the file of a run; got {word or 'no name'}.")
    return Path(word)


def _page(word: str) -> Path:
    return _picture(word, (".html", ".png", ".pdf", ".svg"))


def _function_to_advise(word: str) -> str:
    return _function(word, "what_to_advise")


def _function(word: str, example: str = "loss_fn") -> str:
    """Checks that a word is MODULE:FUNCTION, with a module as in an import."""
    module, _, name = word.partition(":")
    parts = [*module.split("."), *name.split(".")]
    if module.endswith(".py") or not all(map(str.isidentifier, parts)):
        raise argparse.ArgumentTypeError(
            f"Expected MODULE:FUNCTION, such as train:{example} for {example} in train.py; got "
            f"{word}."
        )
    return word


if __name__ == "__main__":
    sys.exit(main())
