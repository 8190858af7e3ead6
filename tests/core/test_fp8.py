"""Float8: casts that count what they clamp, delayed scaling, and products in it."""

import collections
import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gainstage as gs
from gainstage.optimizers import SGD
from gainstage.precision import float8

DTYPES = [
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn",
]
NO_NAN = "float4_e2m1fn"


def numbers_of(dtype):
    """The lowest and the highest number of a dtype, as Python floats."""
    info = jnp.finfo(dtype)
    return float(info.min), float(info.max)


def states_of(tree):
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, float8.Scaling))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("dtype", DTYPES)
def test_casts_are_those_of_numpy_and_tell_what_they_clamped(dtype, factor, compiled, rng):
    """Each element is ml_dtypes' of the clamped one; `isfinite` is true of all, the count is not
    fooled."""
    low, high = numbers_of(dtype)
    values = np.float32([high, high * 0.75, 1.0, 3.3, 1e30, 3e38, *np.exp2(rng.normal(size=50))])
    if low < 0:
        values = np.concatenate([values, -values, np.float32([0.0, -0.0])])
    cast = jax.jit(float8.cast, static_argnums=2) if compiled else float8.cast
    x8, seen = cast(values, factor, dtype)
    scaled = values.astype(np.float64) * factor
    expected = np.clip(scaled, low, high).astype(np.float32).astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(x8, np.float32), expected.astype(np.float32))
    assert x8.dtype == dtype
    assert np.isfinite(np.asarray(x8, np.float32)).all()
    assert int(seen.clamped) == ((scaled < low) | (scaled > high)).sum()
    assert int(seen.nonfinite) == 0
    if dtype != "float8_e8m0fnu":
        assert int(seen.clamped) >= 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_never_clamped_to_a_number(dtype):
    """inf and NaN become NaN where the dtype has one, and are counted by themselves."""
    x8, seen = float8.cast([1.0, np.inf, -np.inf, np.nan], 1.0, dtype)
    assert (int(seen.clamped), int(seen.nonfinite)) == (0, 3)
    if dtype != NO_NAN:
        assert np.isnan(np.asarray(x8, np.float32)).tolist() == [False, True, True, True]


def test_scales_below_what_they_can_hold_are_counted():
    """A dtype without a sign and a zero clamps both to its smallest number, and says so."""
    x8, seen = float8.cast([-1.0, 0.0, 2.0], 1.0, "float8_e8m0fnu")
    assert int(seen.clamped) == 2
    assert np.asarray(x8, np.float32).tolist()[2] == 2.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_power_of_two_that_is_asked_for_just_fits(dtype, rng):
    """The largest finite element times 2**bits is within the range, and times two it is not."""
    high = Fraction(numbers_of(dtype)[1])
    exact = np.float32([float(high) * 2.0**e for e in (-60, -1, 0, 3) if high * 2**e < 2**127])
    largest = [*exact, *np.nextafter(exact, np.float32(np.inf)), *np.exp2(40 * rng.normal(size=30))]
    for value in np.float32(largest):
        if not np.isfinite(value):
            continue
        _, seen = float8.cast([value, -0.5 * value, np.nan], 1.0, dtype)
        (place,) = np.flatnonzero(seen.sizes)
        bits, size = int(place) - 126, Fraction(float(value))
        assert size * Fraction(2) ** bits <= high
        assert bits == 126 or size * Fraction(2) ** (bits + 1) > high
        assert float(seen.sizes[place]) == 1


class Oracle:
    """Delayed scaling as its papers tell it, in plain Python: the maximum of a queue of maxima."""

    def __init__(self, highest, history, margin):
        self.highest, self.margin = highest, margin
        self.queue = collections.deque(maxlen=history)
        self.factor, self.clamped_steps, self.stale = 1.0, 0, 0

    def step(self, values, applied):
        """The number of clamped elements."""
        finite = [abs(v) for v in values if math.isfinite(v)]
        clamped = sum(v * self.factor > self.highest for v in finite)
        amax = max(finite, default=0)
        if applied and amax > 0 and len(finite) == len(values):
            self.queue.append(amax)
            self.stale = 0
        else:
            self.stale += 1
        if self.queue:
            bits = 200
            while max(self.queue) * 2.0**bits > self.highest:
                bits -= 1
            self.factor = 2.0 ** min(max(bits - self.margin, -126), 126)
        self.clamped_steps += clamped > 0
        return clamped


