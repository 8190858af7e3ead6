"""`gainstage xray`: the X-ray of a bad step from a step file."""

import contextlib
import importlib
import inspect
import operator
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from gainstage._base.checks import as_power
from gainstage._base.importing import importing
from gainstage._programs.places import is_library
from gainstage._xray import step_file
from gainstage._xray.step_recorder import BadStep, bad_step, settings, template_of, versions
from gainstage._xray.xray import xray
from gainstage.runs.rows import printable
from gainstage.runs.summary import StepFile

LISTED = 8  # names that an error lists
LONGEST_LINE = 4096  # characters of a line that is printed
JAX_NOTE = "--------------------\nFor simplicity, JAX has removed"  # ends an error's message


def main(
    path: Path,
    loss: str,
    like: str | None = None,
    has_aux: bool = False,
    using: str | None = None,
) -> int:
    """Prints the X-ray of a step file.

    Args:
        path: the step file.
        loss: the loss function, as "module:function".
        like: what `read_step` takes as `like`, as "module:function".
        has_aux: whether the loss function returns (loss, aux).
        using: the function that differentiates, as "module:function"; by default as
            for `gainstage.value_and_grad`.

    Returns:
        The exit status: 0, or 1 after an error, which is printed.
    """
    options = {}
    try:
        _configure(step_file.description(path))
        loss_fn = imported_from("--loss", loss)
        if using is not None:
            options["using"] = imported_from("--using", using)
            _check_takes("--using", using, options["using"], loss_fn, has_aux=True)
        template = None if like is None else imported_from("--like", like, template_of)
        jax.devices()  # else a missing platform would look like damage to the file
        bad = bad_step(path, template, "--like")
        _check_takes("--loss", loss, loss_fn, *bad.args)
    except OSError as error:
        print(
            f"Expected a step file that gainstage.diagnostics.StepRecorder wrote; got {path} "
            f"({error.strerror}). Pass the path that StepRecorder was given.",
            file=sys.stderr,
        )
        return 1
    except (ValueError, RuntimeError) as error:
        print(_safe(error), file=sys.stderr)
        return 1
    print(_safe(_about(path, bad)))
    print("It compiles each operation, which can take a minute.", flush=True)
    try:
        result = xray(loss_fn, *bad.args, scale=bad.scale, has_aux=has_aux, **options)
    except Exception as error:
        if isinstance(error, TypeError) and "Expected a scalar loss" in str(error):
            said = f"{error} If {loss} returns (loss, aux), pass --has-aux."
        elif isinstance(error, TypeError) and "Expected (loss, aux)" in str(error):
            said = f"{error} If {loss} returns the loss alone, leave out --has-aux."
        else:
            if not _own_frames(error):  # not the user's fault: they can report it
                traceback.print_exc()
            said = f"{_error_text(loss, error)}\nIts arguments in {path}:\n{_shown(bad.args)}"
        print(_safe(said), file=sys.stderr)
        return 1
    print(_safe(result))
    if result.finite and not bad.finite:
        print(
            f"The step is finite here, and was not in its run. Is {loss} what was trained, with "
            f"its autocast, and was this its batch? Another version or platform may be the reason."
        )
    return 0


def commands(folder: Path) -> dict[str, StepFile]:
    """Returns the step files in a folder, by the commands that look into them."""
    files = {}
    for path in sorted(filter(Path.is_file, folder.iterdir())):
        if path.suffix == ".part":  # of a process that was killed, or that still writes
            continue
        with contextlib.suppress(OSError, ValueError):  # another file
            about = step_file.description(path)
            like = " --like MODULE:MAKE_MODEL" * step_file.needs_like(about)
            command = f"gainstage xray {shlex.quote(str(path))} --loss MODULE:LOSS_FN{like}"
            kept = StepFile(int(about["step"]), float(about["scale"]), path.stat().st_mtime)
            files[command] = kept
    return files


def _configure(about: dict[str, Any]) -> None:
    """Sets JAX as in the run, before the user's module creates its first array."""
    here = settings()
    for name in here.keys() & about["settings"].keys():  # ignore anything else in the file
        value = about["settings"][name]
        if value == here[name]:
            continue
        try:
            if isinstance(value, bool) != isinstance(here[name], bool):
                raise TypeError
            jax.config.update(name, value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"Expected a value that jax {jax.__version__} takes for the step file's setting "
                f"{name!r}; got {value!r}. Read it with jax {about['versions'].get('jax')}."
            ) from error


