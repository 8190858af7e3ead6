"""Capsules: what is needed to repeat a bad step, kept in a file by the run that took it."""

import contextlib
import math
import platform
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib.version

import gainstage
from gainstage._core import checks
from gainstage._core.signals import deferred_signals
from gainstage._core.stats import StepInfo
from gainstage.diagnostics import capsule_file

# Settings of JAX that change what a loss computes; a name that a later JAX lacks is left out.
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion",
            "jax_threefry_partitionable", "jax_default_prng_impl")  # fmt: skip
MANY = 10  # bad steps in a row, which are more than a scale that was doubled too soon


class BadStep(NamedTuple):
    """A bad step, as `read_capsule` returns it: `loss_fn(*args)`, times `scale`, repeats its loss.

    Args:
        args: the arguments of the loss: parameters and batch.
        scale: the loss scale that was in force.
        step: its number in the run.
        versions: those of gainstage, jax, jaxlib and python, and the `platform` it ran on.
        settings: options of `jax.config` that change what a loss computes.
    """

    args: tuple[Any, ...]
    scale: float
    step: int
    versions: dict[str, str]
    settings: dict[str, Any]


class Capsule:
    """Keeps what is needed to repeat a bad step: the arguments of its loss, and its loss scale.

    Call `write` after every step. It writes a file at the first step whose gradients are not
    finite, and at the first such step after `healthy` finite ones in a row. Of 10 bad steps in a
    row it keeps the tenth, if none of them has been kept. `gainstage autopsy`, or
    `gainstage.diagnostics.xray`, then finds the cause in another process.

    A skipped step leaves the parameters bit for bit as they were, so those that it returns are
    those of its loss, also where the step reuses their memory (`donate`). What a step of your own
    changes even when it is skipped, such as averages of batch normalisation, is not held back.
    `gainstage.train_step` holds all of it back.

    `write` waits until the step has ended, because the next one may change the parameters. On a
    CPU this adds about 0.1 ms to a step of 0.1 ms, 10 % to one of 5 ms and at most 3 % to one of
    35 ms; a loop that reads the loss of every step waits already. A capsule of 10 million float32
    parameters takes 0.2 s to write.

    A file is written under another name, flushed to the disk and renamed, so that a killed run
    leaves a whole one or none. A failed write, as on a full disk, does not stop the run: a warning
    says so once, and the next bad step is tried. Among several processes the first one writes.

    Args:
        path: the file of the latest capsule, such as "bad.npz"; one that is there is replaced.
        keep: how many capsules to keep, an integer >= 1. Older ones are "bad.1.npz", "bad.2.npz".
        healthy: after so many finite steps in a row the next bad one is written, >= 1.
        max_bytes: the largest size of the arguments that is written; 2 GiB by default. Beyond it,
            a warning at the first step says the size.

    Raises:
        TypeError, ValueError: `keep`, `healthy` or `max_bytes` is no such integer; `path` holds
            something else than a capsule.
        OSError: there can be no file.

    Examples:
        >>> import tempfile, pathlib
        >>> import gainstage as gs
        >>> import jax.numpy as jnp, optax
        >>> tx = gs.loss_scaled(optax.sgd(0.1), telemetry=True)
        >>> step = gs.train_step(lambda w, x: (w * x) ** 2, tx)
        >>> params = jnp.float32(1.0)
        >>> opt_state = tx.init(params)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "bad.npz"
        >>> capsule = gs.diagnostics.Capsule(path)
        >>> for n, x in enumerate([1.0, 1e30]):
        ...     params, opt_state, loss = step(params, opt_state, x)
        ...     print(capsule.write(n, gs.telemetry(opt_state), params, x))
        False
        True
        >>> bad = gs.diagnostics.read_capsule(path)
        >>> print(bad.step, bad.scale, bad.args[1])
        1 32768.0 1e+30
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
        self._part = self._path.with_name(f"{self._path.name}.part")
        self._keep = checks.integer("keep", keep, low=1)
        self._healthy = checks.integer("healthy", healthy, low=1)
        self._max_bytes = checks.integer("max_bytes", max_bytes, low=1, high=2**62)
        self._finite = self._bad = 0  # steps in a row
        self._due = True  # whether the next bad step is written
        self._kept = False  # whether one of the bad steps in a row was
        self._is_first = True  # whether no step has been
        self._warned = False  # since the last capsule
        self._writes = not jax.process_index()
        if self._writes:
            if self._path.exists():
                capsule_file.description(self._path)  # an error, if it is something else
            self._part.touch()
            self._part.unlink()

    def write(self, step: int, info: StepInfo, *args: Any) -> bool:
        """Takes a step that has been taken, and writes a capsule if it is a bad one and due.

        Args:
            step: its number, a Python integer >= 0.
            info: what `gainstage.telemetry` returned of it.
            *args: the arguments of its loss, with the parameters that the step returned: pytrees of
                arrays, a `Variable` counting as its value, Python numbers and strings. The batch
                must not have been donated.

        Returns:
            Whether a capsule was written.

        Raises:
            TypeError: `info` is something else.
            ValueError: `step` is no such integer; the memory of `info` was given to a later step.
        """
        step = checks.integer("step", step, low=0, high=2**53)
        if not isinstance(info, StepInfo):
            raise TypeError(f"Expected what gainstage.telemetry returned for info; got {info!r}.")
        if isinstance(info.finite, jax.Array) and info.finite.is_deleted():
            raise ValueError(
                "Expected the info of the last step; got one that was donated to a later step. "
                "Call write before the next step."
            )
        if not self._writes:
            return False
        if self._is_first:
            self._is_first = False
            self._check(args)
        if bool(info.finite):
            self._finite, self._bad, self._kept = self._finite + 1, 0, False
            return False
        self._due |= self._finite >= self._healthy
        self._finite, self._bad = 0, self._bad + 1
        if not (self._due or (self._bad >= MANY and not self._kept)):
            return False
        self._kept = self._wrote(step, float(info.loss_scale), args)
        self._due = not self._kept
        return self._kept

    def _check(self, args: Sequence[Any]) -> None:
        """Warns at the first step of what a bad one would meet."""
        try:
            self._packed(args)
        except ValueError as error:
            self._warn(f"No bad step can be kept: {error}")

    def _packed(self, args: Sequence[Any]) -> capsule_file.Packed:
        packed = capsule_file.packed(args)
        if packed.bytes > self._max_bytes:
            raise ValueError(
                f"the arguments have {_size(packed.bytes)}, more than max_bytes, "
                f"{_size(self._max_bytes)}; set max_bytes, or leave out what the loss does not use"
            )
        return packed

    def _wrote(self, step: int, scale: float, args: Sequence[Any]) -> bool:
        """Writes a capsule; whether that succeeded."""
        about = {"step": step, "scale": scale, "versions": versions(), "settings": settings()}
        try:
            capsule_file.write(self._part, about, self._packed(args))
            with deferred_signals():
                for n in range(self._keep - 1, 0, -1):
                    if (newer := self._numbered(n - 1)).exists():
                        newer.replace(self._numbered(n))
                self._part.replace(self._path)
                self._warned = False
                return True
        except (OSError, MemoryError, ValueError) as error:
            self._warn(f"Step {step} was bad, and could not be kept: {error}")
            return False
        finally:
            with contextlib.suppress(OSError):
                self._part.unlink(missing_ok=True)

    def _numbered(self, n: int) -> Path:
        path = self._path
        return path.with_name(f"{path.stem}.{n}{path.suffix}") if n else path

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"{message.rstrip('.')}. The run goes on.", stacklevel=4)


def read_capsule(path: str | Path, like: Any = None) -> BadStep:
    """Reads a capsule that a run has left.

    Every checksum is compared. Nothing is unpickled, and no code of the run is imported.

    Args:
        path: the file.
        like: what the arguments look like, where they are no dictionaries, lists and tuples of
            arrays: a tuple of them, of which the last may be left out; the first alone; or a
            function that returns either, such as the one that makes the model. Its arrays are
            replaced, so a `jax.ShapeDtypeStruct` will do; its other leaves are kept.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is cut short, damaged or no capsule; `like` is missing, or differs in
            structure or shapes; its 64-bit arrays need `jax_enable_x64`.

    Examples:
        Look for the cause in a notebook:

            bad = gs.diagnostics.read_capsule("bad.npz")
            print(gs.diagnostics.xray(loss_fn, *bad.args, scale=bad.scale))
    """
    about, args = capsule_file.read(Path(path))
    like = made(like)
    like = () if like is None else like if type(like) is tuple else (like,)
    known = {name: about[name] for name in BadStep._fields if name != "args"}
    return BadStep(capsule_file.unpacked(args, like), **known)


def made(like: Any) -> Any:
    """What `like` is, or what it returns if it is a function."""
    is_function = callable(like) and jax.tree_util.all_leaves([like])  # a model is no leaf
    return like() if is_function else like


def versions() -> dict[str, str]:
    """Those that a capsule holds, and the platform."""
    return {
        "gainstage": gainstage.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "python": platform.python_version(),
        "platform": jax.default_backend(),
    }


def settings() -> dict[str, Any]:
    """Those that a capsule holds."""
    return {name: getattr(jax.config, name) for name in SETTINGS if hasattr(jax.config, name)}


def _size(count: int) -> str:
    power = min(int(math.log(count, 1024)), 4)
    return f"{count / 1024**power:.3g} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
