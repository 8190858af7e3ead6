"""The bridge from imperative code on variables to pure functions."""

# An update rule is imperative code that assigns to variables. It becomes a pure function when
# values are bound to the variables, the code runs, and the values are read back. `functionalize`
# does that, and `jit` compiles it. A *state* is any pytree whose leaves are variables. `select`
# makes a pure function of a state a transaction.

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, Generic

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Sharding

from gainstage._base._jax import JaxprEqn, Tracer, Var, get_opaque_trace_state
from gainstage._base.arrays import Static, partition
from gainstage._base.checks import brief
from gainstage._base.signals import deferred_signals
from gainstage._programs import jaxprs
from gainstage._variables.arguments import variables_in
from gainstage._variables.sharding import tell_if_whole
from gainstage._variables.types import P, PyTree, R, State, Structure
from gainstage._variables.variable import Variable, is_inside, recording


def read(state: State) -> PyTree:
    """Reads the values of a state, in the same structure."""
    Variable._note_reads(jax.tree.leaves(state))
    return jax.tree.map(lambda variable: variable._value, state)


def write(variables: Sequence[Variable], values: Sequence[Any], shared: bool = False) -> None:
    """Writes `values` into the variables: all of them, or none.

    Args:
        variables: the variables to write.
        values: arrays that fit, or the current values.
        shared: whether others may hold the arrays.
    """
    if getattr(recording, "now", None):
        for variable, value in zip(variables, values, strict=True):
            if value is not variable._value:
                variable._record()
    if any(issubclass(kind, Tracer) for kind in set(map(type, values))):
        for variable, value in zip(variables, values, strict=True):
            if value is not variable._value:
                variable._check_that_it_stays(value)  # check all before any is stored
        Variable._put(variables, values, shared)
        return
    with deferred_signals():
        Variable._put(variables, values, shared)


def assign(variables: Sequence[Variable], values: Sequence[Any]) -> None:
    """`Variable.assign` for several variables; assigns none if a value does not fit."""
    new = [v._assignable(value) for v, value in zip(variables, values, strict=True)]
    write(variables, new, shared=True)  # the caller may hold the same arrays


@contextlib.contextmanager
def bound(
    variables: Sequence[Variable],
    values: Sequence[jax.Array],
    shardings: Sequence[Sharding | None] | None = None,
) -> Iterator[None]:
    """Binds `values` to the variables, and restores their own values on exit.

    A bound variable has the dtype of its value, and its sharding if `shardings` is given. It may
    hold traced values. Another thread that reads it gets its own value.
    """
    before = Variable._held(variables)
    shardings = [variable._sharding for variable in variables] if shardings is None else shardings
    try:
        Variable._bind(variables, values, shardings)
        yield
    finally:
        Variable._unbind(variables, before)


@contextlib.contextmanager
def recorded(runs_now: bool = False) -> Iterator[list[Variable]]:
    """Undoes all assignments of this trace on exit; yields the list of the assigned variables.

    Until then each variable holds its assigned value, which may be traced.

    Args:
        runs_now: whether the traced program is run at once, in the context of the caller. It may
            then read variables that are not bound.
    """
    before = getattr(recording, "now", None)
    kept = getattr(recording, "runs_now", False)
    recording.runs_now = runs_now or kept
    variables: list[Variable] = []
    previous: list[tuple[Any, ...]] = []
    recording.now = get_opaque_trace_state(), variables, previous
    try:
        yield variables
    finally:
        recording.now, recording.runs_now = before, kept
        Variable._unbind(variables, previous)


def functionalize(
    fn: Callable[P, R], state: State
) -> Callable[Concatenate[PyTree, P], tuple[R, PyTree]]:
    """Returns a pure function of an `fn` that reads and assigns the variables of `state`.

    Args:
        fn: any function; its assignments to variables of `state` become results.
        state: a pytree of variables.

    Returns:
        `pure(values, *args, **kwargs) -> (result, new_values)`, where `values` and `new_values`
        have the structure of `state`. It changes no variable, so `jax.jit`, `jax.vmap`, `jax.grad`
        and `lax.scan` accept it.

    Raises:
        TypeError: a leaf of `state` is not a variable.
        ValueError: a variable occurs twice; from the call, the values do not fit.

    Examples:
        >>> import gainstage as gs
        >>> count = gs.optimizers.Variable(0)
        >>> pure = gs.optimizers.functionalize(lambda step: count.assign_add(step), [count])
        >>> result, (new_count,) = pure([10], 5)
        >>> print(new_count, int(count))
        15 0
    """
    variables = variables_in(state)
    structure: Structure = jax.tree.structure(state)

    @functools.wraps(fn)
    def pure(values: PyTree, *args: P.args, **kwargs: P.kwargs) -> tuple[R, PyTree]:
        try:
            values = structure.flatten_up_to(values)
        except ValueError as error:
            raise ValueError(
                f"Expected values in the structure of the state, one for each of "
                f"{brief([v.name for v in variables])}; got {brief(jax.tree.structure(values))}."
            ) from error
        values = [v._fitted(value) for v, value in zip(variables, values, strict=True)]
        before = Variable._held(variables)
        try:
            with bound(variables, values):
                result = fn(*args, **kwargs)
                new = read(variables)
        finally:
            # Again, because a signal may have interrupted `bound` while it did so.
            Variable._unbind(variables, before)
        return result, structure.unflatten(new)

    del pure.__wrapped__  # its signature is another one
    return pure  # type: ignore[return-value] # mypy: `values` has a name here