def windows():
    """Every window in one of the two dtypes; those in the other are thorough."""
    for history, margin in [(1, 0), (3, 1), (16, 0), (1000, 2)]:
        for dtype in ("float8_e4m3fn", "float8_e5m2"):
            often = (dtype == "float8_e5m2") == (history in (3, 16))
            yield pytest.param(dtype, history, margin, marks=[pytest.mark.thorough] * (not often))


@pytest.mark.parametrize(("dtype", "history", "margin"), list(windows()))
def test_delayed_scaling_is_that_of_a_queue(dtype, history, margin):
    """Factor and counters follow the oracle through zeros, inf, NaN and skipped steps."""

    def step(state, given):
        values, applied = given
        _, seen = float8.cast(values, state.factor, dtype)
        state = float8.update(state, seen, applied, history=history, margin=margin)
        return state, (state.factor, state.clamped, state.clamped_steps, state.stale)

    run = jax.jit(lambda *given: lax.scan(step, float8.scaling(), given)[1])
    for seed in range(10):
        rng = np.random.default_rng(seed)
        trace = rng.normal(size=(150, 5)) * np.exp2(rng.normal(size=(150, 1)) * 6)
        trace[rng.random(150) < 0.15] = 0
        trace[rng.random(150) < 0.05, 2] = np.inf
        trace[rng.random(150) < 0.05, 3] = np.nan
        trace, applied = np.float32(trace), rng.random(150) < 0.9
        oracle, expected = Oracle(numbers_of(dtype)[1], history, margin), []
        for values, fine in zip(trace.tolist(), applied.tolist(), strict=True):
            clamped = oracle.step(values, fine)
            expected.append((oracle.factor, clamped, oracle.clamped_steps, oracle.stale))
        np.testing.assert_array_equal(np.stack(run(trace, applied), axis=1), expected)


def test_the_window_is_counted_in_steps_that_told_something():
    """What is remembered outlives any number of steps that told nothing, and not one step more than
    `history` that did."""
    state = float8.scaling()

    def after(state, value):
        _, seen = float8.cast([value], state.factor, "float8_e4m3fn")
        return float8.update(state, seen, history=2)

    state = after(state, 448.0 * 64)
    for value in (0.0, np.nan, 0.0):
        state = after(state, value)
    assert (float(state.factor), int(state.stale)) == (1 / 64, 3)
    state = after(state, 448.0)
    assert (float(state.factor), int(state.stale)) == (1 / 64, 0)
    assert float(after(state, 448.0).factor) == 1.0


def test_a_history_that_does_not_keep_up_is_seen():
    """A tensor that outgrows its history is clamped in every step, one that is dead is stale: the
    counters say so, while all that comes out of the cast is finite."""
    growing = dead = float8.scaling()
    for n in range(10):
        x8, seen = float8.cast([449.0 * 4.0**n, 1.0], growing.factor, "float8_e4m3fn")
        assert jnp.isfinite(x8.astype(jnp.float32)).all()
        growing = float8.update(growing, seen)
        assert int(growing.clamped) == 1
        dead = float8.update(dead, float8.cast(jnp.zeros(3), dead.factor, "float8_e4m3fn")[1])
    assert (int(growing.clamped_steps), int(growing.stale)) == (10, 0)
    assert (int(dead.clamped_steps), int(dead.stale), float(dead.factor)) == (0, 10, 1.0)


DOT = float8.dot_scaling()


def quantized(x, dtype, factor):
    """An array as it comes back out of a small dtype, in float64, by ml_dtypes."""
    low, high = numbers_of(dtype)
    scaled = np.clip(np.asarray(x, np.float64) * factor, low, high)
    return scaled.astype(np.float32).astype(jnp.dtype(dtype)).astype(np.float64) / factor


