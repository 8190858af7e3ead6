"""Whatever a file holds, it is loaded as it is, or refused by a clear error and nothing is loaded.

Clear is a ValueError or TypeError that begins "Expected". Files are damaged byte by byte where we
read bytes, and value by value where another library has made dictionaries of them.
"""

import ast
import copy
import functools
import inspect
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gainstage as gs
from gainstage._base import configurable
from gainstage.compat import experimental, tf2
from gainstage.diagnostics import JsonLines, read_run
from gainstage.interop import importers
from gainstage.optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    LossScaleOptimizer,
    RMSprop,
    schedules,
)

SRC = Path(gs.__file__).parent
QUICK = settings(
    deadline=None,
    derandomize=True,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
LONG = settings(QUICK, max_examples=5000, derandomize=False)


def nested(depth, inside=None):
    for _ in range(depth):
        inside = [inside]
    return inside


def wrapped(depth):
    """The description of a wrapper in a wrapper in a wrapper."""
    inside = None
    for _ in range(depth):
        inside = {"class_name": "LossScaleOptimizer", "config": {"inner_optimizer": inside}}
    return inside


WRONG = [
    None, True, False, 0, 1, -1, 2, 7, 2**40, -(2**70), 10**400, 0.5, -0.5, 1e-300, 1e300, math.nan,
    math.inf, -math.inf, "", "a", "0.5", "Adam", "SGD", "ExponentialDecay", b"\xff", 1j, (), [],
    [1, 2], [0.5, "a"], {}, {"a": 1}, {1: 2}, object(), nested(40), wrapped(2),
    np.array([1.0, 2.0]), np.float64(0.25), np.datetime64("2020-01-01"), range(3),
]  # fmt: skip


def paths(tree, path=()):
    """The places of all values inside of dictionaries and lists."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in pairs:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from paths(value, (*path, key))


@st.composite
def damaged(draw, tree, values=None):
    """A copy with one to three values replaced, removed, added, renamed or exchanged."""
    tree, wrong = copy.deepcopy(tree), st.sampled_from(values or WRONG).map(copy.deepcopy)
    for _ in range(draw(st.integers(1, 3))):
        places = list(paths(tree))
        if not places:
            break
        *path, key = draw(st.sampled_from(places))
        inside = tree
        for step in path:
            inside = inside[step]
        what = draw(st.sampled_from(["replace"] * 4 + ["remove", "add", "rename", "exchange"]))
        if what == "replace":
            inside[key] = draw(wrong)
        elif what == "remove":
            del inside[key]
        elif isinstance(inside, list):
            inside.insert(key, draw(wrong))
        elif what == "exchange":
            other = draw(st.sampled_from(list(inside)))
            inside[key], inside[other] = inside[other], inside[key]
        else:
            name = draw(st.sampled_from(["x", "", "name", "self", "cls", "config", "rule", "7", 7]))
            inside[name] = inside.pop(key) if what == "rename" else draw(wrong)
    return tree


def outcome(load):
    """What `load` returns, or None after a clear error; any other error is one of the test."""
    try:
        return load()
    except (TypeError, ValueError) as error:
        if not str(error).startswith("Expected"):
            raise
        return None


# ── configurations ───────────────────────────────────────────────────────────────────────────

SCHEDULES = [
    schedules.ExponentialDecay(0.5, 2, 0.5, staircase=True),
    schedules.InverseTimeDecay(0.5, 2, 0.5),
    schedules.PolynomialDecay(0.5, 2, power=2.0, cycle=True),
    schedules.CosineDecay(0.5, 2, warmup_target=1.0, warmup_steps=3),
    schedules.PiecewiseConstantDecay([10, 20], [1.0, 0.5, 0.25]),
    schedules.CosineDecayRestarts(0.5, 2, m_mul=0.5),
]
RULES = [
    gs.FixedLossScale(8.0),
    gs.DynamicLossScale(8.0, 3, 4.0, backoff_factor=0.5, hysteresis=2),
    gs.AdaptiveLossScale(8.0, 3, margin=2.0),
]
OPTIMIZERS = [
    SGD(0.1, momentum=0.5, nesterov=True, clipnorm=1.0),
    Adam(SCHEDULES[0], amsgrad=True, use_ema=True, master_weights=True),
    AdamW(SCHEDULES[4], weight_decay=0.1, gradient_accumulation_steps=2),
    RMSprop(0.1, centered=True, clipvalue=1.0),
    Adagrad(0.1, initial_accumulator_value=0.5, loss_scale_factor=4.0),
    Adadelta(0.1, rho=0.5),
    Adadelta(0.1, ema_overwrite_frequency=3, global_clipnorm=1.0),
    LossScaleOptimizer(Adam(SCHEDULES[3]), 8.0, 3, use_ema=True, telemetry=True),
    LossScaleOptimizer(SGD(0.1), 8.0, dynamic=False),
    LossScaleOptimizer(Adagrad(0.1), loss_scale=RULES[2], clipnorm=1.0),
    tf2.LossScaleOptimizer(SGD(0.1), True, 8.0, 3),
]
BASES = {
    schedules.LearningRateSchedule: SCHEDULES,
    gs.LossScale: RULES,
    gs.optimizers.Optimizer: OPTIMIZERS,
}
DESCRIBED = [(base, configurable.description_of(x)) for base, all_ in BASES.items() for x in all_]
OTHERS = [experimental.FixedLossScale(4.0), experimental.DynamicLossScale(4, 3, 4)]


def same(got, written):
    """Whether a value of `get_config` is the one that the configuration had."""
    if isinstance(written, Mapping) and "class_name" in written and isinstance(got, Mapping):
        return got["class_name"] == written["class_name"]
    if isinstance(written, (list, tuple, range)):
        return len(got) == len(written) and all(map(same, got, written))
    if isinstance(got, float) and not isinstance(written, (str, bool)):
        return got == written or np.float32(got) == np.float32(written)  # the learning rate
    return bool(np.all(got == written))


def check_says(thing, config):
    """What a thing says of itself is what its configuration said, or a default."""
    said = thing.get_config()
    parameters = inspect.signature(type(thing)).parameters
    for name, written in config.items():
        default = parameters[name].default if name in parameters else None
        assert written is None or same(said.get(name, default), written), (name, written)
    assert type(thing).from_config(said).get_config() == said


def check_configuration(data):
    base, description = data.draw(st.sampled_from(DESCRIBED))
    broken = data.draw(damaged(description))
    thing = outcome(lambda: configurable.object_from(broken, base))
    if thing is not None:
        assert type(thing).__name__ == broken["class_name"]
        check_says(thing, broken["config"])


@QUICK
@given(st.data())
def test_descriptions(data):
    """Of an optimizer, rule or schedule, with all that is nested in it."""
    check_configuration(data)


@pytest.mark.slow
@LONG
@given(st.data())
def test_many_descriptions(data):
    """The same, many times, with other damage in each run."""
    check_configuration(data)


@QUICK
@given(st.data())
def test_configurations(data):
    """`from_config` of every class, the policy and the documents' objects included."""
    thing = data.draw(st.sampled_from([*SCHEDULES, *RULES, *OPTIMIZERS, *OTHERS]))
    broken = data.draw(damaged(thing.get_config()) | st.sampled_from(WRONG))
    before = repr(broken)
    again = outcome(lambda: type(thing).from_config(broken))
    assert repr(broken) == before
    if again is not None:
        check_says(again, broken)


# ── saved variables ──────────────────────────────────────────────────────────────────────────


def built(**options):
    names = [("a", (2, 3)), ("b", ()), ("b", (4,))]
    variables = [
        gs.optimizers.Variable(np.ones(shape, np.float32), name=name) for name, shape in names
    ]
    opt = LossScaleOptimizer(Adam(0.1, **options), 8.0, telemetry=True)
    opt.build(variables)
    opt.apply([np.full(v.shape, 3.0, np.float32) for v in variables], variables)
    return variables, opt


@functools.cache
def optimizers():
    """What states are loaded into, built when the first test needs it."""
    several = {}, {"use_ema": True, "gradient_accumulation_steps": 2}
    return [built(**options)[1] for options in several]


ARRAYS = [
    *WRONG, np.zeros((2, 3)), np.full((2, 3), np.nan, np.float32), np.full((2, 3), 1e300),
    np.full((2, 3), 2**40), np.zeros((3, 2)), np.zeros((2, 3), np.complex64), np.zeros((1,)),
    np.float16(np.inf), np.full((2, 3), 0.1), np.array("a"), np.array([None, {}], object),
    np.zeros((2, 3), jnp.bfloat16), jnp.zeros((2, 3), jnp.int8), jnp.float16(2.0), np.int64(2**31),
    np.float32(0.5), np.uint8(255), np.bool_(True), np.zeros((0,)), [[1, 2, 3], [4, 5, 6]],
    [[1], 2], np.frombuffer(b'[["a", [2, 3], 0]]', np.uint8), np.frombuffer(b"\xff[", np.uint8),
    np.frombuffer(b"[" * 100_000, np.uint8),
]  # fmt: skip


def state_of(opt):
    return [(v.name, v.dtype, v.numpy().tobytes()) for v in opt.variables]


def check_loaded(got, given):
    """An array that was loaded is the one that was given, but for rounding."""
    given = np.asarray(given)
    np.testing.assert_array_equal(got, given.astype(got.dtype))
    if not jnp.issubdtype(got.dtype, jnp.floating):
        assert (got == given).all()
    elif jnp.issubdtype(given.dtype, jnp.floating):
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(given))


