"""Telemetry: what a step tells of itself, and that telling changes nothing."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from small_floats import SMALL

import gainstage as gs
from gainstage.optimizers import SGD, Adam, LossScaleOptimizer, Variable

from programs import update_in_shard_map

SHAPES = [(3,), (40, 30), ()]
OPTIONS = [
    {},
    {"clipnorm": 0.1},
    {"global_clipnorm": 0.1},
    {"gradient_accumulation_steps": 2},
    pytest.param({"clipvalue": 0.1}, marks=pytest.mark.thorough),
    pytest.param({"use_ema": True}, marks=pytest.mark.thorough),
]


def steps_of(rng, scale_of, n=12):
    """Gradients of several steps; every fourth has an inf in one place."""
    for step in range(n):
        true = [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]
        if step % 4 == 2:
            true[step % 2] = true[step % 2] * np.float32(np.inf)
        yield true, [t * np.float32(scale_of()) for t in true]


class Told(NamedTuple):
    """The telemetry of a step, in float64 numpy."""

    finite: bool = True
    scale: float = 0.0
    skipped: int = 0
    applied: int = 0
    norm: float | None = None
    largest: float = 0.0

    def after(self, true, scale):
        """That of the step after it: the largest element is measured around skipped steps, and in
        every 17th; else it is NaN."""
        elements = np.concatenate([np.ravel(t) for t in true])
        finite = bool(np.isfinite(elements).all())
        look = not finite or not self.finite or self.applied % 17 == 0
        norm = np.sqrt(np.square(elements, dtype=np.float64).sum()) if finite else None
        largest = np.abs(elements[np.isfinite(elements)]).max() if look else np.nan
        counts = self.skipped + (not finite), self.applied + finite
        return Told(finite, scale, *counts, norm, largest)


def check(info, told):
    assert (bool(info.finite), float(info.loss_scale)) == (told.finite, told.scale)
    assert (int(info.skipped_steps), int(info.applied_steps)) == (told.skipped, told.applied)
    np.testing.assert_allclose(info.max_abs, told.largest, rtol=1e-6)
    if told.norm is not None:
        np.testing.assert_allclose(info.grad_norm, told.norm, rtol=1e-5)
    else:
        assert not np.isfinite(info.grad_norm)


# Asked for in fairseq2#54 (floor and logs).
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_optimizer_tells_what_the_step_was_like(options, rng):
    """Finiteness, the scale of the step, all skips so far, the norm before clipping."""
    variables = [Variable(np.ones(shape, np.float32)) for shape in SHAPES]
    opt = LossScaleOptimizer(Adam(0.1, **options), 64.0, 2, telemetry=True)
    assert [float(x) for x in gs.diagnostics.telemetry(opt)] == [
        1.0,
        64.0,
        0.0,
        0.0,
        0.0,
        0.0,
        1.0,
        0.0,
    ]
    told = Told()
    for true, grads in steps_of(rng, lambda: opt.loss_scale):
        told = told.after(true, float(opt.loss_scale))
        opt.apply(grads, variables)
        check(gs.diagnostics.telemetry(opt), told)
    assert (told.skipped, told.applied) == (3, 9)


@pytest.mark.parametrize("rule", [None, gs.AdaptiveLossScale()], ids=["dynamic", "adaptive"])
def test_the_largest_element_is_nan_where_it_was_not_measured(rule):
    """It is measured in every 17th healthy step, and in every step with a rule that measures it."""
    w = Variable(np.ones(2, np.float32))
    opt = LossScaleOptimizer(SGD(0.1), loss_scale=rule, telemetry=True)
    found = []
    for step in range(40):
        opt.apply([np.array([step + 1.0, -1.0], np.float32) * float(opt.loss_scale)], [w])
        found.append(float(gs.diagnostics.telemetry(opt).max_abs))
    wanted = [step + 1 if rule or step % 17 == 0 else np.nan for step in range(40)]
    np.testing.assert_array_equal(found, wanted)


def test_the_largest_element_is_measured_around_a_step_that_a_user_skips():
    """In it and in the step after it, although all gradients are finite."""
    w = Variable(np.ones(2, np.float32))
    opt = LossScaleOptimizer(SGD(0.1), 8.0, telemetry=True)
    found = []
    for step in range(6):
        opt.apply([np.full(2, 8.0 * step + 8.0, np.float32)], [w], apply_if=step != 2)
        found.append(float(gs.diagnostics.telemetry(opt).max_abs))
    np.testing.assert_array_equal(found, [1.0, np.nan, 3.0, 4.0, np.nan, np.nan])


@pytest.mark.as_users
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_telling_changes_no_decision_and_no_bit(options, rng):
    """With telemetry and without, weights, slots and scale are the same after every step."""
    made = []
    for telemetry in (False, True):
        variables = [Variable(np.ones(shape, np.float32)) for shape in SHAPES]
        inner = SGD(0.1, momentum=0.9, **options)
        made.append((variables, LossScaleOptimizer(inner, 64.0, 2, telemetry=telemetry)))
    opt = made[0][1]
    for step, (_, grads) in enumerate(steps_of(rng, lambda: opt.loss_scale)):
        if step == 5:  # elements are finite, their norm is not
            grads[1] = np.full(SHAPES[1], 3e38, np.float32)
        values = []
        for variables, mine in made:
            mine.apply(grads, variables)
            state = [*variables, mine.dynamic_scale, *mine.inner_optimizer.variables]
            values.append([v.numpy().tobytes() for v in state])
        assert values[0] == values[1]


@pytest.mark.as_users
def test_an_optax_state_tells_the_same(rng):
    """`with_loss_scale` with telemetry gives, inside of a chain and under jit, what an optimizer
    does, and updates with the bits that it gives without."""
    plain = optax.chain(gs.with_loss_scale(optax.sgd(0.1, 0.9), gs.DynamicLossScale(64.0, 2)))
    tx = optax.chain(
        gs.with_loss_scale(optax.sgd(0.1, 0.9), gs.DynamicLossScale(64.0, 2), telemetry=True)
    )
    params = [jnp.ones(shape) for shape in SHAPES]
    state, other = tx.init(params), plain.init(params)
    update, plainly = jax.jit(tx.update), jax.jit(plain.update)
    told = Told()
    for true, _ in steps_of(rng, lambda: 1.0):
        told = told.after(true, float(gs.transforms.current_scale(state)))
        updates, state = update(true, state, params)
        same, other = plainly(true, other, params)
        check(gs.diagnostics.telemetry(state), told)
        for a, b in zip(updates, same, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# Asked for in pytorch#26512 (waiting).
def test_a_compiled_step_returns_it_and_waits_for_nothing():
    """Out of `gs.optimizers.jit` the numbers of all steps can be read in the end, though it
    donates; nothing is transferred meanwhile."""
    w = Variable(np.ones(3, np.float32))
    opt = LossScaleOptimizer(SGD(0.5), 4.0, telemetry=True)
    opt.build([w])

    def step(grads):
        opt.apply(grads, [w])
        return gs.diagnostics.telemetry(opt)

    program = gs.optimizers.jit(step, ([w], opt.variables), donate=True)
    grads = [[jnp.array([4.0 * n, 0.0, jnp.inf if n == 2 else 0.0])] for n in range(5)]
    program(grads[0])
    with jax.transfer_guard("disallow"):
        infos = [program(g) for g in grads]
    assert [bool(info.finite) for info in infos] == [True, True, False, True, True]
    assert [int(info.skipped_steps) for info in infos] == [0, 0, 1, 1, 1]
    assert [float(i.grad_norm) for i in infos if i.finite] == [0.0, 1.0, 6.0, 8.0]


@pytest.mark.as_users
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_on_a_mesh_the_norm_is_part_of_the_one_sum(kind, rng):
    """On eight devices the norm is that of all parts, by the one all-reduce there is; those for
    causes and the largest element are in branches that are seldom taken."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    layout = NamedSharding(mesh, PartitionSpec("data"))
    true = rng.normal(size=(16, 3)).astype(np.float32)
    w = Variable(jax.device_put(np.ones((16, 3), np.float32), layout))
    opt = LossScaleOptimizer(SGD(0.1), 8.0, telemetry=True)
    opt.build([w])
    program = gs.optimizers.jit(lambda g: opt.apply([g], [w]), ([w], opt.variables))
    grads = jax.device_put(true * 8, layout)
    text = program.lower(grads).compile().as_text()
    text = text[text.index("ENTRY") :]
    assert text.count(" all-reduce(") + text.count(" all-reduce-start(") == 1
    program(grads)
    np.testing.assert_allclose(
        gs.diagnostics.telemetry(opt).grad_norm, np.linalg.norm(true), rtol=1e-5
    )
    np.testing.assert_allclose(gs.diagnostics.telemetry(opt).max_abs, np.abs(true).max())