@pytest.mark.parametrize(
    ("shape", "weights"), [((5, 16), (16, 3)), ((2, 3, 16), (16, 2, 4)), ((16,), (16,))], ids=str
)
@pytest.mark.filterwarnings("ignore:The weights of a float8 product")  # factors that are known
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_products_are_those_of_the_cast_operands(dtype, shape, weights, rng):
    """Forwards e4m3 times e4m3, backwards e5m2 times e4m3, each with the factor of its own."""
    x, w = (rng.normal(size=size).astype(jnp.dtype(dtype)) for size in (shape, weights))
    state = float8.dot_scaling()
    factors = {"x": 64.0, "w": 0.25, "cotangent": 2.0**10}
    state = float8.DotScaling(*(
        scaling._replace(factor=np.float32(factors[name]))
        for name, scaling in state._asdict().items()
    ))  # fmt: skip
    back = rng.normal(size=(*shape[:-1], *weights[1:])).astype(jnp.dtype(dtype))

    @jax.jit
    def product(x, w, back):
        out, pull = jax.vjp(lambda x, w: float8.dot(x, w, state), x, w)
        return out, *pull(back)

    out, to_x, to_w = product(x, w, back)
    assert {out.dtype, to_x.dtype, to_w.dtype} == {jnp.dtype(dtype)}
    x8 = quantized(x, "float8_e4m3fn", factors["x"])
    w8 = quantized(w, "float8_e4m3fn", factors["w"])
    g8 = quantized(back, "float8_e5m2", factors["cotangent"])
    rtol = {"float32": 1e-5}.get(dtype, 1e-2)
    kept = len(shape) - 1
    for ours, theirs in (
        (out, np.tensordot(x8, w8, 1)),
        (to_x, np.tensordot(g8, w8, (range(kept, g8.ndim), range(1, w8.ndim)))),
        (to_w, np.tensordot(x8, g8, (range(kept), range(kept)))),
    ):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(np.asarray(ours, np.float64) / scale, theirs / scale, atol=rtol)


def test_gradients_are_close_to_those_of_float32(rng):
    """Once the factors are found, outputs and gradients are within what 3 and 2 bits can tell,
    however small or large the tensors are."""
    x = jnp.float32(rng.normal(size=(256, 128)) * 1e-6)
    w = jnp.float32(rng.normal(size=(128, 64)) * 1e5)
    y = jnp.float32(rng.normal(size=(256, 64)))

    def loss(x, w, state, dot):
        return ((dot(x, w, state) - y) ** 2).mean() * 1e-8

    state = float8.dot_scaling()
    for _ in range(3):
        *ours, seen = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)(x, w, state, float8.dot)
        state = float8.update(state, seen)
    assert [int(s.clamped) for s in states_of(state)] == [0, 0, 0]
    theirs = jax.grad(loss, (0, 1))(x, w, state, lambda x, w, state: x @ w)
    for a, b in zip(ours, theirs, strict=True):
        assert 1e-3 < jnp.linalg.norm(a - b) / jnp.linalg.norm(b) < 0.1


def test_operands_wait_for_the_backward_pass_in_float8(rng):
    """Nothing as large as an operand is kept in a wider dtype."""
    x, w = jnp.float32(rng.normal(size=(64, 32))), jnp.float32(rng.normal(size=(32, 48)))
    _, pull = jax.vjp(lambda x, w, state: float8.dot(x, w, state), x, w, float8.dot_scaling())
    large = [leaf.dtype for leaf in jax.tree.leaves(pull) if leaf.size >= 1024]
    assert large == [jnp.dtype("float8_e4m3fn")] * 2


@pytest.mark.parametrize("of", ["w", "x"])
@pytest.mark.filterwarnings("ignore:The weights of a float8 product are differentiated")
def test_a_second_derivative_of_a_product_is_refused(of, rng):
    """What autodiff makes of the rounded gradient is not its derivative: it is an error."""
    x, w = rng.normal(size=(4, 8)).astype(np.float32), rng.normal(size=(8, 3)).astype(np.float32)

    def penalty(w, x, state):
        seen_by = jax.grad(lambda w, x: (float8.dot(x, w, state) ** 2).sum(), "wx".index(of))
        return (seen_by(w, x) ** 2).sum()

    for derivative in (jax.grad(penalty, (0, 2)), jax.jacfwd(penalty)):
        with pytest.raises(TypeError, match=r"no second derivative.*`x @ w` in place of `float8"):
            derivative(w, x, float8.dot_scaling())