def check_saved(data, opt, stored, load):
    before = state_of(opt)
    broken = data.draw(damaged(stored, ARRAYS) | st.sampled_from(ARRAYS))
    done = outcome(lambda: load(broken) or "loaded")
    if done is None:
        assert state_of(opt) == before
    return broken if done else None


def check_state(data):
    opt = data.draw(st.sampled_from(optimizers()))
    stored = {name: np.asarray(value) for name, value in opt.state().items()}
    loaded = check_saved(data, opt, stored, opt.load_state)
    for name in loaded or ():
        check_loaded(np.asarray(opt.state()[name]), loaded[name])
    opt.load_state(stored)


@QUICK
@given(st.data())
def test_states(data):
    """`load_state` of a dictionary from anywhere."""
    check_state(data)


@pytest.mark.slow
@LONG
@given(st.data())
def test_many_states(data):
    """The same, many times, with other damage in each run."""
    check_state(data)


@QUICK
@given(st.data())
def test_stores(data):
    """`load_own_variables` of a store from anywhere."""
    opt = data.draw(st.sampled_from(optimizers()))
    stored = {}
    opt.save_own_variables(stored)
    loaded = check_saved(data, opt, stored, opt.load_own_variables)
    for i, variable in enumerate(opt.variables if loaded else ()):
        check_loaded(variable.numpy(), loaded[str(i)])
    opt.load_own_variables(stored)


