"""A plan finds its lines of code again: for other shapes and depths, and in another process."""

import importlib.util
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import gainstage as gs
from gainstage.precision import Plan, find_plan

BOUND = 0.005
# Features with a mean of 300, which is subtracted after the first product: float16 is 10 % off.
OFFSET = 300
MODULE = """
import jax
import jax.numpy as jnp


def dense(w, x):
    return x @ w


def block(w, h):
    return h + jnp.tanh(dense(w, h))


def loss(params, x):
    h = jnp.tanh(dense(params["in"], x) - params["mean"])
    h, _ = jax.lax.scan(lambda h, w: (jax.checkpoint(block)(w, h), None), h, params["layers"])
    return jnp.mean((jax.jit(dense)(params["out"], h)) ** 2)
"""
OTHER_PROCESS = """
import sys
import test_lines_of_plans as own
from gainstage.precision import Plan
loss = own.module(own.Path(sys.argv[1])).loss
print(own.lowered(loss, Plan.load(sys.argv[2])))
"""


def draw(number, *shape):
    return jnp.asarray(np.random.default_rng(number).normal(size=shape), jnp.float32)


def arguments(features=48, width=64, layers=2, batch=128):
    """Parameters of `MODULE`, and features with an offset."""
    weight = draw(1, features, width) / features**0.5
    params = {
        "in": weight, "mean": OFFSET * np.asarray(weight).sum(0),
        "layers": draw(2, layers, width, width) / width**0.5,
        "out": draw(3, width, 48) / width**0.5,
    }  # fmt: skip
    return params, OFFSET + 0.7 * np.asarray(draw(4, batch, features))