SIZES = [(3,), (70, 50), (), (2, 2, 2)]


@pytest.mark.filterwarnings("ignore:.* steps in a row were skipped")
# Asked for in apex#192 (which tensor); transformers#11274 (which tensor).
@pytest.mark.parametrize("way", ["optimizer", "optax"])
def test_a_planted_element_is_reported_as_its_tensor(way, rng):
    """100 times an inf, -inf or NaN in a random place: the report names that tensor, kind and
    step, and no other."""
    names = [f"block/{i}" for i in range(len(SIZES))]
    grads = [jnp.ones(size) for size in SIZES]
    if way == "optimizer":
        variables = [Variable(g, name=n) for g, n in zip(grads, names, strict=True)]
        opt = LossScaleOptimizer(SGD(0.1), telemetry=True)

        def after(grads):
            opt.apply(grads, variables)
            return gs.diagnostics.report(opt)

    else:
        params = {"block": {str(i): g for i, g in enumerate(grads)}}
        tx, states = gs.with_loss_scale(optax.sgd(0.1), telemetry=True), []
        states.append(tx.init(params))
        update = jax.jit(tx.update)

        def after(grads):
            tree = {"block": {str(i): g for i, g in enumerate(grads)}}
            states.append(update(tree, states[-1], params)[1])
            return gs.diagnostics.report(states[-1], params)

    wanted = np.array([[0, 0, -1, -1]] * len(SIZES))
    for step in range(100):
        leaf, value = rng.integers(len(SIZES)), rng.choice([np.inf, -np.inf, np.nan])
        bad = np.ones(SIZES[leaf], np.float32)
        bad.reshape(-1)[rng.integers(bad.size)] = value
        report = after([*grads[:leaf], jnp.asarray(bad), *grads[leaf + 1 :]])
        wanted[leaf, 1 if np.isnan(value) else 0] += 1
        wanted[leaf, 2] = step if wanted[leaf, 2] < 0 else wanted[leaf, 2]
        wanted[leaf, 3] = step
        np.testing.assert_array_equal(report.counts, wanted)
        assert (report.names, report.steps, report.skipped) == (tuple(names), step + 1, step + 1)
    assert str(after(grads)).startswith("100 of 101 steps were skipped.")