def imported_from(
    option: str,
    words: str,
    use: Callable[[Any], Any] | None = None,
    command: str = "gainstage xray",
) -> Any:
    """Imports "module:function"; the module may be in the current directory.

    Args:
        option: the option that names it.
        words: "module:function".
        use: what makes a result of it; None if it must be a function itself.
        command: the command that imports it.

    Raises:
        ValueError: it cannot be imported, or it raises.
    """
    module, _, name = words.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with importing(command):
            loaded = importlib.import_module(module)
        attribute = operator.attrgetter(name)(loaded)
        result = attribute if use is None else use(attribute)
    except (Exception, SystemExit) as error:  # a script may parse the command line and exit
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(
                f"Expected a module that is installed or in {folder} for {option}; got {module}. "
                f"Run the command in the folder of the module, or add that folder to PYTHONPATH."
            ) from None
        if (
            isinstance(error, AttributeError)
            and error.name in name.split(".")
            and module in sys.modules
        ):
            own = [n for n, v in vars(error.obj).items() if getattr(v, "__module__", "") == module]
            raise ValueError(
                f"Expected a function of {module} for {option}; got {name}. It has "
                f"{', '.join(own[:LISTED]) or 'none'}."
            ) from None
        said = _error_text(f"{option} {words}", error)
        if isinstance(error, SystemExit):
            said += (
                "\nThe module must be importable: parse arguments and train only under "
                '`if __name__ == "__main__":`.'
            )
        if use is not None and isinstance(error, TypeError):
            said += f"\nPass a function without arguments to {option}."
        raise ValueError(said) from error
    if use is None and not callable(attribute):
        raise ValueError(
            f"Expected a function for {option}; got {words}, of type {type(attribute).__name__}."
        )
    return result


def _check_takes(option: str, words: str, function: Any, *args: Any, **named: Any) -> None:
    """Raises a ValueError if a function of the user cannot be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function in C
        return
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        wanted = _shown(args) if option == "--loss" else "a function, has_aux=True"
        raise ValueError(
            f"Expected a function of these arguments for {option}; got {words}{signature} "
            f"({error}):\n{wanted}"
        ) from error


def _error_text(words: str, error: BaseException) -> str:
    """Says what the user's code raised, and at which of its lines."""
    line = traceback.format_list(_own_frames(error)[-1:])
    message = "".join([*line, *traceback.format_exception_only(error)])
    return f"{words} raised\n{message.partition(JAX_NOTE)[0].rstrip()}"


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The calls in the user's own files that led to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not is_library(frame.filename)]


def _safe(said: object) -> str:
    """A text for a terminal: what a file has put in it moves no cursor and changes no title."""
    return "\n".join(printable(line, LONGEST_LINE) for line in str(said).split("\n"))


def _about(path: Path, bad: BadStep) -> str:
    """Describes a step file, and the versions that differ here."""
    of_run = ", ".join(f"{name} {version}" for name, version in bad.versions.items())
    lines = [f"{path}: step {bad.step} at scale {as_power(bad.scale)}, of {of_run}"]
    other = {n: v for n, v in versions().items() if v != bad.versions.get(n)}
    if other:
        here = ", ".join(f"{name} {version}" for name, version in other.items())
        lines.append(f"Here: {here}. Rounding may differ.")
    return "\n".join(lines)


def _shown(args: Sequence[Any]) -> str:
    """Describes each argument in a line."""
    lines = []
    for number, arg in enumerate(args):
        leaves = jax.tree_util.tree_flatten_with_path(arg)[0]
        shown = [
            f"{step_file.leaf_path(path)} {_leaf_type(leaf)}".strip() for path, leaf in leaves[:5]
        ]
        lines.append(f"{number}: {', '.join(shown)}{', ...' * (len(leaves) > 5)}")
    return "\n".join(lines)


def _leaf_type(leaf: Any) -> str:
    is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return f"{leaf.dtype}{list(leaf.shape)}" if is_array else type(leaf).__name__