def test_loaded_arrays_are_the_optimizers_own():
    """What becomes of a numpy array after it was loaded is of no effect."""
    _, opt = built()
    stored = {name: np.array(value) for name, value in opt.state().items()}
    opt.load_state(stored)
    before = state_of(opt)
    for array in stored.values():
        array[...] = 7
    assert state_of(opt) == before


# ── other libraries' states ──────────────────────────────────────────────────────────────────

TORCH = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.25, "growth_interval": 3,
         "_growth_tracker": 2}  # fmt: skip
FLAX = {"scale": jnp.float32(1024.0), "fin_steps": jnp.int32(2), "growth_interval": 3,
        "growth_factor": 2.0, "backoff_factor": 0.25, "minimum_scale": None}  # fmt: skip
PEERS = [
    (lambda d: importers.from_torch(d), TORCH, "scale", "_growth_tracker"),
    (lambda d: importers.from_flax(SimpleNamespace(**d)), FLAX, "scale", "fin_steps"),
]


@QUICK
@given(st.data())
def test_states_of_peers(data):
    """A scale and a count from another library, put into an optimizer or not."""
    read, fields, scale, count = data.draw(st.sampled_from(PEERS))
    names = st.sampled_from([*fields, "other"])
    broken = {**fields, **data.draw(st.dictionaries(names, st.sampled_from(WRONG), max_size=3))}
    for name in data.draw(st.sets(st.sampled_from(list(fields)), max_size=1)):
        del broken[name]
    found = outcome(lambda: read(broken))
    if found is not None:
        rule, state = found
        assert float(state.scale) == np.float32(broken[scale])
        assert int(state.good_steps) == broken[count]
        opt = LossScaleOptimizer(SGD(0.5), loss_scale=rule)
        importers.load_into(opt, state)
        assert (float(opt.dynamic_scale), int(opt.step_counter)) == (state.scale, state.good_steps)


@pytest.mark.parametrize("what", [None, 5, "a", [], {}, object()], ids=lambda x: type(x).__name__)
def test_what_is_no_state_of_a_peer(what):
    """Something else in the place of the whole state."""
    for read in (importers.from_torch, importers.from_flax):
        assert outcome(lambda read=read: read(what)) is None
    assert outcome(lambda: importers.load_keras(optimizers()[0], what)) is None


@QUICK
@given(st.data())
def test_stores_of_keras(data):
    """`load_keras` of a store from anywhere."""
    opt = optimizers()[0]
    stored = {str(i + 2): v.numpy() for i, v in enumerate(opt.variables)}
    stored |= {"0": np.int32(0), "1": np.float32(0)}
    loaded = check_saved(data, opt, stored, lambda broken: importers.load_keras(opt, broken))
    for i, variable in enumerate(opt.variables if loaded else ()):
        check_loaded(variable.numpy(), loaded[str(i + 2)])
    importers.load_keras(opt, stored)


@QUICK
@given(scale=st.sampled_from(ARRAYS), count=st.sampled_from(ARRAYS))
def test_a_scale_from_anywhere(scale, count):
    """`resume` with numbers of one's own changes both or neither."""
    opt = optimizers()[0]
    before = state_of(opt)
    state = gs.typing.ScaleState(scale, count)
    if outcome(lambda: importers.load_into(opt, state) or "resumed") is None:
        assert state_of(opt) == before
    else:
        assert 0 < float(opt.dynamic_scale) == np.float32(scale)
        assert int(opt.step_counter) == count