def test_a_part_without_parameters():
    """Of no gradients at all there is nothing to tell, and no error."""
    tx = gs.with_loss_scale(optax.sgd(0.1), telemetry=True)
    _, state = jax.jit(tx.update)({}, tx.init({}), {})
    assert str(gs.diagnostics.report(state, {})) == "0 of 1 steps were skipped."


# Asked for in DeepSpeed#2911 (inf or NaN).
def test_a_report_in_words():
    """The worst comes first; what never failed is not mentioned; None counts as finite."""
    a, b, c = (Variable(1.0, name=name) for name in "abc")
    opt = LossScaleOptimizer(SGD(0.1), telemetry=True)
    opt.build([a, b, c])
    inf, nan = jnp.float32(jnp.inf), jnp.float32(jnp.nan)
    with pytest.warns(UserWarning, match="No gradient"):
        opt.apply([inf, None, jnp.float32(1)])
    for grads in ([inf, 1.0, 1.0], [nan, nan, 1.0]):
        opt.apply(grads)
    assert str(gs.diagnostics.report(opt)).splitlines() == [
        "3 of 3 steps were skipped.",
        "a: inf in 2 and NaN in 1 of 3 skipped steps, steps 0 to 2",
        "b: NaN in 1 of 3 skipped steps, step 2",
    ]