class jit(Generic[P, R]):  # noqa: N801 - reads as the function it stands for
    """Compiles `fn`, including its assignments to the variables of `state`, with XLA.

    Everything else that `fn` reads is a constant of the program, as under `jax.jit`. But if an
    option or the schedule of an optimizer in `state` has been changed, the next call compiles
    again. A learning rate that is a callable of no argument is an error.

    Args:
        fn: a function of arrays, or of pytrees of them.
        state: a pytree of all variables that `fn` reads or assigns.
        donate: whether the memory of the old values is reused for the new ones. An array that
            `value()` has returned is copied first, so it stays readable. Nothing is donated under
            `jax_debug_nans`, nor in a program with callbacks (`jax.pure_callback`, `io_callback`,
            `debug.callback`, `debug.print`), because a callback may raise. Such a program needs
            twice the memory, and the call waits until it ends.

    After an exception or a signal (Ctrl-C) in a call, all variables have their values from before
    the call, or all have those from after it.

    Raises:
        TypeError: a leaf of `state` is not a variable.
        ValueError: a variable occurs twice; from the call, `fn` uses a variable not in `state`.

    Examples:
        >>> import gainstage as gs
        >>> total = gs.optimizers.Variable(0.0)
        >>> add = gs.optimizers.jit(lambda x: total.assign_add(x), [total], donate=True)
        >>> add(2.0); add(3.0)
        >>> float(total)
        5.0
    """

    def __init__(self, fn: Callable[P, R], state: State, donate: bool = False):
        self._state, self._donate = variables_in(state), donate
        found = [variable._constants_of for variable in self._state]
        self._constants = [reference for reference in found if reference is not None]
        self._pure: Callable[..., tuple[R, Any]] = functionalize(fn, self._state)
        self._compile()
        functools.update_wrapper(self, fn, updated=())

    def _versions(self) -> list[int]:
        """The versions of all options that the program has as constants."""
        return [getattr(reference(), "version", 0) for reference in self._constants]

    def _compile(self) -> None:
        """Makes new programs, which are compiled when they are called."""
        pure, donate, self._compiled_for = self._pure, self._donate, self._versions()

        def program(
            values: PyTree, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[PyTree, R]:
            # XLA gives a donated buffer to the first result of its shape. With the state first, in
            # the order of the arguments, each new value takes the buffer of its old one.
            result, values = pure(values, *args, **kwargs)
            return values, result

        # An equivalent sharding that is written differently would cause another compilation.
        shardings = [variable._sharding for variable in self._state]
        self._keeping = jax.jit(program, out_shardings=(shardings, None))
        self._compiled = self._keeping
        if donate:
            self._compiled = jax.jit(program, donate_argnums=0, out_shardings=(shardings, None))
        self._calls_back: bool | None = None  # whether it has callbacks; None before the first call

    def _unshare(self, values: list[jax.Array]) -> None:
        """Copies the values that others hold, so that all may be donated."""
        held = [i for i, variable in enumerate(self._state) if variable._shared]
        if held:
            for i, copy in zip(held, _copies([values[i] for i in held]), strict=True):
                values[i] = copy

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the program, and writes the new values into the variables."""
        Variable._note_reads(self._state)
        if self._compiled_for != self._versions():
            self._compile()
        values = [variable._value for variable in self._state]
        if is_inside():  # for example of `jax.grad`, where nothing may be stored in the end
            values, result = self._keeping(values, args, kwargs)
            write(self._state, values)
            return result
        if self._calls_back is None:
            traced = self._compiled.trace(values, args, kwargs).jaxpr
            self._calls_back = jaxprs.calls_back(traced)
            tell_if_whole(values, (args, kwargs), traced)
        if self._calls_back or reruns():
            values, result = jax.block_until_ready(self._keeping(values, args, kwargs))
            write(self._state, values)
            return result
        if self._donate:
            self._unshare(values)
        with deferred_signals():
            values, result = self._compiled(values, args, kwargs)
            if getattr(recording, "now", None):
                write(self._state, values)
            else:  # the values are no tracers
                Variable._put(self._state, values, shared=False)
        return result

    def __repr__(self) -> str:
        name = getattr(self, "__name__", "a callable")
        count = len(self._state)
        return f"<gainstage.optimizers.jit of {name}: {count} variables, donate={self._donate}>"

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Returns the lowered program for these arguments, as `jax.jit(f).lower`."""
        if self._compiled_for != self._versions():
            self._compile()
        return self._compiled.lower(read(self._state), args, kwargs)


def reruns() -> bool:
    """Whether JAX runs a program again to find its first NaN or inf, which needs the arguments."""
    config: Any = jax.config  # of which type checkers know no flags
    return config.jax_debug_nans or config.jax_debug_infs


@jax.jit
def _copies(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(array) for array in arrays]


def run_eagerly(fn: Callable[P, R], state: State, *args: P.args, **kwargs: P.kwargs) -> R:
    """Runs `fn` uncompiled; its assignments to `state` are made at its end, or not at all."""
    result, values = functionalize(fn, state)(read(state), *args, **kwargs)
    assign(variables_in(state), jax.tree.leaves(values))
    return result


def compiled_if_eager(fn: Callable[P, R]) -> Callable[P, R]:
    """Compiles a function of pytrees when it is called eagerly, once per kind of arguments.

    Otherwise each eager `lax.cond` or loop over a new closure is compiled, and JAX keeps all of
    these programs. Leaves that are not arrays are constants of the program.
    """
    untyped: Callable[..., R] = fn

    @functools.partial(jax.jit, static_argnums=0)
    def program(static: Static, arrays: list[Any]) -> R:
        args, kwargs = static.combine(arrays)
        return untyped(*args, **kwargs)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_inside():
            return fn(*args, **kwargs)
        arrays, static = partition((args, kwargs))
        return program(static, arrays)

    return call


def select(
    applies: jax.Array, fn: Callable[[PyTree], tuple[R, PyTree]], old: PyTree
) -> tuple[R, PyTree]:
    """Returns `(result, new)` of `fn(old)`, with `old` instead of `new` if `applies` is False.

    The result is valid only if `applies` is True. It is computed from the selected state, so that
    XLA fuses it with its use. With a `where` around `fn`, XLA would compute each new value twice,
    for the state and for the result. It would also copy the old one before it is overwritten. An
    eager call has nothing to fuse: it simply runs `fn`.
    """
    # A state may have numbers, as when a learning rate in an optax state is replaced by one.
    before = [jnp.asarray(leaf) for leaf in jax.tree.leaves(old)]
    structure: Structure = jax.tree.structure(old)

    def update(applies: jax.Array, before: list[jax.Array]) -> tuple[R, list[jax.Array]]:
        result, new = fn(structure.unflatten(before))
        if structure != jax.tree.structure(new):
            raise TypeError(
                f"Expected the update to return its state in the structure that it got, "
                f"{brief(structure)}; got {brief(jax.tree.structure(new))}."
            )
        return result, jax.tree.leaves(new)

    def selected(new: Any, old: jax.Array) -> jax.Array:
        return lax.select(applies, jnp.asarray(new, old.dtype), old)

    if not is_inside():
        result, new = update(applies, before)
        return result, structure.unflatten(map(selected, new, before))
    # One equation, so that `fn` is traced once: its program is changed, and not run again.
    program, shapes = jax.make_jaxpr(jax.jit(update), return_shape=True)(applies, before)
    decides, *arguments = program.jaxpr.invars
    results = program.jaxpr.outvars[len(program.jaxpr.outvars) - len(before) :]
    done = [new is old for new, old in zip(results, arguments, strict=True)]

    def compute(eqn: JaxprEqn, operands: list[jax.Array], path: tuple[int, ...]) -> list[jax.Array]:
        inner = eqn.params["jaxpr"]
        inside = dict(zip(eqn.invars, inner.jaxpr.invars, strict=True))
        values = dict(zip(eqn.outvars, inner.jaxpr.outvars, strict=True))
        pairs = [
            (values[new] if isinstance(new, Var) and new in values else None, inside[old])
            for new, old in zip(results, arguments, strict=True)
        ]
        wanted = dict[Var, Var]()
        for new, old in pairs:
            if isinstance(new, Var) and jaxprs.array(new).dtype == jaxprs.array(old).dtype:
                wanted.setdefault(new, old)
        inner, found = jaxprs.with_selects(inner, inside[decides], wanted)
        for i, (new, old) in enumerate(pairs):
            done[i] |= isinstance(new, Var) and new in found and wanted[new] is old
        return jaxprs.bind(eqn, operands, {**eqn.params, "jaxpr": inner})

    leaves = jaxprs.interpret(program, [jnp.asarray(applies), *before], compute)
    count = len(leaves) - len(before)
    new = [
        value if is_done else selected(value, old)
        for value, old, is_done in zip(leaves[count:], before, done, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes[0]), leaves[:count]), structure.unflatten(
        new
    )


def variables_like(state: Any, owner: str, documented: Mapping[str, str] | None = None) -> Any:
    """Replaces the arrays in a NamedTuple (or nested ones) by variables.

    Args:
        state: the tuple; None in it stays None.
        owner: the prefix of the variables' names.
        documented: the names of some fields' variables, in which {owner} is the owner.
    """

    def one(name: str, value: Any) -> Any:
        if value is None or hasattr(value, "_fields"):
            return value and variables_like(value, owner, documented)
        name = (documented or {}).get(name, f"{{owner}}/{name}").format(owner=owner)
        return Variable(value, False, name=name)

    return type(state)(*(one(name, getattr(state, name)) for name in state._fields))