def two_layers(params, states, x, y):
    """The loss of a small network."""
    hidden = jax.nn.relu(float8.dot(x, params["hidden"], states["hidden"]))
    return ((float8.dot(hidden, params["out"], states["out"]) - y) ** 2).sum() / 64


def problem(seed=0):
    rng = np.random.default_rng(seed)
    params = {"hidden": rng.normal(size=(16, 32)) / 4, "out": rng.normal(size=(32, 4)) / 6}
    x, y = rng.normal(size=(64, 16)), rng.normal(size=(64, 4))
    x[3] *= 1000  # an outlier, in one part of the batch
    params, x, y = jax.tree.map(lambda array: jnp.asarray(np.float32(array)), (params, x, y))
    return params, {"hidden": float8.dot_scaling(), "out": float8.dot_scaling()}, x, y


differentiated = jax.jit(jax.grad(two_layers, (0, 1)))


@pytest.mark.parametrize("how", ["sum", "mean", "scan"])
def test_microbatches_see_what_the_batch_sees(how):
    """Four microbatches, added or averaged like gradients, move the scalings as the full batch
    does; the last of them alone would not. (marin#7659, keras#19534)"""
    params, states, x, y = problem()
    _, seen = differentiated(params, states, x, y)
    whole = float8.update(states, seen)
    parts = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 64, 16)]
    each = [differentiated(params, states, *part)[1] for part in parts]
    if how == "scan":
        zeros = jax.tree.map(jnp.zeros_like, states)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
        together, _ = lax.scan(
            lambda total, part: (
                jax.tree.map(jnp.add, total, differentiated(params, states, *part)[1]),
                None,
            ),
            zeros,
            stacked,
        )
    else:
        share = 4 if how == "mean" else 1
        together = jax.tree.map(lambda *leaves: sum(leaves) / share, *each)
    window = float8.update(states, together)
    for name, product in whole.items():
        for ours, theirs in zip(window[name], product, strict=True):
            assert float(ours.factor) == float(theirs.factor)
            counted = float(ours.clamped) * (4 if how == "mean" else 1)
            assert counted == float(theirs.clamped) * (4 if ours is window[name].w else 1)
    assert int(whole["hidden"].x.clamped) > 0
    last = float8.update(states, each[-1])
    assert float(last["hidden"].x.factor) > float(whole["hidden"].x.factor)


def test_a_state_used_twice_sees_the_largest_and_not_the_sum():
    """Autodiff, `vmap`, `scan` and `checkpoint` add what they bring: the factor is that of the
    largest, exactly."""
    x = jnp.float32([[448.0, 0], [448.0, 0], [1, 1], [2, 2]])
    w = jnp.eye(2, dtype=jnp.float32)

    def loop(state):
        return lax.scan(lambda total, row: (total + float8.dot(row, w, state).sum(), None), 0.0, x)[
            0
        ]

    ways = {
        "sum": lambda state: sum(float8.dot(row, w, state).sum() for row in x),
        "vmap": lambda state: jax.vmap(float8.dot, (0, None, None))(x, w, state).sum(),
        "scan": loop,
        "checkpoint": jax.checkpoint(loop),
    }
    for name, way in ways.items():
        seen = jax.jit(jax.grad(way))(float8.dot_scaling())
        assert float(seen.x.seen.sizes.sum()) == 4, name
        assert float(float8.update(float8.dot_scaling(), seen).x.factor) == 1.0, name


