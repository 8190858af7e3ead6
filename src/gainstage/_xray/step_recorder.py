"""Files from which a bad step can be repeated, and what writes them during a run."""

import contextlib
import itertools
import math
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib.version

import gainstage
from gainstage._base import checks
from gainstage._base.importing import check_not_importing
from gainstage._base.signals import deferred_signals
from gainstage._base.tensor_file import replacing
from gainstage._scaling.step_telemetry import StepInfo
from gainstage._variables.types import PyTree
from gainstage._xray import step_file
from gainstage.training.audit import AuditResult

# Settings of JAX that change what a loss computes; names that a later JAX lacks are ignored.
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion",
            "jax_threefry_partitionable", "jax_default_prng_impl")  # fmt: skip
MANY = 10  # bad steps in a row: more than after a scale was doubled too soon


class BadStep(NamedTuple):
    """A bad step, as `read_step` returns it; `loss_fn(*args) * scale` is its scaled loss.

    Args:
        args: the arguments of the loss: parameters and batch.
        scale: the loss scale of the step.
        step: the index of the step.
        versions: the versions of gainstage, jax, jaxlib and python, and the `platform`.
        settings: options of `jax.config` that change what a loss computes.
        finite: whether the step was finite in its run, as one that `StepRecorder.save` saved may
            be.
    """

    args: tuple[Any, ...]
    scale: float
    step: int
    versions: dict[str, str]
    settings: dict[str, Any]
    finite: bool


