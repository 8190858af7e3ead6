"""What `torch.amp.GradScaler` promises, held against its documented rule in plain Python."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.optimizers import SGD, LossScaleOptimizer, Variable
from gainstage.transforms import current_scale

RATE, CLIP = 0.125, 0.5
BATCHES, BAD = 6, 2  # the gradient of this batch overflows
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((BATCHES, 8, 3)).astype(np.float32)
T = RANDOM.standard_normal((BATCHES, 8, 2)).astype(np.float32)
START = RANDOM.standard_normal((4, 2)).astype(np.float32)


class Scaler:
    """The rule of the documentation: grow after so many finite steps in a row, back off at once."""

    def __init__(self, scale=2.0**16, growth=2.0, backoff=0.5, interval=2000):
        self.scale, self.growth, self.backoff, self.interval = scale, growth, backoff, interval
        self.good = 0

    def update(self, finite, new_scale=None):
        if new_scale is not None:
            self.scale = new_scale
        elif not finite:
            self.scale, self.good = self.scale * self.backoff, 0
        else:
            self.good += 1
            if self.good == self.interval:
                self.scale, self.good = self.scale * self.growth, 0


def rule(scaler):
    return gs.DynamicLossScale(
        scaler.scale, scaler.interval, scaler.growth, backoff_factor=scaler.backoff
    )


def of_numpy(batch, weights, penalty):
    """The gradient of the mean square error, in float64, by its formula."""
    x, t = np.float64(X[batch]), np.float64(T[batch])
    x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    gradient = 2 / t.size * x.T @ (x @ weights - t)
    if penalty:  # the length of the gradient is added to the loss
        length = np.sqrt((gradient**2).sum())
        gradient = gradient + 2 / t.size * x.T @ x @ gradient / length
    return gradient


def oracle(case, scaler):
    """The weights after a run without any scale, in which the bad step is left out."""
    weights, window = np.float64(START), []
    every = 2 if case == "accumulation" else 1
    for batch in range(BATCHES):
        window.append(of_numpy(batch, weights, case == "penalty") * (2 if case == "losses" else 1))
        if len(window) < every:
            continue
        gradient, finite = sum(window) / every, batch // every != BAD // every
        if case == "clipping":
            gradient = gradient * CLIP / max(np.sqrt((gradient**2).sum()), CLIP)
        if finite:
            weights = weights - RATE * gradient
        scaler.update(finite)
        window = []
    return weights


def loss(params, batch, factor=1.0):
    return (((X[batch] @ params["w"] + params["b"]) - T[batch]) ** 2).mean() * factor


def length(tree):
    return jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(tree)))


def first_params():
    return {"w": jnp.array(START[:3]), "b": jnp.array(START[3])}


def joined(params):
    return np.concatenate([np.asarray(params["w"]), np.asarray(params["b"])[None]])


def in_optax(case, scaler):
    """The run as an optax loop."""
    clip = optax.clip_by_global_norm(CLIP) if case == "clipping" else optax.identity()
    tx = gs.with_loss_scale(optax.chain(clip, optax.sgd(RATE)), loss_scale=rule(scaler))
    params, window, every = first_params(), [], 2 if case == "accumulation" else 1
    state = tx.init(params)
    update = jax.jit(tx.update)
    for batch in range(BATCHES):
        factor = np.float32(np.inf if batch == BAD else 1.0)

        def true_gradients(params, factor=factor, state=state, batch=batch):
            return gs.value_and_grad(loss, state)(params, batch, factor)[1]

        def penalised(params, batch=batch, factor=factor, inner=true_gradients):
            return loss(params, batch, factor) + length(inner(params))

        grads = true_gradients(params)
        if case == "penalty":
            grads = gs.value_and_grad(penalised, state)(params)[1]
        if case == "losses":  # two backward passes with one scale
            grads = jax.tree.map(jnp.add, grads, true_gradients(params))
        window.append(grads)
        if len(window) == every:
            grads = jax.tree.map(lambda *g: sum(g) / len(g), *window)
            updates, state = update(grads, state, params)
            params, window = optax.apply_updates(params, updates), []
    return joined(params), state.rule_state


def in_variables(case, scaler):
    """The run with variables, whose wrapper takes scaled gradients."""
    w, b = Variable(START[:3]), Variable(START[3])
    inner = SGD(RATE, global_clipnorm=CLIP if case == "clipping" else None)
    opt = LossScaleOptimizer(inner, loss_scale=rule(scaler))
    window, every = [], 2 if case == "accumulation" else 1
    for batch in range(BATCHES):
        factor = np.float32(np.inf if batch == BAD else 1.0)
        scale = opt.loss_scale

        def scaled(params, batch=batch, factor=factor):
            return opt.scale_loss(loss(params, batch, factor))

        def penalised(params, batch=batch, factor=factor, scaled=scaled, scale=scale):
            inverse = jax.tree.map(lambda g: g / scale, jax.grad(scaled)(params))
            return opt.scale_loss(loss(params, batch, factor) + length(inverse))

        params = {"w": w.value(), "b": b.value()}
        grads = jax.grad(penalised if case == "penalty" else scaled)(params)
        if case == "losses":
            grads = jax.tree.map(jnp.add, grads, jax.grad(scaled)(params))
        window.append(grads)
        if len(window) == every:
            grads = jax.tree.map(lambda *g: sum(g) / len(g), *window)
            opt.apply([grads["w"], grads["b"]], [w, b])
            window = []
    return joined({"w": w.value(), "b": b.value()}), opt


@pytest.mark.parametrize("run", [in_optax, in_variables])
@pytest.mark.parametrize("case", ["plain", "clipping", "accumulation", "penalty", "losses"])
def test_training(case, run):
    """Weights are those of an unscaled run without the bad step; the scale follows the rule.

    Clipping sees true gradients, a window with an overflow is skipped as a whole, a penalty on the
    gradient differentiates twice, and two losses may share a scale.
    """
    scaler = Scaler(128.0, interval=1)
    weights, found = run(case, scaler)
    expected = oracle(case, scaler)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)
    scale = found.dynamic_scale if run is in_variables else found.scale
    assert float(scale) == scaler.scale == 128.0 * 2.0 ** (1 if case == "accumulation" else 4)


@jax.jit
def scaled_in_a_scan(params, state, window):
    """The mean loss of a window and its gradients, as the page for torch accumulates them."""

    def add(total, microbatch):
        def part(params):
            x, t, factor = microbatch
            predicted = x @ params["w"] + params["b"]
            return ((predicted - t) ** 2).mean() * factor / 2

        loss, grads = gs.value_and_grad(part, state)(params)
        return jax.tree.map(jnp.add, total, grads), loss

    grads, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), window)
    return losses.sum(), grads


def test_accumulation_in_a_scan():
    """A window that is summed in a scan is torch's: an overflow drops it whole, the norm is
    that of all of it, and the schedule and the scale count windows."""
    scaler, rates = Scaler(128.0, interval=1), []
    schedule = optax.piecewise_constant_schedule(RATE, {2: 0.5})
    tx = gs.with_loss_scale(optax.sgd(schedule), rule(scaler), telemetry=True)
    params, skipped = first_params(), BAD // 2
    state, update = tx.init(params), jax.jit(tx.update)
    for first in range(0, BATCHES, 2):
        window = slice(first, first + 2)
        factors = np.float32([np.inf if batch == BAD else 1.0 for batch in (first, first + 1)])
        loss, grads = scaled_in_a_scan(params, state, (X[window], T[window], factors))
        mean = (
            of_numpy(first, joined(params), False) + of_numpy(first + 1, joined(params), False)
        ) / 2
        updates, state = update(grads, state, params)
        params = gs.transforms.apply_updates(params, updates, state)
        rates.append(float(schedule(optax.tree.get(state, "ScaleByScheduleState").count)))
        info = gs.diagnostics.telemetry(state)
        assert bool(info.applied) == bool(np.isfinite(loss)) == (first // 2 != skipped)
        if info.applied:
            assert float(info.grad_norm) == pytest.approx(np.sqrt((mean**2).sum()), rel=1e-5)
    weights = oracle("accumulation", scaler)
    np.testing.assert_allclose(joined(params), weights, rtol=1e-5, atol=1e-6)
    assert float(current_scale(state)) == scaler.scale
    assert rates == [RATE, RATE, RATE / 2]


@pytest.mark.parametrize(
    "options", [{}, {"interval": 1}, {"interval": 3, "growth": 4.0, "backoff": 0.25},
                {"scale": 2.0**100, "interval": 2, "growth": 1.5, "backoff": 0.75}],
)  # fmt: skip
def test_scale_and_count(options):
    """After each of 60 steps scale and count are those of the documented rule."""
    scaler = Scaler(**options)
    ours = rule(scaler)
    update = jax.jit(ours.update)
    state = ours.init()
    for finite in np.random.default_rng(1).random(60) < 0.8:
        state = update(state, finite)
        scaler.update(finite)
        assert float(state.scale) == pytest.approx(scaler.scale, rel=1e-5)  # exact for powers of 2
        assert int(state.good_steps) == scaler.good


def test_gradients_are_unscaled_once():
    """`value_and_grad` returns true gradients, which may be read and clipped before `update`; where
    torch refuses a second `unscale_`, there is no other call that would divide."""
    tx = gs.with_loss_scale(optax.sgd(1.0))
    params = {"w": jnp.float32(3.0)}
    state = tx.init(params)
    value, grads = gs.value_and_grad(lambda p: 2 * p["w"], state)(params)
    assert (float(value), float(grads["w"])) == (6.0, 2.0)
    updates, _ = tx.update(jax.tree.map(lambda g: jnp.clip(g, -0.5, 0.5), grads), state, params)
    assert float(updates["w"]) == -0.5


def test_update_with_a_new_scale():
    """A scale that is set is in force at once; the count of finite steps goes on, as in torch."""
    scaler = Scaler(4.0, interval=3)
    tx, var = gs.with_loss_scale(optax.sgd(1.0), loss_scale=rule(scaler)), Variable(1.0)
    opt = LossScaleOptimizer(SGD(1.0), loss_scale=rule(scaler))
    state, update = tx.init(jnp.float32(1.0)), jax.jit(tx.update)
    for new_scale in (None, 32.0, None, None):
        if new_scale is None:
            opt.apply([1.0], [var])
            _, state = update(jnp.float32(1.0), state)
        else:
            opt.dynamic_scale.assign(new_scale)
            new = state.rule_state._replace(scale=jnp.float32(new_scale))
            state = state._replace(rule_state=new)
        scaler.update(True, new_scale)
        assert float(opt.loss_scale) == float(current_scale(state)) == scaler.scale
        assert int(opt.dynamic_counter) == int(state.rule_state.good_steps) == scaler.good
    assert scaler.scale == 64.0


def test_state_round_trip():
    """Scale and count are in the state, the factors in the configuration: a copy goes on alike."""
    scaler = Scaler(8.0, 4.0, 0.25, 3)
    var = Variable(1.0)
    opt = LossScaleOptimizer(SGD(0.5), loss_scale=rule(scaler))
    opt.build([var])
    early = {name: np.asarray(value) for name, value in opt.state().items()}
    for gradient in (1.0, math.inf, 1.0, 1.0):
        opt.apply([gradient], [var])
    saved = {name: np.asarray(value) for name, value in opt.state().items()}
    copy, other = LossScaleOptimizer.from_config(opt.get_config()), Variable(var.numpy())
    copy.build([other])
    copy.load_state(saved)
    assert (float(copy.loss_scale), int(copy.dynamic_counter)) == (2.0, 2)
    for o, v in ((opt, var), (copy, other)):
        o.apply([1.0], [v])
    assert float(copy.loss_scale) == float(opt.loss_scale) == 8.0
    assert float(other) == float(var)
    copy.load_state(early)  # before the first step there is a state too
    assert (float(copy.loss_scale), int(copy.dynamic_counter)) == (8.0, 0)


def test_disabled():
    """A fixed scale of 1 is what `enabled=False` is, except that it skips what is not finite."""
    weights = []
    for opt in (SGD(0.5), LossScaleOptimizer(SGD(0.5), loss_scale=gs.FixedLossScale(1.0))):
        var = Variable(1.0)
        for gradient in (0.3, 0.7):
            opt.apply([gradient], [var])
        weights.append(float(var))
    assert weights[0] == weights[1]
    assert float(opt.scale_loss(3.0)) == 3.0
    opt.apply([math.inf], [var])
    assert float(var) == weights[1]


def test_several_optimizers():
    """Difference: torch's one scaler skips only the optimizer whose gradients overflow. One
    transformation for all parts skips all; with one for each part the other part goes on."""
    params = {"one": jnp.float32(1.0), "two": jnp.float32(1.0)}
    grads = {"one": jnp.float32(jnp.inf), "two": jnp.float32(1.0)}
    parts = {"one": optax.sgd(0.5), "two": optax.sgd(0.25)}
    both = gs.with_loss_scale(optax.multi_transform(parts, {"one": "one", "two": "two"}))
    updates, state = both.update(grads, both.init(params), params)
    assert jax.tree.map(float, updates) == {"one": 0.0, "two": 0.0}
    assert float(current_scale(state)) == 2.0**14
    for part, update, scale in (("one", 0.0, 2.0**14), ("two", -0.25, 2.0**15)):
        tx = gs.with_loss_scale(parts[part])
        got, state = tx.update(grads[part], tx.init(params[part]), params[part])
        assert (float(got), float(current_scale(state))) == (update, scale)


def test_the_oracle_is_torch():
    """Where torch is installed, its scaler is what the rule above says, weights included."""
    torch = pytest.importorskip("torch", exc_type=ImportError)
    options = {"init_scale": 128.0, "growth_factor": 4.0, "backoff_factor": 0.25}
    theirs = torch.amp.GradScaler("cpu", growth_interval=3, **options)
    ours = Scaler(128.0, 4.0, 0.25, 3)
    weight = torch.ones(2, requires_grad=True)
    sgd, expected = torch.optim.SGD([weight], lr=0.5), np.ones(2)
    for step, finite in enumerate(np.random.default_rng(1).random(60) < 0.8):
        sgd.zero_grad()
        theirs.scale((weight * step).sum() * (1.0 if finite else math.inf)).backward()
        theirs.step(sgd)
        theirs.update(new_scale := 64.0 if step == 30 else None)
        ours.update(finite, new_scale)
        expected = expected - 0.5 * step * finite
        assert theirs.get_scale() == ours.scale
        assert theirs._get_growth_tracker() == ours.good
        assert weight.detach().tolist() == expected.tolist()
    theirs.unscale_(sgd)
    with pytest.raises(RuntimeError, match="already been called"):
        theirs.unscale_(sgd)