def module(path):
    """A file as a module."""
    spec = importlib.util.spec_from_file_location("losses", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def written(folder, text):
    """A file of some code, as a module."""
    folder.mkdir()
    path = folder / "losses.py"
    path.write_text(text)
    return module(path)


def lowered(loss, plan):
    """The program of the gradient, as it is given to a compiler."""
    return jax.jit(jax.grad(gs.autocast(loss, plan))).lower(*arguments()).as_text()


def tuned(loss, *args):
    return find_plan(loss, args[0], [args[1:]], max_error=BOUND, progress=False)


def error(loss, half, params, *batch, scale=2.0**8):
    """The relative error of the gradient of a loss in half precision."""
    found = jax.jit(jax.grad(lambda p: half(p, *batch) * scale))(params)
    exact = jax.jit(jax.grad(loss))(params, *batch)
    both = [
        np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)])
        for tree in (found, exact)
    ]
    return np.linalg.norm(both[0] / scale - both[1]) / np.linalg.norm(both[1])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A module, and the plan of its loss."""
    found = written(tmp_path_factory.mktemp("code") / "first", MODULE)
    return found, tuned(found.loss, *arguments())


def test_a_plan_holds_for_other_shapes_and_depths(measured):
    """Another batch, another width, and one more equal layer need no other plan: there is no
    warning, and the error stays within the bound."""
    found, plan = measured
    half = gs.autocast(found.loss, plan)
    for sizes in ({"batch": 32}, {"features": 96, "width": 128}, {"layers": 3}):
        args = arguments(**sizes)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert error(found.loss, half, *args) <= BOUND
        assert error(found.loss, gs.autocast(found.loss), *args) > 0.02


def test_each_call_of_a_function_is_a_line_of_its_own(measured):
    """One function computes three products, in a loop and compiled. The first alone is in float32,
    and each row says from which line the function is called."""
    _, plan = measured
    products = {o.line: o.dtype for o in plan.entries if o.text == "return x @ w"}
    assert products == {
        "losses.py:7 from losses.py:15": "float32",
        "losses.py:7 from losses.py:11": "float16",
        "losses.py:7 from losses.py:17": "float16",
    }


def test_a_plan_gives_the_same_program_in_another_process(measured, tmp_path):
    """It is read from its file, and the text that a compiler gets is the same, letter by letter."""
    found, plan = measured
    plan.save(tmp_path / "plan.json")
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, found.__file__, tmp_path / "plan.json"],
        cwd=here, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == lowered(found.loss, plan).strip()


def test_a_plan_survives_edits_elsewhere(measured, tmp_path):
    """Lines above, another function, another file and another indentation change nothing."""
    found, plan = measured
    before = "import math\n\n\ndef unused(x):\n    return math.sin(x)\n"
    under = MODULE.replace("    return x @ w", "    if x.ndim:\n        return x @ w")
    for number, text in enumerate((before + MODULE, MODULE + before, under)):
        other = written(tmp_path / str(number), text)
        assert lowered(other.loss, plan) == lowered(found.loss, plan)


def test_a_plan_survives_its_own_advice(measured, tmp_path):
    """Its lines are put into `keep_float32`, as it says, and it is still accepted."""
    line = '    h = jnp.tanh(dense(params["in"], x) - params["mean"])'
    kept = f"    with gs.keep_float32():\n    {line}"
    other = written(tmp_path / "kept", f"import gainstage as gs{MODULE.replace(line, kept)}")
    assert error(other.loss, gs.autocast(other.loss, measured[1]), *arguments()) <= BOUND


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("return x @ w", "return jnp.dot(x, w)", 15),
        ("jnp.tanh(dense(w, h))", "jnp.sin(dense(w, h))", 11),
        ("jnp.tanh(dense(params", "jnp.cos(dense(params", 15),
        ("(block)(w, h)", "(block)(2 * w, h)", 11),
    ],
)
def test_a_plan_is_refused_after_an_edit_of_a_line(measured, old, new, line, tmp_path):
    """The error names the first line that is not there, with its code, and how to go on."""
    other = written(tmp_path / "edited", MODULE.replace(old, new))
    named = rf"losses\.py:7 from losses\.py:{line} \(`return x @ w`\)"
    with pytest.raises(
        ValueError, match=rf"{named}; got one that lacks 3 of its 8 rows.*find_plan"
    ):
        gs.autocast(other.loss, measured[1])(*arguments())


def test_code_without_text_has_the_numbers_of_its_lines():
    """What was typed or put together at run time has no file; a plan of it is used all the same."""
    scope = {}
    exec(compile(MODULE, "<string>", "exec"), scope)
    plan = tuned(scope["loss"], *arguments())
    assert {o.text for o in plan.entries if o.name == "dot_general"} == {"7"}
    assert json.loads(plan.to_json())["operations"][0]["line"] == "<string>:7"
    half = gs.autocast(scope["loss"], Plan.from_json(plan.to_json()))
    assert error(scope["loss"], half, *arguments()) <= BOUND


class NnxBlocks(nnx.Module):
    def __init__(self, depth):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(48, 64, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(depth)])

    def __call__(self, x):
        h = jnp.tanh(self.first(x) - OFFSET * self.first.kernel[...].sum(0))
        for block in self.blocks:
            h = h + jnp.tanh(block(h))
        return h


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, h):
        return h + jnp.tanh(linen.Dense(64)(h))


class LinenBlocks(linen.Module):
    depth: int

    @linen.compact
    def __call__(self, x):
        first = linen.Dense(64)
        h = jnp.tanh(first(x) - first(jnp.full_like(x[:1], OFFSET)))
        for _ in range(self.depth):
            h = LinenBlock()(h)
        return h


class EquinoxBlocks(eqx.Module):
    first: eqx.nn.Linear
    blocks: list

    def __init__(self, depth):
        keys = jax.random.split(jax.random.key(0), depth + 1)
        self.first = eqx.nn.Linear(48, 64, key=keys[0])
        self.blocks = [eqx.nn.Linear(64, 64, key=key) for key in keys[1:]]

    def __call__(self, x):
        h = jnp.tanh(self.first(x) - OFFSET * self.first.weight.sum(1))
        for block in self.blocks:
            h = h + jnp.tanh(block(h))
        return h


class HaikuBlock(hk.Module):
    def __call__(self, h):
        return h + jnp.tanh(hk.Linear(64)(h))


def haiku_blocks(depth):
    def apply(x):
        first = hk.Linear(64)
        h = jnp.tanh(first(x) - first(jnp.full_like(x[:1], OFFSET)))
        for _ in range(depth):
            h = HaikuBlock()(h)
        return h

    return hk.without_apply_rng(hk.transform(apply))


def of_library(library, depth):
    """A loss of a model of this many equal layers, and its parameters."""
    x = jnp.ones((1, 48))
    if library == "nnx":
        return lambda model, x: jnp.mean(model(x) ** 2), NnxBlocks(depth)
    if library == "equinox":
        return lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2), EquinoxBlocks(depth)
    model = LinenBlocks(depth) if library == "linen" else haiku_blocks(depth)
    params = model.init(jax.random.key(0), x)
    return lambda params, x: jnp.mean(model.apply(params, x) ** 2), params


@pytest.mark.parametrize("library", ["nnx", "linen", "equinox", "haiku"])
def test_a_plan_of_a_model_holds_for_more_layers(library):
    """A plan of two equal layers serves a model of three, and keeps the bound of the error."""
    batch = 0.7 * draw(5, 128, 48) + OFFSET
    loss, params = of_library(library, 2)
    plan = tuned(loss, params, batch)
    products = [o.dtype for o in plan.entries if o.name == "dot_general"]
    assert sorted(set(products)) == ["float16", "float32"]
    deeper, more = of_library(library, 3)
    half = gs.autocast(deeper, Plan.from_json(plan.to_json()))
    text = str(jax.make_jaxpr(lambda params: half(params, batch))(more))
    assert len(re.findall(r"f16\[(128,64|64,128)\] = dot_general", text)) == 3
    assert gs.audit(half, more, batch, scale=2.0**8).gradient_error <= BOUND


def test_a_plan_holds_inside_of_shard_map(measured):
    """Each device computes its part by the plan that was measured without devices."""
    found, plan = measured
    params, x = arguments()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = (PartitionSpec(), PartitionSpec("data"))

    def sharded(loss):
        part = jax.shard_map(
            lambda params, x: lax.pmean(loss(params, x), "data"),
            mesh=mesh, in_specs=specs, out_specs=PartitionSpec(),
        )  # fmt: skip
        return jax.jit(part)

    half = sharded(gs.autocast(found.loss, plan))
    assert error(sharded(found.loss), half, params, x) <= BOUND
    assert error(sharded(found.loss), sharded(gs.autocast(found.loss)), params, x) > 0.02