def test_stacked_layers():
    """Scalings stacked for a `scan` over layers move as each by itself."""
    rng = np.random.default_rng(0)
    weights = jnp.float32(rng.normal(size=(3, 8, 8)) * 2.0 ** np.float32([0, 9, -9])[:, None, None])
    x = jnp.float32(rng.normal(size=(4, 8)))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), float8.dot_scaling())

    def scanned(states):
        return lax.scan(lambda h, layer: (float8.dot(h, *layer), None), x, (weights, states))[
            0
        ].sum()

    def unrolled(states):
        h = x
        for w, state in zip(weights, states, strict=True):
            h = float8.dot(h, w, state)
        return h.sum()

    separate = [float8.dot_scaling()] * 3
    stacked = float8.update(stacked, jax.jit(jax.grad(scanned))(stacked))
    separate = float8.update(separate, jax.jit(jax.grad(unrolled))(separate))
    again = jax.tree.map(lambda *leaves: jnp.stack(leaves), *separate)
    for ours, theirs in zip(jax.tree.leaves(stacked), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert len(set(np.asarray(stacked.w.factor).tolist())) == 3


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_eight_devices_see_what_one_does(kind):
    """With the batch spread over a mesh, and on Auto axes the weights too, scalings, counts and
    gradients are those of one device."""
    params, states, x, y = problem()
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))

    def on(tree, *spec):
        return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*spec)))

    weights = on(params)
    if kind == AxisType.Auto:
        weights = {"hidden": on(params["hidden"], None, "model"), "out": on(params["out"], "model")}
    given = weights, on(states), on(x, "data"), on(y, "data")
    step = jax.jit(differentiated)
    with jax.set_mesh(mesh):
        grads, seen = step(*given)
    alone, seen_alone = step(params, states, x, y)
    for ours, theirs in zip(jax.tree.leaves(seen), jax.tree.leaves(seen_alone), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for name, gradient in grads.items():
        np.testing.assert_allclose(gradient, alone[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "checked"),
    [
        pytest.param(AxisType.Auto, True, id="Auto-check_vma"),
        pytest.param(AxisType.Explicit, False, id="Explicit-no check"),
        pytest.param(AxisType.Auto, False, id="Auto-no check", marks=pytest.mark.thorough),
        pytest.param(AxisType.Explicit, True, id="Explicit-vma", marks=pytest.mark.thorough),
    ],
)
def test_replicas_agree_inside_of_shard_map(checked, kind):
    """Each device sees its own part; the sum, which JAX makes where it knows what differs, and
    `psum` else, gives all the scalings of the whole batch."""
    params, states, x, y = problem()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))

    def step(params, states, x, y):
        _, seen = differentiated(params, states, x, y)
        return float8.update(states, seen if checked else lax.psum(seen, "data"))

    batch, alike = PartitionSpec("data"), PartitionSpec()
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(alike, alike, batch, batch), out_specs=alike, check_vma=checked
    )
    given = jax.device_put((params, states), NamedSharding(mesh, alike))
    parts = jax.device_put((x, y), NamedSharding(mesh, batch))
    ours = jax.jit(mapped)(*given, *parts)
    theirs = float8.update(states, differentiated(params, states, x, y)[1])
    for a, b in zip(states_of(ours), states_of(theirs), strict=True):
        assert [float(s.data) for s in a.factor.addressable_shards] == [float(b.factor)] * 8
        assert jnp.argmin(a.history) == jnp.argmin(b.history)
    assert float(ours["hidden"].x.clamped) == float(theirs["hidden"].x.clamped) > 0


def test_the_loss_scale_does_not_touch_what_was_seen():
    """Operands are seen alike under any loss scale, counts stay whole, and a cotangent, which is
    the scaled one, asks for as many bits less as the scale has."""
    params, states, x, y = problem()

    @jax.jit
    def differentiated(opt_state):
        both = gs.value_and_grad(two_layers, opt_state, argnums=(0, 1))
        return both(params, states, x, y)[1]

    seen, grads = {}, {}
    scales = (2.0**-10, 2.0**3, 2.0**10)
    for one in (1.0, *scales):
        opt_state = gs.loss_scaled(optax.sgd(0.1), gs.FixedLossScale(one)).init(params)
        grads[one], seen[one] = jax.device_get(differentiated(opt_state))
    for scale in scales:
        # Of the network's last product the cotangent is not cast before it is seen.
        ours, theirs = seen[scale]["out"], seen[1.0]["out"]
        for name in ("x", "w"):
            for a, b in zip(getattr(ours, name).seen, getattr(theirs, name).seen, strict=True):
                np.testing.assert_array_equal(a, b)
        (shifted,), (place,) = (np.flatnonzero(s.cotangent.seen.sizes) for s in (ours, theirs))
        assert place - shifted == math.log2(scale)
        assert float(ours.cotangent.seen.sizes.sum()) == 1
        hidden = seen[scale]["hidden"].x.seen.clamped
        assert int(hidden) == int(seen[1.0]["hidden"].x.seen.clamped) > 0
        assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads[scale]))


