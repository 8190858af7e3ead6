"""Compiles gradients under `gs.autocast` for an H100, and by hand in float16: `python casts.py`."""

import json
import warnings

import jax

import gainstage as gs
from benchmarks import hlo
from benchmarks.lowered import planned_everywhere, target
from gainstage.precision import find_plan
from studies.autocast_models import MODELS

NAMES = ("mixture of experts", "GRPO step")  # in plain JAX


def casts(text):
    """How many kernels cast a parameter to float16, at most: a weight, and a pair of factors."""
    computations, entry = hlo.parse(text)
    kernels = computations[entry].values()
    found = {i.name: 0 for i in kernels if i.op == "parameter" and i.shape.startswith("f32[")}
    lines = {name: computations[entry][name].line for name in found}
    found = {
        name: 0 for name, line in lines.items() if "params[" in line and "," in line.split("]")[0]
    }
    for kernel in kernels:
        inside = computations[next(hlo.called_by(kernel))] if kernel.op == "fusion" else None
        for number, name in enumerate(kernel.operands):
            users = [user for user, _ in hlo.uses_of(inside, number)] if inside else [kernel]
            if name in found:
                found[name] += any(u.op == "convert" and u.shape.startswith("f16") for u in users)
    pairs = {name for name in found if "f32[2," in computations[entry][name].shape}
    return (
        max(times for name, times in found.items() if name not in pairs),
        max((found[name] for name in pairs), default=0),
    )


def sizes(loss, *args):
    """What the gradient moves and stores, and how often it casts an argument."""
    program = jax.jit(jax.value_and_grad(loss)).trace(*args).lower(lowering_platforms=("cuda",))
    executable = program.compile()
    text = executable.as_text()
    counts, (of_weights, of_factors) = hlo.counts(text), casts(text)
    temp = executable.memory_analysis().temp_size_in_bytes
    return {
        "moved": counts.read + counts.written,
        "temp": temp,
        "casts": of_weights,
        "casts of factors": of_factors,
    }


def main():
    """Prints the sizes of each program."""
    found = {}
    for name in NAMES:
        small, large = MODELS[name](), MODELS[name](large=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plan = find_plan(
                small.loss, small.params, [(small.batch(0),)], max_error=0.005, progress=False
            )
        args = planned_everywhere((large.params, large.batch(0)), target("h100"))
        losses = {
            "float32": large.loss,
            "by hand": large.by_hand,
            "autocast": gs.autocast(large.loss),
            "plan": gs.autocast(large.loss, plan),
        }
        found[name] = {arm: sizes(loss, *args) for arm, loss in losses.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