class StepRecorder:
    """Saves what is needed to repeat a bad step: the arguments of its loss, and its loss scale.

    Call `write` after every step; `save` saves a step that is not bad, as of a run that stalls.
    `write` saves the first step with non-finite gradients, and the first
    such step after `healthy` finite ones in a row. Of ten bad steps in a row it saves the tenth, if
    it saved none of the nine. It saves a step too whose audit is past a bound. The first file of a
    run is never lost, because it tells most: once `keep` newer ones replace it, it is
    "bad.first.safetensors". `gainstage xray`, or `gainstage.xray`, then finds the cause in another
    process.

    A skipped step returns the parameters unchanged, bit for bit. So they are the parameters of its
    loss, even if the step donates its arguments. If a step of your own also changes other state on
    a skipped step, such as running means of batch normalisation, that state is saved as changed.
    `gainstage.train_step` keeps all state of an NNX model.

    `write` waits for the step, because the next one may change the parameters. On a CPU this adds
    about 0.1 ms to a step of 0.1 ms, 10 % to a step of 5 ms, and at most 3 % to a step of 35 ms. It
    adds nothing if the loop reads each loss anyway. Saving 10 million float32 parameters takes
    0.2 s.

    A file is written under a name of its own, flushed to the disk and renamed, so a killed run, or
    two with one path, leave a complete file or none. A failed write, for example on a full disk,
    does not stop the run: it warns once and tries the next bad step. With several processes, only
    the first writes.

    Args:
        path: the latest step file, such as "bad.safetensors"; an existing one is replaced.
            A run that is resumed is another run: name its file after its first step.
        keep: the number of latest step files to keep beside the first, >= 1. Older ones are
            "bad.1.safetensors", "bad.2.safetensors".
        healthy: finite steps in a row after which the next bad step is saved, >= 1.
        max_bytes: the largest size of the arguments, by default 2 GiB. If they are larger, a
            warning at the first step names their size.

    Raises:
        TypeError, ValueError: `keep`, `healthy` or `max_bytes` is not such an integer, or `path`
            is a file that is not a step file.
        OSError: the file cannot be created.

    Examples:
        >>> import tempfile, pathlib
        >>> import gainstage as gs
        >>> import jax.numpy as jnp, optax
        >>> state = gs.TrainState.create(jnp.float32(1.0), optax.sgd(0.1), telemetry=True)
        >>> step = gs.train_step(lambda w, x: (w * x) ** 2)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "bad.safetensors"
        >>> recorder = gs.diagnostics.StepRecorder(path)
        >>> for n, x in enumerate([1.0, 1e30]):
        ...     state, loss = step(state, x)
        ...     print(recorder.write(n, state.info, state.params, x))
        False
        True
        >>> bad = gs.diagnostics.read_step(path)
        >>> print(bad.step, bad.scale, bad.args[1])
        1 1.0 1e+30
    """

    def __init__(
        self,
        path: str | Path,
        keep: int = 1,
        *,
        healthy: int = 100,
        max_bytes: int = 2 * 1024**3,
    ):
        self._path = Path(path)
        self._keep = checks.integer("keep", keep, low=1)
        self._healthy = checks.integer("healthy", healthy, low=1)
        self._max_bytes = checks.integer("max_bytes", max_bytes, low=1, high=2**62)
        self._finite = self._bad = 0  # steps in a row
        self._due = True  # whether the next bad step is saved
        self._kept = False  # whether one of the bad steps in a row was saved
        self._is_first = True  # whether no step was written yet
        self._is_off = False  # whether the last audit was past a bound
        self._count = 0  # step files so far
        self._warned = False  # since the last step file
        self._writes = not jax.process_index()
        if self._writes:
            if self._path.exists():
                step_file.description(self._path)  # raises if it is something else
            with tempfile.TemporaryFile(dir=self._path.parent):  # raises if nothing can be written
                pass

    def write(
        self, step: int, info: StepInfo, *args: PyTree, audit: AuditResult | None = None
    ) -> bool:
        """Records a step, and saves it if it is bad and due.

        Args:
            step: the index of the step, a Python integer >= 0.
            info: the result of `gainstage.diagnostics.telemetry` after the step.
            *args: the arguments of its loss, with the parameters that the step returned. They are
                pytrees of arrays, variables (saved as their values), Python numbers and strings.
                The batch must not be donated.
            audit: `step.audit` of a `train_step`, or the result of `gainstage.audit`, if any. The
                first that is past a bound is saved too, with the parameters after the step, and the
                first after one that was not.

        Returns:
            Whether a step file was saved.

        Raises:
            TypeError: `info` is something else.
            ValueError: `step` is not such an integer, or `info` was donated to a later step.
        """
        step = _checked(step, info)
        if not self._writes:
            return False
        if self._is_first:
            self._is_first = False
            self._check(args)
        is_off = audit is not None and audit.is_off
        was_off, self._is_off = self._is_off, self._is_off if audit is None else is_off
        if bool(info.finite):
            self._finite, self._bad, self._kept = self._finite + 1, 0, False
            return is_off and not was_off and self._wrote(step, info, args)
        self._due |= self._finite >= self._healthy
        self._finite, self._bad = 0, self._bad + 1
        if not (self._due or (self._bad >= MANY and not self._kept)):
            return False
        self._kept = self._wrote(step, info, args)
        self._due = not self._kept
        return self._kept

    def save(self, step: int, info: StepInfo, *args: PyTree) -> bool:
        """Saves a step, whether it is bad or not.

        The X-ray then says what small numbers it loses. Arguments, result and errors are those of
        `write`.
        """
        step = _checked(step, info)
        return self._writes and self._wrote(step, info, args)

    def _check(self, args: Sequence[Any]) -> None:
        """Warns at the first step if a bad one could not be saved."""
        try:
            self._packed(args)
        except ValueError as error:
            self._warn(f"No bad step can be kept: {error}")

    def _packed(self, args: Sequence[Any]) -> step_file.Packed:
        packed = step_file.packed(args)
        if packed.bytes > self._max_bytes:
            raise ValueError(
                f"the arguments have {_size(packed.bytes)}, more than max_bytes, "
                f"{_size(self._max_bytes)}; set max_bytes, or leave out what the loss does not use"
            )
        return packed

    def _wrote(self, step: int, info: StepInfo, args: Sequence[Any]) -> bool:
        """Writes a step file; returns whether that succeeded."""
        of_step = {"step": step, "scale": float(info.loss_scale), "finite": bool(info.finite)}
        about = {**of_step, "versions": versions(), "settings": settings()}
        try:
            with replacing(self._path, self._rotated) as part:
                step_file.write_step_file(part, about, self._packed(args))
            return True
        except (OSError, MemoryError, ValueError) as error:
            self._warn(f"Step {step} could not be kept: {error}")
            return False

    @contextlib.contextmanager
    def _rotated(self) -> Iterator[None]:
        """Gives the older files their next names, and counts the one that takes the place."""
        with deferred_signals():
            paths = [self._path, *(self._named(n) for n in range(1, self._keep))]
            if self._count == self._keep:  # the oldest is the first
                paths.append(self._named("first"))
            for newer, older in reversed([*itertools.pairwise(paths)]):
                with contextlib.suppress(FileNotFoundError):  # of another process by now
                    newer.replace(older)
            yield
            self._count += 1
            self._warned = False

    def _named(self, which: int | str) -> Path:
        return self._path.with_name(f"{self._path.stem}.{which}{self._path.suffix}")

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"{message.rstrip('.')}. The run goes on.", stacklevel=4)