def test_a_bad_element_skips_the_step_and_leaves_the_history():
    """It comes through casts and products to loss and gradients; the weights stay, factors stay."""
    params, states, x, y = problem()
    tx = gs.loss_scaled(optax.adam(0.1))
    opt_state = tx.init(params)

    @jax.jit
    def step(params, states, opt_state, x):
        both = gs.value_and_grad(two_layers, opt_state, argnums=(0, 1))
        loss, (grads, seen) = both(params, states, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        states = float8.update(states, seen, gs.step_was_applied(opt_state))
        return optax.apply_updates(params, updates), states, opt_state, loss

    params, states, opt_state, _ = step(params, states, opt_state, x)
    assert bool(gs.step_was_applied(opt_state))
    for bad in (np.nan, np.inf, -np.inf):
        batch = np.array(x)
        batch[5, 2] = bad
        after, moved, bad_state, loss = step(params, states, opt_state, batch)
        assert np.isnan(float(loss))
        assert not gs.step_was_applied(bad_state)
        for old, new in zip(jax.tree.leaves(params), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(old, new)
        for old, new in zip(states_of(states), states_of(moved), strict=True):
            assert float(new.factor) == float(old.factor)
            np.testing.assert_array_equal(old.history, new.history)
            assert (int(old.stale), int(new.stale)) == (0, 1)


def test_a_step_that_overflowed_is_no_measure():
    """The cotangents under a loss scale that was too high are not remembered, though finite."""
    params, states, x, y = problem()
    scaled = jax.grad(lambda *args: two_layers(*args) * 2.0**60, (0, 1))
    _, seen = jax.jit(scaled)(params, states, x, y)
    kept = float8.update(states, seen, applied=False)["out"].cotangent
    assert (float(kept.factor), int(kept.stale)) == (1.0, 1)
    assert int(kept.clamped) > 0
    assert int(kept.clamped_steps) == 1
    assert float(float8.update(states, seen)["out"].cotangent.factor) < 2.0**-30


def test_a_network_trains_as_in_float32():
    """With activations of 1e-4 the loss ends at float32's; with factors that stay at one, which
    flush them to zero, nothing is learned."""
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(256, 8)))
    y = np.sin(x @ np.float32(rng.normal(size=(8, 2))) / 3)
    shapes = {"in": (8, 64), "hidden": (64, 64), "out": (64, 2)}
    start = {
        name: np.float32(rng.normal(size=shape) / shape[0] ** 0.5) for name, shape in shapes.items()
    }

    def trained(dot, moves):
        def loss_fn(params, state):
            hidden = jnp.tanh(x @ params["in"]) * 1e-4
            hidden = jnp.tanh(dot(hidden, params["hidden"], state) * 1e4)
            return ((hidden @ params["out"] - y) ** 2).mean()

        tx = gs.loss_scaled(optax.adam(optax.cosine_decay_schedule(1e-2, 400)))

        def step(carry, _):
            params, state, opt_state = carry
            both = gs.value_and_grad(loss_fn, opt_state, argnums=(0, 1))
            loss, (grads, seen) = both(params, state)
            updates, opt_state = tx.update(grads, opt_state, params)
            if moves:
                state = float8.update(state, seen, gs.step_was_applied(opt_state), margin=1)
            return (optax.apply_updates(params, updates), state, opt_state), loss

        begin = (start, float8.dot_scaling(), tx.init(start))
        losses = jax.jit(lambda begin: lax.scan(step, begin, length=400)[1])(begin)
        return float(losses[-1])

    wide = trained(lambda x, w, state: x @ w, True)
    assert wide < 0.005
    assert trained(float8.dot, True) < 1.5 * wide
    assert trained(float8.dot, False) > 50 * wide