@pytest.mark.parametrize("deep", [nested(5000), wrapped(5000)], ids=["lists", "wrappers"])
def test_what_is_nested_too_deep(deep):
    """Deeper than Python can follow, in the place of any value: a clear error too."""
    for base, description in DESCRIBED:
        for name in {*description["config"]} - {"name"}:
            broken = {**description, "config": {**description["config"], name: deep}}
            assert outcome(lambda b=base, d=broken: configurable.object_from(d, b)) is None
        assert outcome(lambda base=base: configurable.object_from(deep, base)) is None
    opt = optimizers()[1]
    before, state, store = state_of(opt), opt.state(), {}
    opt.save_own_variables(store)
    for name in state:
        assert outcome(lambda name=name: opt.load_state({**state, name: deep})) is None
    for key in store:
        assert outcome(lambda key=key: opt.load_own_variables({**store, key: deep})) is None
    assert state_of(opt) == before


# ── runs ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The bytes of a run in JSON lines."""
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    with JsonLines(path) as writer:
        for step in (0, 1, 2, 3, 2, 3, 4):
            writer.write(step, loss=1.0 / (step + 1), grad_norm=np.inf if step == 3 else 0.5)
    return path.read_bytes()


PIECES = [
    b"\xff", b"\xc3", b"\n", b"\r", b"{", b"}", b'"', b",", b"0", b"-", b"e9", b"NaN", b"null",
    b"true", b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5000, b'{"step": 1e3}\n',
    b'{"step": 9e99}\n', b"\x00",
]  # fmt: skip


@st.composite
def damaged_bytes(draw, content):
    content = bytearray(content)
    pieces = st.sampled_from(PIECES)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(content)))
        what = draw(st.sampled_from(["flip", "insert", "cut", "end", "repeat"]))
        if what == "flip" and place < len(content):
            content[place] ^= 1 << draw(st.integers(0, 7))
        elif what == "insert":
            content[place:place] = draw(pieces)
        elif what == "cut":
            del content[place : place + draw(st.integers(1, 40))]
        elif what == "end":
            del content[place:]
        else:
            content[place:place] = content[: draw(st.integers(0, 60))]
    return bytes(content)


def is_json(line):
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def records_of(content):
    """The steps of a file by plain means: None if some line is no step. Empty lines, and those that
    a failed write has not ended, do not count."""
    kept = {}
    try:
        *lines, last = content.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")
        try:
            json.loads(last)
            lines.append(last)
        except (ValueError, RecursionError):
            pass  # not written to its end
        for line in filter(None, lines):
            try:
                record = dict(json.loads(line))
            except (ValueError, RecursionError):
                if line.startswith("{") and not is_json(line):
                    continue
                return None
            step = record.pop("step")
            if type(step) not in (int, float) or not 0 <= step < 2**63 or step % 1:
                return None
            if isinstance(record.get("run"), dict):
                del record["run"]  # how the run was made
                if not record:
                    continue
            kept = {s: r for s, r in kept.items() if s < step}
            kept[int(step)] = {name: float(value) for name, value in record.items()}
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return kept or None


def check_run(content, path):
    path.write_bytes(content)
    with warnings.catch_warnings(action="ignore"):  # of lines that a failed write has not ended
        wanted, found = records_of(content), outcome(lambda: read_run(path))
    assert (found is None) == (wanted is None)
    if wanted is not None:
        assert found.steps.tolist() == list(wanted)
        for name in {name for record in wanted.values() for name in record}:
            column = [record.get(name, math.nan) for record in wanted.values()]
            np.testing.assert_array_equal(found.get(name), column)


@QUICK
@given(st.data())
def test_runs(run, tmp_path_factory, data):
    """`read_run` of JSON lines that were flipped, cut, mixed and nested too deep."""
    check_run(data.draw(damaged_bytes(run)), tmp_path_factory.getbasetemp() / "damaged.jsonl")


@pytest.mark.slow
@LONG
@given(st.data())
def test_many_runs(run, tmp_path_factory, data):
    """The same, many times, with other damage in each run."""
    check_run(data.draw(damaged_bytes(run)), tmp_path_factory.getbasetemp() / "damaged.jsonl")


# ── what is never done ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "path", sorted(SRC.rglob("*.py")), ids=lambda path: str(path.relative_to(SRC))
)
def test_no_file_can_make_python_call_something(path):
    """The library unpickles nothing, and evaluates nothing that it has read."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec", "__import__"}
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert ast.unparse(node.value) == "False"
        for name in names:
            assert name.split(".")[0] not in {"pickle", "cPickle", "dill", "joblib", "marshal",
                                              "cloudpickle", "shelve"}  # fmt: skip