def _checked(step: int, info: StepInfo) -> int:
    """The step, if it is one, and `info` that of the last step."""
    check_not_importing()
    if not isinstance(info, StepInfo):
        raise TypeError(
            f"Expected gainstage.diagnostics.telemetry(opt_state), or of an optimizer, for info; "
            f"got {type(info).__name__}."
        )
    if isinstance(info.finite, jax.Array) and info.finite.is_deleted():
        raise ValueError(
            "Expected the info of the last step; got one that was donated to a later step. "
            "Call write before the next step."
        )
    return checks.integer("step", step, low=0, high=2**53)


def read_step(path: str | Path, like: PyTree | Callable[[], PyTree] = None) -> BadStep:
    """Reads a step file of a run.

    It is a file of safetensors, in which the array `0/w` is `w` of the first argument. All
    checksums are compared. Nothing is unpickled, and no code of the run is imported.

    Args:
        path: the file.
        like: templates of the arguments, needed unless they are lists, tuples and dictionaries with
            strings as keys. It is a tuple of the first arguments, the first argument alone, or a
            function that returns either, such as the constructor of the model. Their arrays are
            replaced, so `jax.ShapeDtypeStruct`s suffice; other leaves are kept.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is incomplete, damaged or not a step file; `like` is missing, or has
            another structure or shape; 64-bit arrays need `jax_enable_x64`.

    Examples:
        Look for the cause in a notebook:

            bad = gs.diagnostics.read_step("bad.safetensors")
            print(gs.xray(loss_fn, *bad.args, scale=bad.scale))
    """
    return bad_step(Path(path), template_of(like), "like")


def bad_step(path: Path, like: PyTree, option: str) -> BadStep:
    """The step in a step file; `option` is the name of `like` for the user."""
    like = () if like is None else like if type(like) is tuple else (like,)
    about, args = step_file.read_step_file(path, like, option)
    return BadStep(args, **{name: about[name] for name in BadStep._fields if name != "args"})


def template_of(like: PyTree | Callable[[], PyTree]) -> PyTree:
    """`like`, or its result if it is a function."""
    is_function = callable(like) and jax.tree_util.all_leaves([like])  # a model is no leaf
    return like() if is_function else like


def versions() -> dict[str, str]:
    """The versions that a step file stores, and the platform."""
    return {
        "gainstage": gainstage.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "python": platform.python_version(),
        "platform": jax.default_backend(),
    }


def settings() -> dict[str, Any]:
    """The JAX settings that a step file stores."""
    return {name: getattr(jax.config, name) for name in SETTINGS if hasattr(jax.config, name)}


def _size(count: int) -> str:
    power = min(int(math.log(count, 1024)), 4)
    return f"{count / 1024**power:.3g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
