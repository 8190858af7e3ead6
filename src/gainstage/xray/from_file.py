"""`gainstage xray`: the X-ray of a bad step from a step file."""

import contextlib
import importlib
import operator
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from gainstage._base.checks import as_power
from gainstage.xray import step_file
from gainstage.xray.step_recorder import BadStep, bad_step, made, settings, versions
from gainstage.xray.xray import xray


def main(
    path: Path,
    loss: str,
    like: str | None = None,
    output: Path | None = None,
    has_aux: bool = False,
    using: str | None = None,
    plan: Path | None = None,
) -> int:
    """Prints the X-ray of a step file, and writes its page.

    Args:
        path: the step file.
        loss: the loss function, as "module:function".
        like: what `read_step` takes as `like`, as "module:function".
        output: the page's file; None for none.
        has_aux: whether the loss function returns (loss, aux).
        using: the function that differentiates, as "module:function"; by default as
            for `gainstage.value_and_grad`.
        plan: the file for a plan of `gainstage.autocast`, if the X-ray has one; None for none.

    Returns:
        The exit status: 0, or 1 after an error, which is printed.
    """
    try:
        _configure(step_file.description(path))
        loss_fn = _users("--loss", loss)
        options = {} if using is None else {"using": _users("--using", using)}
        template = None if like is None else _users("--like", like, made)
        bad = bad_step(*step_file.read(path), template, "--like")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(_about(path, bad))
    try:
        found = xray(loss_fn, *bad.args, scale=bad.scale, has_aux=has_aux, **options)
    except Exception as error:
        if isinstance(error, TypeError) and "Expected a scalar loss" in str(error):
            print(f"{error} If {loss} returns (loss, aux), pass --has-aux.", file=sys.stderr)
            return 1
        traceback.print_exc()
        print(
            f"{loss} could not be X-rayed with the arguments\n{_shown(bad.args)}", file=sys.stderr
        )
        return 1
    print(found)
    if found.finite:
        print(
            "The step is finite here, and was not in its run. Another version, platform or loss "
            "function may be the reason."
        )
    if plan is not None and found.plan is not None:
        found.plan.save(plan)
        load = f"gainstage.precision.Plan.load({str(plan)!r})"
        print(f"See {plan}. Write gainstage.autocast(fun, {load}).")
    elif plan is not None:
        print(f"There is no plan for {plan}: it takes an overflow or underflow under autocast.")
    if output is not None:
        found.to_html(output)
        print(f"See {output}.")
    return 0


def commands(folder: Path) -> dict[str, int]:
    """Returns the steps of the step files in a folder, by the commands that look into them."""
    found = {}
    for path in sorted(folder.glob("*.npz")):
        with contextlib.suppress(OSError, ValueError):  # another file
            step = int(step_file.description(path)["step"])
            found[f"gainstage xray {shlex.quote(str(path))} --loss MODULE:FUNCTION"] = step
    return found


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


def _users(option: str, words: str, use: Callable[[Any], Any] = lambda found: found) -> Any:
    """Imports "module:function"; the module may be in the current directory."""
    module, _, name = words.partition(":")
    if not (module and name):
        raise ValueError(f"Expected module:function for {option}; got {words!r}.")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return use(operator.attrgetter(name)(importlib.import_module(module)))
    except (Exception, SystemExit) as error:  # a script may parse the command line and exit
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            advice = " Write it without .py." if module.endswith(".py") else ""
            raise ValueError(
                f"Expected a module that is installed or in {folder} for {option}; got "
                f"{module!r}.{advice}"
            ) from None
        if (
            isinstance(error, AttributeError)
            and error.name in name.split(".")
            and module in sys.modules
        ):
            raise ValueError(f"Expected a name of {module} for {option}; got {name!r}.") from None
        traceback.print_exc()
        raise ValueError(f"{option} {words} raised the error above.") from error


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
        shown = [f"{step_file.name_of(path)} {_kind(leaf)}".strip() for path, leaf in leaves[:5]]
        lines.append(f"{number}: {', '.join(shown)}{', ...' * (len(leaves) > 5)}")
    return "\n".join(lines)


def _kind(leaf: Any) -> str:
    is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return f"{leaf.dtype}{list(leaf.shape)}" if is_array else type(leaf).__name__