def test_keras_style_loops():
    """With variables the gradient by the state stays out of `apply`, which unscales the rest."""
    w, state = gs.Variable(jnp.full((2, 1), 900.0), name="w"), float8.dot_scaling()
    opt = gs.LossScaleOptimizer(SGD(1.0), 2.0**8, telemetry=True)
    opt.build([w])

    def train_step(state, x):
        def scaled(value, state):
            return opt.scale_loss(float8.dot(x, value, state).sum())

        gradient, seen = jax.grad(scaled, (0, 1))(w.value(), state)
        opt.apply([gradient], [w])
        return float8.update(state, seen, gs.telemetry(opt).finite)

    step = gs.jit(train_step, state=([w], opt.variables))
    state = step(state, jnp.ones((1, 2)))
    assert w.numpy().ravel().tolist() == [899.0, 899.0]
    assert (float(state.w.factor), int(state.w.clamped)) == (0.25, 2)
    after = step(state, jnp.full((1, 2), jnp.nan))
    assert w.numpy().ravel().tolist() == [899.0, 899.0]
    assert (float(after.w.factor), int(after.x.stale)) == (0.25, 1)


@pytest.mark.as_users
def test_the_program_multiplies_float8_and_calls_nobody():
    """The products of the compiled step are of float8 operands, and there is no callback."""
    params, states, x, y = problem()
    lowered = jax.jit(differentiated).lower(params, states, x, y)
    products = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert len(products) == 5  # nobody asks for the gradient by x
    assert sum("f8E5M2" in line for line in products) == 3
    assert all("f8E4M3FN" in line and "-> tensor<" in line for line in products)
    assert "callback" not in lowered.compile().as_text()


def test_misuse():
    """What is no state, no small dtype, no product or no gradient by the states is named."""
    x, w, state = jnp.ones((2, 3)), jnp.ones((3, 4)), float8.dot_scaling()
    with pytest.raises(
        TypeError, match=r"Expected a gainstage.precision.float8.DotScaling for state; got"
    ):
        float8.dot(x, w, float8.scaling())
    with pytest.raises(TypeError, match=r"floating array for x; got int32"):
        float8.dot(jnp.ones((2, 3), jnp.int32), w, state)
    with pytest.raises(ValueError, match=r"got \(2, 3\), \(4, 3\)"):
        float8.dot(x, w.T, state)
    with pytest.raises(TypeError, match="at most 8 bits; got float16"):
        float8.dot(x, w, state, grad="float16")
    with pytest.raises(TypeError, match="at most 8 bits; got int8"):
        float8.cast(x, 1.0, "int8")
    with pytest.raises(TypeError, match="gradient of states for seen"):
        float8.update(state, float8.DotScaling(x, w, x))
    with pytest.raises(ValueError, match="for history; got 0"):
        float8.update(state, state, history=0)
    with pytest.raises(ValueError, match="for margin; got -1"):
        float8.update(state, state, margin=-1)


@pytest.mark.parametrize("state", [float8.scaling, float8.dot_scaling])
def test_a_float8_state_is_no_parameter(state):
    """In the parameters of `loss_scaled` it would be trained and decayed: `init` refuses it, and
    says where it is and what to write."""
    params = {"w": jnp.ones(3), "fp8": [state()]}
    with pytest.raises(TypeError, match=r"got one in `params\['fp8'\]\[0\]`. Keep them apart"):
        gs.loss_scaled(optax.adamw(0.1)).init(params)


@pytest.mark.parametrize("where", ["in the batch", "closed over", "not differentiated"])
def test_a_state_that_is_never_updated_is_told(where):
    """If weights are differentiated and the state of their product is not, a warning says so."""
    tx, w, x, state = gs.loss_scaled(optax.sgd(0.1)), jnp.ones((4, 4)), jnp.ones((2, 4)), DOT

    def loss(w, x, state=state):
        return float8.dot(x, w, state).sum()

    batch = (x,) if where == "closed over" else (x, state)
    opt_state = tx.init(w)
    step = functools.partial(gs.train_step(loss, tx), w, opt_state)
    if where == "not differentiated":
        step = functools.partial(jax.jit(gs.value_and_grad(loss, opt_state)), w)
    with pytest.warns(UserWarning, match="its factors stay as they are"):
        step(*batch)


def test_a_state_of_a_frozen_product_needs_no_update():
    """Gradients of the inputs alone, and a call without gradients, tell nothing."""
    w, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    jax.grad(lambda x: float8.dot(x, w, DOT).sum())(x)
    float8.dot(x, w, DOT)