def test_a_report_of_an_nnx_model_has_the_names_of_the_xray():
    """The tensors of a model of Flax NNX are named by their paths, without a last `value`."""
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    state = gs.with_loss_scale(optax.sgd(0.1), telemetry=True).init(model)
    assert gs.diagnostics.report(state, model).names == ("bias", "kernel")


def test_a_report_says_that_underflow_was_not_measured():
    """Without `underflow_every` the report of applied steps names the option."""
    w = Variable(1.0, name="w")
    opt = LossScaleOptimizer(SGD(0.1), telemetry=True)
    opt.apply([jnp.inf], [w])
    assert "Underflow" not in str(gs.diagnostics.report(opt))
    opt.apply([1.0])
    assert str(gs.diagnostics.report(opt)).splitlines()[-1] == (
        "Underflow was not measured: pass underflow_every=100 beside telemetry=True."
    )


def test_a_gradient_of_none_keeps_its_place():
    """In an optax loop a gradient may be None; the others keep their names."""
    tx = gs.with_loss_scale(optax.sgd(0.1), telemetry=True)
    params = {"a": jnp.ones(2), "b": jnp.ones(2), "nothing": None}
    _, state = tx.update({"a": None, "b": jnp.full(2, jnp.nan), "nothing": None}, tx.init(params))
    assert (
        str(gs.diagnostics.report(state, params)).splitlines()[1]
        == "b: NaN in 1 of 1 skipped step, step 0"
    )


