"""Traces recorded from Keras 3.15.1; where the original has a bug, the tests say what we do."""

import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import gainstage as gs
from gainstage.optimizers import SGD, Adam

RECORDED = json.loads(
    (Path(__file__).parents[1] / "goldens" / "keras3_loss_scale_optimizer.json").read_text()
)["traces"]
# Raw edges of Keras 3: no bounds on the scale, a growth period of 0, no check after unscaling.
EDGES = {trace["id"]: trace for trace in RECORDED if trace["id"].startswith("edge-")}
TRACES = {trace["id"]: trace for trace in RECORDED if trace["id"] not in EDGES}
# Keras keeps two variables in the wrapper that never change, its own iteration and rate.
DEAD = 2


def arrays(values):
    return [None if v is None else np.asarray(v, np.float32) for v in values]


def close(actual, expected):
    expected = np.asarray(expected, np.float32)
    assert np.all(np.abs(actual - expected) <= 1e-4 * np.abs(expected) + 2e-6)


def make(trace):
    """The optimizer and variables that a trace describes."""
    config = trace["config"]
    inner = dict(config["inner_optimizer"])
    cls = {"SGD": SGD, "Adam": Adam}[inner.pop("class_name")]
    variables = [
        gs.optimizers.Variable(np.asarray(v["initial"], np.float32), name=v["name"])
        for v in trace["trainable"]
    ]
    inner = cls.from_config(inner)
    if excluded := config["exclude_from_weight_decay"]:
        inner.exclude_from_weight_decay(
            var_list=[variables[i] for i in excluded.get("var_indices", [])],
            var_names=excluded.get("var_names"),
        )
    optimizer = gs.optimizers.LossScaleOptimizer(
        inner,
        initial_scale=config["initial_scale"],
        dynamic_growth_steps=config["dynamic_growth_steps"],
    )
    optimizer.build(variables)
    return optimizer, variables


def stateful(optimizer, variables):
    """Steps through `apply`; yields the weights and the optimizer's variables after each."""

    def step(grads):
        optimizer.apply(grads, variables)
        return [v.numpy() for v in variables], [v.numpy() for v in optimizer.variables]

    return step


def stateless(optimizer, variables):
    """Steps through `jit(stateless_apply)`, which changes no variable."""
    state = [v.value() for v in variables], [v.value() for v in optimizer.variables]
    compiled = jax.jit(optimizer.stateless_apply)

    def step(grads):
        nonlocal state
        state = compiled(state[1], grads, state[0])
        return state

    return step


def traces():
    """Every trace through `apply`, and those with all options through `jit` too."""
    for name, way in itertools.product(TRACES, [stateful, stateless]):
        seldom = way is stateless and not name.endswith("all")
        yield pytest.param(name, way, marks=[pytest.mark.thorough] * seldom)


@pytest.mark.filterwarnings("ignore:No gradient for")
@pytest.mark.parametrize(("name", "way"), list(traces()))
def test_trace_of_keras_is_reproduced(name, way):
    """Scale, counter, iterations, weights and every slot follow the recorded run of Keras 3."""
    trace = TRACES[name]
    optimizer, variables = make(trace)
    step = way(optimizer, variables)
    for recorded in trace["steps"]:
        weights, state = step(arrays(recorded["grads"]))
        counter, scale, iteration = state[:3]
        assert (counter, scale) == (recorded["counter"], recorded["scale"])
        assert iteration == recorded["inner_iteration"]
        if way is stateful:
            assert int(optimizer.iterations) == recorded["iterations_property"]
        for actual, expected in zip(weights, recorded["trainable"], strict=True):
            close(actual, expected)
        expected_state = recorded["optimizer_variables"][DEAD:]
        for actual, expected in zip(state, expected_state, strict=True):
            close(actual, expected)


def test_variables_stand_in_the_recorded_order():
    """The list of variables is Keras's, without the wrapper's two dead ones."""
    for trace in TRACES.values():
        optimizer, _ = make(trace)
        slots = [v["path"].split("/")[-1] for v in trace["optimizer_variables"][DEAD:]]
        ours = [v.name.split("/")[-1] for v in optimizer.variables]
        assert len(ours) == len(slots)
        assert all(
            theirs.endswith(mine) or mine.endswith(theirs.removeprefix("model_"))
            for mine, theirs in zip(ours, slots, strict=True)
        )


# Asked for in tf-keras#644 (scale < 1).
@pytest.mark.parametrize("way", [stateful, stateless])
def test_scale_falls_below_one_as_recorded(way):
    """The Keras 3 class has no floor of 1: its recorded scale below 1 is ours."""
    trace = EDGES["edge-scale-below-one"]
    step = way(*make(trace))
    for recorded in trace["steps"]:
        weights, state = step(arrays(recorded["grads"]))
        assert (state[0], state[1]) == (recorded["counter"], recorded["scale"])
        for actual, expected in zip(weights, recorded["trainable"], strict=True):
            close(actual, expected)


@pytest.mark.parametrize("way", [stateful, stateless])
def test_scale_stops_at_its_largest_value_where_keras_goes_to_inf(way):
    """Difference: recorded Keras doubles to inf and never recovers; our scale stays at 2**126."""
    trace = EDGES["edge-scale-to-inf"]
    assert any(recorded["scale"] == "inf" for recorded in trace["steps"])
    step = way(*make(trace))
    weights = arrays(v["initial"] for v in trace["trainable"])
    for recorded in trace["steps"]:
        before = weights
        weights, state = step(arrays(recorded["grads"]))
        assert 0 < state[1] <= 2.0**126
        assert all(np.isfinite(w).all() for w in weights)
        assert recorded["finite"] or all(
            (a == b).all() for a, b in zip(weights, before, strict=True)
        )


def test_growth_period_of_zero_is_refused():
    """Difference: Keras accepts a growth period of 0 and then never grows; we say so at once."""
    with pytest.raises(ValueError, match="dynamic_growth_steps"):
        make(EDGES["edge-growth-zero"])


@pytest.mark.parametrize("way", [stateful, stateless])
def test_overflow_on_unscaling_is_skipped_where_keras_applies_it(way):
    """Difference: below a scale of 1 a finite scaled gradient may unscale to inf; we skip it."""
    trace = EDGES["edge-scale-overflow-unscaled"]
    scale = trace["config"]["initial_scale"]
    optimizer, variables = make(trace)
    step = way(optimizer, variables)
    weights, skipped = [v.numpy() for v in variables], 0
    for recorded in trace["steps"]:
        before, grads = weights, arrays(recorded["grads"])
        weights, state = step(grads)
        with np.errstate(over="ignore"):
            overflows = not all(np.isfinite(g / np.float32(scale)).all() for g in grads)
        if overflows:
            skipped += 1
            assert all((a == b).all() for a, b in zip(weights, before, strict=True))
        assert all(np.isfinite(w).all() for w in weights)
        scale = float(state[1])
    assert skipped > 0