def test_a_report_of_what_is_spread_over_devices():
    """On a mesh, and inside of `shard_map`, an inf in the part of one device is everybody's."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    layout = NamedSharding(mesh, PartitionSpec("data"))
    bad = jax.device_put(jnp.ones((16, 3)).at[9, 1].set(jnp.inf), layout)
    w = Variable(jax.device_put(jnp.ones((16, 3)), layout), name="w")
    opt = LossScaleOptimizer(SGD(0.1), telemetry=True)
    opt.apply([bad], [w])
    assert gs.diagnostics.report(opt).counts.tolist() == [[1, 0, 0, 0]]
    assert gs.diagnostics.telemetry(opt).grad_norm == jnp.inf
    opt.apply([bad * 0])
    assert jnp.isnan(gs.diagnostics.telemetry(opt).grad_norm)

    tx, params = gs.with_loss_scale(optax.sgd(0.1), telemetry=True), {"w": w.value()}
    state = update_in_shard_map(tx, params, {"w": bad})
    assert gs.diagnostics.report(state, params).counts.tolist() == [[1, 0, 0, 0]]


def test_without_it_the_error_says_how():
    """Asked of an optimizer or a state without telemetry: an error that names the option."""
    with pytest.raises(ValueError, match="Expected telemetry=True"):
        gs.diagnostics.telemetry(LossScaleOptimizer(SGD(0.1)))
    with pytest.raises(ValueError, match="Expected telemetry=True"):
        gs.diagnostics.telemetry(gs.with_loss_scale(optax.sgd(0.1)).init(jnp.ones(1)))
    with pytest.raises(TypeError, match="Expected a LossScaleOptimizer or a state"):
        gs.diagnostics.telemetry(SGD(0.1))
    with pytest.raises(TypeError, match="Expected a bool for telemetry"):
        gs.with_loss_scale(optax.sgd(0.1), telemetry=1)


@pytest.mark.parametrize("how", ["update", "train_step"])
@pytest.mark.parametrize("made", [{}, {"telemetry": True}])
def test_a_state_without_the_telemetry_of_its_transformation_is_refused(made, how):
    """A step with telemetry names a state without it, such as a loaded one, and how to go on."""
    option = "underflow_every" if made else "telemetry"
    params = {"w": jnp.ones(2)}
    old = gs.with_loss_scale(optax.adam(0.1), gs.DynamicLossScale(8.0), **made).init(params)
    tx = gs.with_loss_scale(optax.adam(0.1), telemetry=True, underflow_every=5)
    step = gs.train_step(lambda p: SMALL * p["w"].sum(), donate=False)
    state = gs.TrainState.create(params, tx).replace(opt_state=old)
    with pytest.raises(ValueError, match=f"opt_state was made without {option}, which tx has"):
        step(state) if how == "train_step" else tx.update(params, old, params)
    new = tx.init(params)._replace(rule_state=old.rule_state, inner=old.inner)  # as it says
    state, _ = step(state.replace(opt_state=new))
    assert float(state.info.loss_scale) == 8.0


def test_it_is_part_of_the_configuration_and_of_what_is_saved():
    """A copy from the configuration has telemetry, and takes over what was counted."""
    made = []
    for _ in range(2):
        opt = LossScaleOptimizer(SGD(0.1), telemetry=True) if not made else (
            LossScaleOptimizer.from_config(made[0].get_config())
        )  # fmt: skip
        opt.build([Variable(1.0)])
        made.append(opt)
    made[0].apply([jnp.nan])
    made[1].load_state(made[0].state())
    assert int(gs.diagnostics.telemetry(made[1]).skipped_steps) == 1
    assert "telemetry" not in LossScaleOptimizer(SGD(0.1)).get_config()


# Each dtype is told of by default with one of the rules.
DTYPES = {
    "dynamic": ["float16", "float32", "float8_e5m2"],
    "adaptive": ["bfloat16", "float64", "float8_e4m3fn"],
}
RULES = {"dynamic": None, "adaptive": gs.AdaptiveLossScale()}


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        pytest.param(
            RULES[name],
            dtype,
            id=f"{name}-{dtype}",
            marks=[pytest.mark.thorough] * (dtype not in DTYPES[name]),
        )
        for name in RULES
        for dtype in (*DTYPES["dynamic"], *DTYPES["adaptive"])
    ],
)
def test_gradients_of_any_dtype_are_told_of(rule, dtype, rng):
    """Of gradients of every floating dtype, small ones and large ones, of weights of that dtype,
    the largest element and the norm are those of float64 numpy."""
    with jax.enable_x64(dtype == "float64"):
        kind = jnp.dtype(dtype)
        scaled = [jnp.asarray((rng.normal(size=size) * 8).astype(kind)) for size in (5, 8192)]
        weights = [Variable(np.ones(g.shape, kind)) for g in scaled]
        opt = LossScaleOptimizer(SGD(0.0), loss_scale=rule, telemetry=True)
        scale = float(opt.loss_scale)
        opt.apply(scaled, weights)
        info, true = (
            gs.diagnostics.telemetry(opt),
            np.concatenate(scaled).astype(np.float64) / scale,
        )
        assert bool(info.finite)
        np.testing.assert_allclose(info.max_abs, np.abs(true).max(), rtol=1e-6)
        np.testing.assert_allclose(info.grad_norm, np.linalg.norm(true), rtol=1e-5)


@pytest.mark.parametrize("rule", [gs.DynamicLossScale(8.0), gs.AdaptiveLossScale(8.0)])
def test_no_dtype_or_rank_is_promoted_implicitly(rule):
    """With `jax_numpy_dtype_promotion="strict"` and `jax_numpy_rank_promotion="raise"` a step, its
    telemetry and a mean are computed."""
    steps = {"gradient_accumulation_steps": 2}
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        w = Variable(np.ones((2, 3), np.float32))
        opt = LossScaleOptimizer(
            SGD(1.0, **steps), loss_scale=rule, telemetry=True, underflow_every=1
        )
        for value in (8.0, np.inf, 8.0, 8.0):
            opt.apply([jnp.full((2, 3), value, jnp.float16)], [w])
        info = gs.diagnostics.telemetry(opt)
        gs.diagnostics.report(opt)
    assert int(info.skipped_steps) == 1
    assert int(info.applied_steps) == 3


# Asked for in DeepSpeed#1958.
def test_at_the_floor_a_run_goes_on_and_can_be_asked():
    """40 bad steps end no run: the scale stays at its floor, and it is known how many and where."""
    w, b = Variable([1.0, 1.0], name="w"), Variable(1.0, name="b")
    rule = gs.DynamicLossScale(8.0, min_scale=1.0)
    opt = LossScaleOptimizer(SGD(0.5), loss_scale=rule, telemetry=True)
    for _ in range(40):
        opt.apply([[np.inf, 0.0], 0.0], [w, b])
    info = gs.diagnostics.telemetry(opt)
    assert (float(opt.loss_scale), int(info.skipped_steps), bool(info.finite)) == (1.0, 40, False)
    assert (
        str(gs.diagnostics.report(opt)).splitlines()[1]
        == "w: inf in 40 of 40 skipped steps, steps 0 to 39"
    )
    opt.apply([[1.0, 1.0], 1.0], [w, b])
    assert (w.numpy().tolist(), float(b)) == ([0.5, 0.5], 0.5)


@pytest.mark.parametrize(
    ("flag", "rule"),
    [
        ("debug_nans", gs.DynamicLossScale),
        ("debug_infs", gs.AdaptiveLossScale),
        pytest.param("debug_nans", gs.AdaptiveLossScale, marks=pytest.mark.thorough),
        pytest.param("debug_infs", gs.DynamicLossScale, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.filterwarnings("ignore:.*does not get the loss")  # of an adaptive rule
@pytest.mark.parametrize("how", ["train_step", "eager", "no loss", "ours", "ours, uncompiled"])
def test_healthy_steps_pass_under_debug_flags(flag, how, rule):
    """No telemetry and no rule marks anything with a NaN or an inf that JAX would stop at."""

    def loss(w, h):
        return 0.01 * ((w.sum() + h) ** 2).mean()

    with getattr(jax, flag)(True):
        params = [jnp.ones((3, 4)), jnp.ones(4, jnp.float16)]
        if how.startswith("ours"):
            inner = Adam(0.1, jit_compile="un" not in how, global_clipnorm=1.0)
            opt = LossScaleOptimizer(inner, loss_scale=rule(), telemetry=True, underflow_every=2)
            w = [Variable(p) for p in params]
            for _ in range(3):
                opt.minimize(lambda: loss(*(v.value() for v in w)), w)
            state, params = opt, None
        elif how == "train_step":
            options = {"loss_scale": rule(), "telemetry": True, "underflow_every": 2}
            whole = gs.TrainState.create(params, optax.adam(0.1), **options)
            step = gs.train_step(lambda p: loss(*p))
            for _ in range(3):
                whole, _ = step(whole)
            state, params = whole.opt_state, whole.params
        else:
            tx = gs.with_loss_scale(optax.adam(0.1), rule(), telemetry=True, underflow_every=2)
            state = tx.init(params)
            for _ in range(3):
                value, grads = gs.value_and_grad(lambda p: loss(*p), state)(params)
                more = {} if how == "no loss" else {"value": value}
                updates, state = tx.update(grads, state, params, **more)
                params = gs.transforms.apply_updates(params, updates, state)
        info, report = gs.diagnostics.telemetry(state), gs.diagnostics.report(state, params)
    assert (int(info.applied_steps), report.skipped) == (3, 0)
    if flag == "debug_nans":
        assert float(info.max_abs) > 0


def test_a_step_without_a_finite_gradient_has_no_largest_one():
    """`max_abs` is NaN if all gradients are NaN, and the largest finite one if some are."""
    tx = gs.with_loss_scale(optax.sgd(0.1), telemetry=True)
    params = jnp.ones(3)
    state = tx.init(params)
    for grads, expected in (([jnp.nan] * 3, np.nan), ([jnp.nan, 2.0, jnp.inf], 2.0)):
        _, state = tx.update(jnp.array(grads), state, params)
        np.testing.assert_equal(float(gs.diagnostics.telemetry(state).max_abs), expected)
