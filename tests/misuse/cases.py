"""The table of misuses: a name, which of the four it is, what is said, and the code.

What is wrong at construction, or with what one call is given, is refused or told there; what the
program of a step shows, `lint` finds. What a Python loop does between two calls is not watched, but
for two things: a run of skipped steps, and an optimizer whose scale nobody asked for.
"""

import re

STEP = """
state, step = gs.TrainState.create(w, {tx}), gs.train_step(plain)
for x in ({batches}):
    state, loss = step(state, x)
"""
# Transformations of which `train_step` and `value_and_grad` see that they could hide an overflow, what
# is said to be there, and what to write in its place.
AROUND = {
    "clip before it": (
        "number 2",
        "optax.chain(...)",
        "optax.chain(optax.clip(1.0), gs.with_loss_scale(sgd))",
    ),
    "clip_by_global_norm before it": (
        "number 2",
        "optax.chain(...)",
        "optax.chain(optax.clip_by_global_norm(1.0), gs.with_loss_scale(sgd))",
    ),
    "zero_nans before it": (
        "number 2",
        "optax.chain(...)",
        "optax.chain(optax.zero_nans(), gs.with_loss_scale(sgd))",
    ),
    "scale_by_sign before it": (
        "number 2",
        "optax.chain(...)",
        "optax.chain(optax.scale_by_sign(), gs.with_loss_scale(sgd))",
    ),
    "centralize before it": (
        "number 2",
        "optax.chain(...)",
        "optax.chain(optax.centralize(), gs.with_loss_scale(sgd))",
    ),
    "a masked clip before it": (
        "number 2",
        "optax.chain(...)",
        "optax.chain(optax.masked(optax.clip(1.0), True), gs.with_loss_scale(sgd))",
    ),
    "two transformations before it": (
        "number 3",
        "optax.chain(...)",
        "optax.chain(optax.identity(), optax.clip(1.0), gs.with_loss_scale(sgd))",
    ),
    "clip before it in a chain in a chain": (
        "number 2",
        "optax.chain(...)",
        "optax.chain(optax.chain(optax.clip(1.0), gs.with_loss_scale(sgd)), optax.scale(1.0))",
    ),
    "clip before it in a named chain": (
        "number 2",
        "optax.chain(...)",
        "optax.named_chain(('clip', optax.clip(1.0)), ('tx', gs.with_loss_scale(sgd)))",
    ),
    "MultiSteps around it": (
        "a MultiStepsState",
        "optax.MultiSteps(tx, k)",
        "optax.MultiSteps(gs.with_loss_scale(sgd), 2)",
    ),
    "apply_if_finite around it": (
        "a ApplyIfFiniteState",
        "tx",
        "optax.apply_if_finite(gs.with_loss_scale(sgd), 3)",
    ),
    "sam around it": (
        "a SAMState",
        "optax.contrib.sam(...)",
        "optax.contrib.sam(gs.with_loss_scale(sgd), sgd)",
    ),
    "mechanize around it": (
        "a MechanicState",
        "optax.contrib.mechanize(tx)",
        "optax.contrib.mechanize(gs.with_loss_scale(sgd))",
    ),
    "schedule_free around it": (
        "a ScheduleFreeState",
        "optax.contrib.schedule_free(tx, learning_rate)",
        "optax.contrib.schedule_free(gs.with_loss_scale(sgd), 0.1)",
    ),
    "conditionally_transform around it": (
        "a ConditionallyTransformState",
        "optax.conditionally_transform(tx, condition)",
        "optax.transforms.conditionally_transform(gs.with_loss_scale(sgd), lambda n: n < 3)",
    ),
    "masked around it": (
        "a MaskedState",
        "optax.masked(tx, mask)",
        "optax.masked(gs.with_loss_scale(sgd), True)",
    ),
    "multi_transform around it": (
        "a PartitionState",
        "optax.multi_transform(...)",
        "optax.multi_transform({'a': gs.with_loss_scale(sgd)}, 'a')",
    ),
    "partition around it": (
        "a PartitionState",
        "optax.multi_transform(...)",
        "optax.partition({'a': gs.with_loss_scale(sgd)}, 'a')",
    ),
    "MultiSteps around a chain of it": (
        "a MultiStepsState",
        "optax.MultiSteps(tx, k)",
        "optax.MultiSteps(optax.chain(gs.with_loss_scale(sgd), optax.scale(1.0)), 2)",
    ),
}
# Rules, and what stands inside or behind `with_loss_scale`: they train, and skip a bad batch.
FINE = {
    "a chain inside": "gs.with_loss_scale(optax.chain(optax.clip(1.0), sgd))",
    "MultiSteps inside": "gs.with_loss_scale(optax.MultiSteps(sgd, 2))",
    "zero_nans inside": "gs.with_loss_scale(optax.chain(optax.zero_nans(), sgd))",
    "schedule_free inside": "gs.with_loss_scale(optax.contrib.schedule_free(sgd, 0.1))",
    "apply_if_finite inside": "gs.with_loss_scale(optax.apply_if_finite(sgd, 3))",
    "weight decay behind": "optax.chain(gs.with_loss_scale(sgd), optax.add_decayed_weights(-0.1))",
    "multi_transform inside": "gs.with_loss_scale(optax.multi_transform({'a': sgd}, 'a'))",
    "inject_hyperparams inside": "gs.with_loss_scale(optax.inject_hyperparams(optax.sgd)(0.1))",
    "inject_hyperparams around": "optax.inject_hyperparams(lambda r: gs.with_loss_scale(optax.sgd(r)))(0.1)",
    "an adaptive rule": "gs.with_loss_scale(sgd, gs.AdaptiveLossScale())",
    "a fixed rule": "gs.with_loss_scale(sgd, gs.FixedLossScale(8.0))",
    "a scale of one": "gs.with_loss_scale(sgd, gs.FixedLossScale(1.0))",
    "no rule": "gs.with_loss_scale(sgd)",
    "telemetry": "gs.with_loss_scale(sgd, telemetry=True, underflow_every=1)",
}
LINE_SEARCH = """
def search(f, tx):
    @jax.jit
    def step(w, s):
        value, g = gs.value_and_grad(lambda w: half(w, X), s)(w)
        updates, s = tx.update(g, s, w, value=value, grad=g, value_fn=f); return gs.transforms.apply_updates(w, updates, s), s
    return step
def run(step, tx): new, state = step(W, tx.init(W)); step(new, state)
"""
MESH = """
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))
whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P('data'))
"""
CASES = {
    f"{name}, in train_step": ("refused", where + ".*" + re.escape(f"Write gainstage.with_loss_scale({line})."),
                               STEP.format(tx=tx, batches="1.0,"))
    for name, (where, line, tx) in AROUND.items()
}  # fmt: skip
CASES |= {
    f"{name}, in value_and_grad": ("refused", where + ".*" + re.escape(f"Write gainstage.with_loss_scale({line})."), f"""
tx = {tx}
gs.value_and_grad(plain, tx.init(w))(w)
""")
    for name, (where, line, tx) in AROUND.items()
}  # fmt: skip
CASES |= {
    f"{name}, a bad batch": ("works", "", STEP.format(tx=tx, batches="1.0, NAN, 1.0, jnp.inf") + """
assert jnp.isfinite(state.params).all() and (state.params < 1.0).all(), state.params
assert jnp.isfinite(state.loss_scale), state
""")
    for name, tx in FINE.items()
}  # fmt: skip
NOT_WRAPPED = (
    r"Expected exactly one state of gainstage.with_loss_scale\(tx\).init\(params\) in opt_state; got 0 in"
    r" .*tuple. Wrap the transformation: tx = gainstage.with_loss_scale\(tx\); for steps without loss scaling"
)
NO_RULE = r'"dynamic", a number, None, or a rule for loss_scale: gainstage.DynamicLossScale\(\), AdaptiveLossScale\(\), FixedLossScale\(scale\) or one of your own; got '
CASES |= {
    "lookahead around it": ("refused", "Write\\s*gainstage.with_loss_scale", """
pair, tx = optax.LookaheadParams.init_synced(w), optax.lookahead(gs.with_loss_scale(sgd), 3, 0.5)
gs.value_and_grad(plain, tx.init(pair))(pair.fast)
"""),
    "lookahead inside": ("works", "", """
pair, tx = optax.LookaheadParams.init_synced(w), gs.with_loss_scale(optax.lookahead(sgd, 3, 0.5))
state = tx.init(pair)
step = jax.jit(lambda p, s, x: tx.update(gs.value_and_grad(plain, s)(p.fast, x)[1], s, p))
for x in (1.0, NAN, 1.0): updates, state = step(pair, state, x); pair = gs.transforms.apply_updates(pair, updates, state)
assert (pair.fast < 1).all() and state.inner.steps_since_sync == 2
"""),
    # ── two scales, or none ──────────────────────────────────────────────────────────────────
    "a scaled loss in train_step": ("refused", "Expected a loss without a loss_scale of its own for train_step, .*got two scales. Pass autocast\\(loss_fn\\) alone.", """
gs.train_step(gs.autocast(plain, loss_scale=2.0**15))
"""),
    "a scaled loss in value_and_grad": ("refused", "Expected a loss without a loss_scale of its own for value_and_grad, .*got two scales. Pass autocast\\(loss_fn\\) alone.", """
gs.value_and_grad(gs.autocast(plain, loss_scale=2.0**15), gs.with_loss_scale(sgd).init(w))
"""),
    "a part of a scaled loss in train_step": ("refused", "own for train_step, .*two scales", """
import functools
gs.train_step(functools.partial(gs.autocast(lambda w, x: plain(w, x), loss_scale=2.0**15), x=1.0))
"""),
    "a part of a scaled loss in value_and_grad": ("refused", "own for value_and_grad, .*two scales", """
import functools
loss = functools.partial(gs.autocast(lambda w, x: plain(w, x), loss_scale=2.0**15), x=1.0)
gs.value_and_grad(loss, gs.with_loss_scale(sgd).init(w))
"""),
    "with_loss_scale in with_loss_scale": ("refused", "a scale within a scale", """
gs.with_loss_scale(gs.with_loss_scale(sgd)).init(w)
"""),
    "two scaled groups": ("refused", "got 2 in an .* PartitionState. One loss has one scale: with_loss_scale\\(optax.multi_transform\\(...\\)\\).", """
tx = optax.multi_transform({'a': gs.with_loss_scale(sgd), 'b': gs.with_loss_scale(sgd)}, {'x': 'a', 'y': 'b'})
gs.transforms.current_scale(tx.init({'x': w, 'y': w}))
"""),
    "no with_loss_scale at all": ("refused", NOT_WRAPPED, """
gs.train_step(plain)(gs.TrainState.create(w, sgd).replace(opt_state=sgd.init(w)))
"""),
    "no with_loss_scale at all, in value_and_grad": ("refused", NOT_WRAPPED, """
gs.value_and_grad(plain, sgd.init(w))
"""),
    "a wrapper around optax's own": ("works", "", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.from_optax(optax.sgd(0.1)))
opt.minimize(lambda: v * v, [v]); assert float(v) < 1
"""),
    "jax's gradients in a compiled step": ("warns", "No loss was multiplied", """
tx = gs.with_loss_scale(sgd); state = tx.init(w)
step = jax.jit(lambda w, state: tx.update(jax.grad(plain)(w), state, w))
for _ in range(3): _, state = step(w, state)
"""),
    "scale_loss inside of value_and_grad, for a penalty and for a log": ("works", "", """
tx = gs.with_loss_scale(sgd); state = tx.init(w)
def penalty(w):
    return plain(jax.grad(lambda x: gs.transforms.scale_loss(plain(w * x), state))(w) / gs.transforms.current_scale(state))
gs.value_and_grad(penalty, state)(w)
gs.value_and_grad(lambda w: (plain(w), {"scaled": gs.transforms.scale_loss(plain(w), state)}), state, has_aux=True)(w)
gs.value_and_grad(lambda w: gs.transforms.scale_loss(plain(w), state) / gs.transforms.current_scale(state), state)(w)
"""),
    "scales by hand that are right": ("works", "", """
tx = gs.with_loss_scale(sgd, gs.FixedLossScale(8.0)); state = tx.init(w)
step = jax.jit(lambda w, s: tx.update(jax.grad(lambda w: 8.0 * plain(w))(w), s, w, loss_scale=8.0)[1])
for _ in range(3): state = step(w, state)
tx = gs.with_loss_scale(sgd); state = tx.init(w)
for _ in range(3):
    scale = float(gs.transforms.current_scale(state))
    state = tx.update(jax.grad(lambda w: scale * plain(w))(w), state, w, loss_scale=scale)[1]
step = jax.jit(lambda w, s, scale: tx.update(jax.grad(lambda w: scale * plain(w))(w), s, w, loss_scale=scale)[1])
for _ in range(3): state = step(w, state, gs.transforms.current_scale(state))
"""),
    "true gradients in bfloat16, scaled ones in float16": ("works", "", """
tx = gs.with_loss_scale(sgd); state = tx.init(w)
step = jax.jit(lambda w, s: tx.update(gs.value_and_grad(plain, s)(w)[1].astype("bfloat16"), s, w)[1])
for _ in range(3): state = step(w, state)
grad = lambda w, s: jax.grad(lambda w: gs.transforms.scale_loss(plain(w), s))(w).astype("float16")
step = jax.jit(lambda w, s: tx.update(grad(w, s), s, w, loss_scale=gs.transforms.current_scale(s))[1])
for _ in range(3): state = step(w, state)
"""),
    "clamp of gradients": ("lints", "jax.lax.clamp", """
tx = gs.with_loss_scale(sgd); state = tx.init(w)
step = jax.jit(lambda w, s: tx.update(jax.lax.clamp(-1.0, gs.value_and_grad(plain, s)(w)[1], 1.0), s, w)[1])
for _ in range(3): state = step(w, state)
"""),
    "what may be done to true gradients": ("works", "", """
tx = gs.with_loss_scale(sgd); state = tx.init(w)
def clipped(g, norm): return jnp.where(jnp.isfinite(norm), g / jnp.maximum(norm, 1.0), g)
def masked(g, norm): return jnp.where(jnp.arange(3) < 2, g, 0.0)
def shared(g, norm): return (g + 0.1) / 4.0
for f in (clipped, masked, shared):
    step = jax.jit(lambda w, s: tx.update((lambda g: f(g, optax.tree.norm(g)))(gs.value_and_grad(plain, s)(w)[1]), s, w)[1])
    for _ in range(3): state = step(w, state)
def own(w, s):
    g = gs.value_and_grad(plain, s)(w)[1]
    return tx.update(jnp.clip(g, -1.0, 1.0), s, w, apply_if=jnp.isfinite(g).all())[1]
for _ in range(3): state = jax.jit(own)(w, state)
"""),
    "clipped weights whose true gradients come out of a scan": ("works", "", """
tx = gs.with_loss_scale(sgd); state = tx.init(w)
def step(w, s):
    w = jnp.clip(w, -1.0, 1.0)
    grad = gs.value_and_grad(lambda w, x: x * plain(w), s)
    summed = jax.lax.scan(lambda total, x: (total + grad(w, x)[1], None), 0.0 * w, jnp.ones(2))[0]
    return tx.update(summed, s, w)[1]
for _ in range(3): state = jax.jit(step)(w, state)
"""),
    "nan_to_num of a loss, and of NaN alone": ("works", "", """
tx, loss = gs.with_loss_scale(sgd), lambda w: jnp.nan_to_num(plain(w)); state = tx.init(w)
keeps = lambda g: jnp.nan_to_num(g, posinf=jnp.inf, neginf=-jnp.inf)
step = jax.jit(lambda w, s: tx.update(keeps(gs.value_and_grad(loss, s)(w)[1]), s, w)[1])
for _ in range(3): state = step(w, state)
"""),
    "SAM with a scaled grad_fn": ("works", "", """
tx = gs.with_loss_scale(optax.contrib.sam(sgd, sgd, opaque_mode=True)); state = tx.init(w)
ways = [lambda state: lambda w, _: gs.value_and_grad(plain, state)(w)[1],
        lambda state: jax.grad(lambda w, _: gs.autocast(plain, loss_scale=2.0**15)(w)),
        lambda state: jax.jit(jax.grad(gs.autocast(lambda w, _: plain(w), loss_scale=2.0**15)))]
for way in ways:
    def step(w, state):
        grads = gs.value_and_grad(plain, state)(w)[1]
        return tx.update(grads, state, w, grad_fn=way(state))[1]
    state = jax.jit(step)(w, state)
"""),
    "by hand": ("works", "", """
tx = gs.with_loss_scale(sgd); state = tx.init(w)
grads = jax.grad(lambda w: gs.transforms.scale_loss(plain(w), state))(w)
updates, new = tx.update(grads, state, w, loss_scale=gs.transforms.current_scale(state))
assert abs(updates + 0.2).max() < 1e-6
"""),
    "a scaled loss, and no rule": ("works", "", """
tx = gs.with_loss_scale(sgd); state, loss = tx.init(w), gs.autocast(plain, loss_scale=2.0**15)
tx.update(jax.jit(jax.grad(loss))(w), state, w)
"""),
    "a tuple of NNX models": ("refused", "nnx.List", """
gs.with_loss_scale(sgd).init((nnx.Linear(4, 1, rngs=nnx.Rngs(0)), nnx.BatchNorm(1, rngs=nnx.Rngs(0))))
"""),
    "a dict of NNX models": ("refused", "nnx.Dict", """
gs.with_loss_scale(sgd).init({"a": nnx.Linear(4, 1, rngs=nnx.Rngs(0))})
"""),
    "a list of NNX models that is a model": ("works", "", """
m = nnx.List([nnx.Linear(16, 16, rngs=nnx.Rngs(0)), nnx.BatchNorm(16, rngs=nnx.Rngs(0))])
step = gs.train_step(gs.autocast(lambda m, x: jnp.mean(m[1](m[0](x)))))
state, _ = step(gs.TrainState.create(m, sgd), jnp.ones((16, 16)))
assert float(jnp.abs(state.params[1].mean[...]).max()) > 0
"""),
    "a BatchNorm that a loss closes over": ("refused", "Pass that object as an argument", """
norm, m = nnx.BatchNorm(4, rngs=nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(0))
gs.train_step(lambda m, x: jnp.mean(norm(m(x))))(gs.TrainState.create(m, sgd), X)
"""),
    "the same under autocast": ("refused", "Pass that object as an argument", """
norm, m = nnx.BatchNorm(4, rngs=nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(0))
nnx.grad(gs.autocast(lambda m, x: jnp.mean(norm(m(x)))))(m, X)
"""),
    "train_step inside of pmap": ("warns", "sharded over a mesh", """
state = jax.tree.map(lambda x: jnp.stack([x] * 2), gs.TrainState.create(w, sgd))
jax.pmap(gs.train_step(plain))(state, jnp.ones(2))
"""),
    "apply without scale_loss": ("warns", "no loss was multiplied by it: use `minimize`", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD())
for _ in range(3): opt.apply([1.0], [v])
"""),
    "true gradients after minimize": ("warns", "no loss was multiplied", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.1))
opt.minimize(lambda: v * v, [v])
for _ in range(3): opt.apply([jax.grad(lambda v: v * v)(v.value())], [v])
"""),
    "true gradients after a loss that raised": ("warns", "no loss was multiplied", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.1))
def fails(): opt.scale_loss(v * v); raise KeyError("x")
try: opt.minimize(fails, [v])
except KeyError: pass
for _ in range(3): opt.apply([jnp.ones(())], [v])
"""),
    "one variable, and variables by name": ("works", "", """
v = gs.optimizers.Variable(jnp.ones(3)); opt = gs.optimizers.SGD(0.5)
opt.apply([jnp.ones(3)], v); opt.apply([jnp.ones(3)], {"v": v}); assert v.numpy().tolist() == [0, 0, 0]
"""),
    "an iterator of variables in a compiled step": ("works", "", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.SGD(0.1); opt.build([v])
step = gs.optimizers.jit(lambda g: opt.apply([g], (x for x in [v])), [v, *opt.variables])
step(1.0); assert abs(float(v) - 0.9) < 1e-6
"""),
    "true gradients, and a first scale of 1": ("warns", "no loss was multiplied", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(), initial_scale=1.0)
for _ in range(3): opt.apply([jnp.ones(())], [v])
"""),
    "true gradients, and a fixed scale of 1": ("works", "", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(), loss_scale=gs.FixedLossScale(1.0))
for _ in range(3): opt.apply([jnp.ones(())], [v])
opt.minimize(lambda: opt.scale_loss(v * v), [v])
"""),
    "gradients times the scale": ("works", "", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.25), initial_scale=2.0**10)
for _ in range(2): opt.apply([jnp.ones(()) * opt.loss_scale], [v])
assert float(v) == 0.5
"""),
    "gradients times a fixed scale that is read once": ("works", "", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.25), loss_scale=gs.FixedLossScale(8.0))
scale = opt.loss_scale
for _ in range(3): opt.apply([jnp.ones(()) * scale], [v])
assert float(v) == 0.25
"""),
    "compute_gradients and apply_gradients": ("works", "", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.25))
for _ in range(2): opt.apply_gradients([(2 * g, v) for g, v in opt.compute_gradients(lambda: v * 1.0, [v])])
assert float(v) == 0
"""),
    "minimize of a scaled loss": ("lints", "leave scale_loss", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.1))
opt.build([v]); args = (); step = lambda: opt.minimize(lambda: opt.scale_loss(v * v), [v])
"""),
    "minimize of a scaled loss with aux": ("lints", "leave scale_loss", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.1))
opt.build([v]); args = (); step = lambda: opt.minimize(lambda: (opt.scale_loss(v * v), 1.0), [v], has_aux=True)
"""),
    "minimize of a scaled loss in gs.optimizers.jit": ("lints", "leave scale_loss", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.1)); opt.build([v])
args = (); step = gs.optimizers.jit(lambda: opt.minimize(lambda: opt.scale_loss(v * v), [v]), ([v], opt.variables))
"""),
    "minimize of scaled losses that are summed": ("lints", "leave scale_loss", """
v = gs.optimizers.Variable(w); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.1))
opt.build([v]); args = (); step = lambda: opt.minimize(lambda: opt.scale_loss(v.value() ** 2).sum(), [v])
"""),
    "minimize of scaled losses that are summed in gs.optimizers.jit": ("lints", "leave scale_loss", """
v = gs.optimizers.Variable(w); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.1)); opt.build([v])
args = (); step = gs.optimizers.jit(lambda: opt.minimize(lambda: opt.scale_loss(v.value() ** 2).sum(), [v]), ([v], opt.variables))
"""),
    "minimize of a true loss, with a scaled one beside it": ("works", "", """
v = gs.optimizers.Variable(w); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.1)); opt.build([v])
def loss():
    true = plain(v.value()); scaled = opt.scale_loss(true); return true, {"scaled": 2 * scaled}
def divided(): scaled = opt.scale_loss(v.value() ** 2); return scaled.sum() / opt.loss_scale
opt.minimize(loss, [v], has_aux=True); opt.minimize(divided, [v])
gs.optimizers.jit(lambda: opt.minimize(loss, [v], has_aux=True), ([v], opt.variables))()
"""),
    "compute_gradients of a scaled loss": ("lints", "leave scale_loss", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.1))
opt.build([v]); args = (); step = lambda: opt.apply_gradients(opt.compute_gradients(lambda: opt.scale_loss(v * v), [v])) is None
"""),
    "minimize of a scaled loss in tf2": ("lints", "get_scaled_loss, out of their loss", """
from gainstage.compat import tf2
v = gs.optimizers.Variable(1.0); opt = tf2.LossScaleOptimizer(gs.optimizers.SGD(0.1))
opt.build([v]); args = (); step = lambda: opt.minimize(lambda: opt.get_scaled_loss(v * v), [v])
"""),
    "minimize of a scaled callable in tf2": ("lints", "get_scaled_loss, out of their loss", """
from gainstage.compat import tf2
v = gs.optimizers.Variable(1.0); opt = tf2.LossScaleOptimizer(gs.optimizers.SGD(0.1))
opt.build([v]); args = (); step = lambda: opt.minimize(opt.get_scaled_loss(lambda: v * v), [v], grad_loss=2.0)
"""),
    "gradients that tf2 divided, divided again": ("lints", "and no other division", """
from gainstage.compat import tf2
v = gs.optimizers.Variable(1.0); opt = tf2.LossScaleOptimizer(gs.optimizers.SGD(0.1))
opt.build([v]); args = (); step = lambda: opt.apply_gradients(zip(opt.get_unscaled_gradients([g for g, _ in opt.compute_gradients(lambda: v * v, [v])]), [v])) is None
"""),
    "gradients that nothing divided, after minimize in tf2": ("warns", "get_unscaled_gradients to be called", """
from gainstage.compat import tf2
v = gs.optimizers.Variable(1.0); opt = tf2.LossScaleOptimizer(gs.optimizers.SGD(0.1)); opt.minimize(lambda: v * v, [v])
for _ in range(3): opt.apply_gradients([(jax.grad(lambda v: opt.get_scaled_loss(v * v))(v.value()), v)])
"""),
    "all ways to scale in tf2": ("works", "", """
from gainstage.compat import tf2
v = gs.optimizers.Variable(1.0); opt = tf2.LossScaleOptimizer(gs.optimizers.SGD(0.125)); grad = jax.grad(lambda v: opt.get_scaled_loss(v * v))
for _ in range(2): opt.minimize(lambda: v * 1.0, [v]); opt.minimize(lambda: v * 1.0, [v], grad_loss=1.0)
for _ in range(2): opt.apply_gradients([(g * 1, v) for g, v in opt.compute_gradients(lambda: v * 1.0, [v])])
for _ in range(2): opt.apply_gradients(zip(opt.get_unscaled_gradients([grad(v.value())]), [v]))
assert float(v) == 0.25 * 0.75**2
"""),
    "a scale of an optimizer in jax.jit": ("refused", "scaled = gainstage.optimizers.functionalize", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD()); opt.build([v])
jax.jit(jax.grad(lambda v: opt.scale_loss(v * v)))(1.0)
"""),
    "a scale of the state of stateless_apply": ("works", "", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.25)); opt.build([v])
scaled = gs.optimizers.functionalize(opt.scale_loss, opt.variables)
grad = lambda state, w: jax.grad(lambda w: scaled(state, w[0])[0])(w)
step = jax.jit(lambda state, w: opt.stateless_apply(state, grad(state, w), w))
w, state = [v.value()], [x.value() for x in opt.variables]
for i in range(3): w, state = step(state, w); print(opt.loss_scale)
assert w[0] == 0.25
"""),
    "a state of stateless_apply that is assigned": ("works", "", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD()); opt.build([v])
for _ in range(30):
    grads = [jnp.ones(()) * opt.loss_scale]
    (w,), state = opt.stateless_apply([x.value() for x in opt.variables], grads, [v.value()])
    for x, new in zip([v, *opt.variables], [w, *state]): x.assign(new)
"""),
    "the scale of a Keras optimizer between and after fits": ("works", "", """
import keras; from gainstage.interop.keras import LossScaleOptimizer
model = keras.Sequential([keras.layers.Dense(1)]); model.build((None, 4))
model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.01)), "mse")
for n in range(3): model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0); [float(model.optimizer.loss_scale) for _ in range(12)]
"""),
    "float16 times a scale": ("works", "", """
tx = gs.with_loss_scale(sgd); state = tx.init(w)
assert jnp.isfinite(gs.transforms.scale_loss(jnp.float16(1000.0), state))
"""),
    "a state that was cast to half precision": ("refused", "got bfloat16.*inner=jax", """
state = gs.TrainState.create(w, optax.adam(0.1))
gs.train_step(plain)(jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))
"""),
    "a state of which the numbers were cast to float16": ("refused", "got float16.*inner=jax", """
tx = gs.with_loss_scale(optax.adam(0.1))
state = jax.tree.map(lambda x: x.astype("float16") if x.dtype == "float32" else x, tx.init(w))
tx.update(gs.value_and_grad(plain, state)(w)[1], state, w)
"""),
    "an inner state in half precision": ("works", "", """
tx = gs.with_loss_scale(optax.sgd(0.1, 0.9, accumulator_dtype=jnp.bfloat16)); state = tx.init(w)
state = state._replace(inner=jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, state.inner))
tx.update(gs.value_and_grad(plain, state)(w)[1], state, w)
"""),
    "a line search in float16 without a scale": ("works", "", LINE_SEARCH + """
tx = gs.with_loss_scale(optax.lbfgs()); run(search(lambda w: half(w, X), tx), tx)
"""),
    "a line search that scales, is in float32, or differentiates nothing": ("works", "", LINE_SEARCH + """
tx = gs.with_loss_scale(optax.lbfgs()); run(search(lambda w: gs.autocast(half, loss_scale=2.0**15)(w, X), tx), tx)
for f in (gs.autocast(lambda w: half(w, X), loss_scale=2.0**15), jax.jit(lambda w: gs.autocast(half, loss_scale=2.0**15)(w, X)), lambda w: jnp.mean((X @ w) ** 2),
          gs.autocast(lambda w: jnp.mean((X @ w) ** 2), "bfloat16")): search(f, tx).trace(W, tx.init(W))
tx = gs.with_loss_scale(optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)))
run(search(lambda w: half(w, X), tx), tx)
"""),
    # ── old and foreign states ───────────────────────────────────────────────────────────────
    "value_and_grad once before the loop": ("lints", "scale of another state", """
tx = gs.with_loss_scale(sgd, gs.DynamicLossScale(2.0**20)); first = tx.init(w)
grad_fn = gs.value_and_grad(plain, first)
step, args = lambda w, s: tx.update(grad_fn(w)[1], s, w), (w, first)
"""),
    "a step that closes over the first state": ("lints", "scale of another state", """
tx = gs.with_loss_scale(sgd); first = tx.init(w); args = w, first
step = jax.jit(lambda w, state: tx.update(gs.value_and_grad(plain, first)(w)[1], state, w))
"""),
    "apply_updates with the old state": ("lints", "tells of the step before", """
tx = gs.with_loss_scale(sgd); args = w, tx.init(w)
def step(w, state):
    updates, new = tx.update(gs.value_and_grad(plain, state)(w)[1], state, w)
    return gs.transforms.apply_updates(w, updates, state), new
"""),
    "select_if_applied with the old state": ("lints", "tells of the step before", """
tx = gs.with_loss_scale(sgd); args = w, tx.init(w)
def step(w, state):
    updates, new = tx.update(gs.value_and_grad(plain, state)(w, NAN)[1], state, w)
    return gs.transforms.select_if_applied(w * NAN, w, state)
"""),
    "a decision by the old state": ("lints", "tells of the step before", """
tx = gs.with_loss_scale(sgd); args = w, tx.init(w)
def step(w, state):
    updates, new = tx.update(gs.value_and_grad(plain, state)(w)[1], state, w)
    return gs.transforms.apply_updates(w, updates, new), new, gs.transforms.step_was_applied(state)
"""),
    "the inner state": ("refused", "tx.init", """
tx = gs.with_loss_scale(sgd); tx.update(w, tx.init(w).inner, w)
"""),
    "the state of another rule": ("refused", "The rule of tx", """
tx, other = gs.with_loss_scale(sgd), gs.with_loss_scale(sgd, gs.AdaptiveLossScale())
tx.update(w, other.init(w), w)
"""),
    "a number as the state of the rule": ("refused", "_replace\\(scale=jnp.float32\\(scale\\)", """
state = gs.TrainState.create(w, sgd)
gs.train_step(plain)(state.replace(opt_state=state.opt_state._replace(rule_state=1024.0)))
"""),
    "a number as the state of the rule, in update": ("refused", "got a float. For another scale", """
tx = gs.with_loss_scale(sgd); tx.update(w, tx.init(w)._replace(rule_state=1024.0), w)
"""),
    "a dictionary of torch as the state of the rule": ("refused", "importers.from_torch", """
tx = gs.with_loss_scale(sgd); state = tx.init(w)._replace(rule_state={'scale': 1024.0})
gs.value_and_grad(plain, state)(w)
"""),
    "load_into of a state of with_loss_scale": ("refused", "optax.tree.set\\(opt_state, rule_state=state", """
from gainstage.interop import importers
tx = gs.with_loss_scale(sgd); importers.load_into(tx.init(w), gs.DynamicLossScale().init())
"""),
    "a transformation for the loss": ("refused", "a function for loss_fn; got GradientTransformation", """
gs.train_step(gs.with_loss_scale(sgd))
"""),
    "the transformation before the parameters": ("refused", "GradientTransformation for tx", """
gs.TrainState.create(sgd, w)
"""),
    "a batch that is one tuple": ("refused", "Unpack a batch that is a tuple: step", """
gs.train_step(lambda w, x, y: plain(w, x, y))(gs.TrainState.create(w, sgd), (1.0, 2.0))
"""),
    "a batch that is one dict": ("refused", "Take a batch that is a dict as one argument", """
gs.train_step(lambda w, x, y: plain(w, x, y))(gs.TrainState.create(w, sgd), {"x": 1.0, "y": 2.0})
"""),
    "an optimizer for the step": ("refused", "train_step: too many.*TrainState.create.params, tx", """
gs.train_step(plain, sgd)
"""),
    "a rule without its name": ("refused", "create: too many.*by name extra=.*loss_scale=", """
gs.TrainState.create(w, sgd, gs.DynamicLossScale())
"""),
    "a rule by its old name": ("refused", "create: .*rule.*loss_scale=gainstage.Dynamic", """
gs.TrainState.create(w, sgd, rule=gs.DynamicLossScale(8.0))
"""),
    "a loss scale for a new state": ("works", "", """
assert gs.TrainState.create(w, sgd, loss_scale=8.0).loss_scale == 8.0
"""),
    "a field that no state has": ("refused", "fields of a state: params.*; got scale", """
gs.TrainState.create(w, sgd).replace(scale=8.0)
"""),
    "a state of optax for the optimizer": ("refused", "pass tx itself", """
gs.TrainState.create(w, optax.adam(0.1).init(w))
"""),
    "a loss that is differentiated": ("refused", "not jax.value_and_grad of it", """
gs.train_step(jax.value_and_grad(plain))(gs.TrainState.create(w, sgd))
"""),
    "alarms of a state": ("refused", "Expected the rule of the loss scale.*Alarms.gainstage.Dyn", """
gs.diagnostics.Alarms(gs.TrainState.create(w, sgd))
"""),
    "aux beside an extra without has_aux": ("refused", r"\(loss, extra\).*needs has_aux=True", """
step = gs.train_step(lambda w, extra, x: (plain(w, x), extra, x))
step(gs.TrainState.create(w, sgd, extra=jnp.ones(2)), 1.0)
"""),
    "the class of a model": ("refused", "got the class Linear. Make an object of it", """
gs.TrainState.create(nnx.Linear, sgd)
"""),
    "two models of Equinox in a tuple": ("refused", "equinox.Module with a field for each", """
import equinox as eqx
two = tuple(eqx.nn.MLP(4, 1, 8, 1, key=key) for key in jax.random.split(jax.random.key(0)))
gs.TrainState.create(two, sgd)
"""),
    "a State of Equinox beside its model": ("refused", "TrainState.create.model, tx, extra=state", """
import equinox as eqx
gs.TrainState.create(eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch"), sgd)
"""),
    "an optimizer of Keras for a train state": ("refused", "gainstage.interop.keras.compile", """
import keras
gs.TrainState.create(w, keras.optimizers.SGD(0.1))
"""),
    "a Keras model for a train state": ("refused", "gainstage.interop.keras.compile", """
import keras
gs.TrainState.create(keras.Sequential([keras.layers.Dense(1)]), sgd)
"""),
    "an optimizer of optax for Keras": ("refused", "Expected an optimizer of Keras.*Write keras.opt", """
import keras
import gainstage.interop.keras
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
gainstage.interop.keras.compile(model, sgd, "mse")
"""),
    "an X-ray with the state first": ("refused", "Expected the loss first; got a TrainState. Write gainstage.xray.loss_fn, state", """
gs.xray(gs.TrainState.create(W, sgd), half, X)
"""),
    "a train state that a compiled step closes over": ("lints", "is a constant of the compiled function", """
state = gs.TrainState.create(w, sgd); args = (1.0,)
@jax.jit
def step(x):
    loss, extra, grads = state.value_and_grad(lambda w, x: plain(w, x))(x)
    return state.apply_gradients(grads, extra)
"""),
    "an accuracy as the loss": ("refused", "a loss of a floating dtype; got int32", """
gs.train_step(lambda w, x: (w * x > 0).sum())(gs.TrainState.create(w, sgd), 1.0)
"""),
    "a bool as the loss of a step of one's own": ("refused", "a loss of a floating dtype; got bool", """
gs.TrainState.create(w, sgd).value_and_grad(lambda w, x: (w * x > 0).any())(1.0)
"""),
    "a count as the loss of an optax loop": ("refused", "a loss of a floating dtype; got int32", """
tx = gs.with_loss_scale(sgd); gs.value_and_grad(lambda w: (w > 0).sum(), tx.init(w))(w)
"""),
    "an extra of integers that gets a fraction": ("refused", "Expected int32 for `extra`.*got float32.*extra=0.0", """
gs.train_step(lambda w, n, x: (plain(w, x), n + 0.5))(gs.TrainState.create(w, sgd, extra=0), 1.0)
"""),
    "an extra that counts": ("works", "", """
gs.train_step(lambda w, n, x: (plain(w, x), n + 1))(gs.TrainState.create(w, sgd, extra=0, loss_scale=gs.FixedLossScale(1.0)), 1.0)
"""),
    "no extra from a loss of a state that has one": ("refused", "got None for the extra", """
gs.train_step(lambda w, n, x: (plain(w, x), None))(gs.TrainState.create(w, sgd, extra=0.0), 1.0)
"""),
    "an extra without one of its arrays": ("refused", "got none at `extra\\['b'\\]`", """
state = gs.TrainState.create(w, sgd, extra={"a": 0.0, "b": 1.0})
gs.train_step(lambda w, e, x: (plain(w, x), {"a": e["a"], "b": None}))(state, 1.0)
"""),
    "an old train state after a step that donates": ("refused", "`state.params` was donated .*donate=False", """
old, step = gs.TrainState.create(w, sgd), gs.train_step(lambda w, x: plain(w, x))
new, loss = step(old, 1.0); step(old, 1.0)
"""),
    "a batch by name": ("refused", "step\\(state, x\\)", """
gs.train_step(lambda w, x: plain(w, x))(gs.TrainState.create(w, sgd), x=1.0)
"""),
    "a key among the parameters": ("refused", "floating parameters; got key<fry> for `params\\['k'\\]`", """
gs.TrainState.create({"w": jnp.ones(3), "k": jax.random.key(0)}, optax.sgd(0.1))
"""),
    "shapes in the place of parameters": ("refused", "ShapeDtypeStruct for `params\\['w'\\]`. For the shapes", """
gs.TrainState.create({"w": jax.ShapeDtypeStruct((3,), "float32")}, optax.sgd(0.1))
"""),
    "shapes in the place of a batch": ("refused", "ShapeDtypeStruct for `batch\\[0\\]`. A step computes", """
state = gs.TrainState.create(jnp.ones(3), optax.sgd(0.1))
gs.train_step(lambda w, x: (w * x).sum())(state, jax.ShapeDtypeStruct((3,), "float32"))
"""),
    "an integer that no int32 holds": ("refused", "got 1099511627776 for `batch\\[0\\]`. Pass a float", """
state = gs.TrainState.create(jnp.ones(3), optax.sgd(0.1))
gs.train_step(lambda w, n: (w * n).sum())(state, 2**40)
"""),
    "an extra that becomes a tuple": ("refused", "in the structure of state.extra, PyTreeDef", """
state = gs.TrainState.create(jnp.ones(3), optax.sgd(0.1), extra=[jnp.ones(2)])
gs.train_step(lambda w, extra, x: ((w * x).sum(), tuple(extra)))(state, 1.0)
"""),
    "integers among the parameters": ("refused", "floating parameters; got int32 for `state.params\\['n'\\]`", """
state = gs.TrainState.create({'w': w, 'n': jnp.arange(3)}, sgd)
gs.train_step(lambda p: plain(p['w']))(state)
"""),
    "the state of other parameters": ("refused", "other parameters", """
tx = gs.with_loss_scale(optax.adam(0.1))
tx.update({'w': w}, tx.init({'v': w}), {'w': w})
"""),
    "no parameters for init": ("refused", "arrays in params", """
gs.with_loss_scale(sgd).init({'w': w, 'activation': jax.nn.relu})
"""),
    # ── rules ────────────────────────────────────────────────────────────────────────────────
    "a live scale as a rule": ("refused", "loss_scale=scale.rule", """
from gainstage.compat import experimental
gs.with_loss_scale(sgd, experimental.DynamicLossScale())
"""),
    "a name of no loss scale": ("refused", NO_RULE + "'fixed'", """
gs.with_loss_scale(sgd, "fixed")
"""),
    "a name of no loss scale, for an optimizer": ("refused", NO_RULE + "'adaptive'", """
gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(), loss_scale="adaptive")
"""),
    "a list for a loss scale": ("refused", NO_RULE + r"\[128.0\]", """
gs.with_loss_scale(sgd, [128.0])
"""),
    "the class as a rule": ("refused", "a rule for loss_scale: gainstage.DynamicLossScale\\(\\)", """
gs.with_loss_scale(sgd, gs.DynamicLossScale)
"""),
    "a rule and a scale": ("refused", "cannot be combined", """
gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(), 8.0, loss_scale=gs.AdaptiveLossScale())
"""),
    "torch's name of the factor": ("refused", "Write multiplier. Its arguments are", """
gs.DynamicLossScale(growth_factor=2.0)
"""),
    "torch's name of the interval": ("refused", "Write increment_period. Its arguments are", """
gs.DynamicLossScale(growth_interval=2000)
"""),
    "torch's name of the first scale": ("refused", "Write initial_loss_scale. Its arguments are", """
gs.AdaptiveLossScale(init_scale=8.0)
"""),
    "a name of nobody": ("refused", "no argument 'factor'. Its arguments are", """
gs.DynamicLossScale(factor=2.0)
"""),
    "torch's scaler": ("refused", "no attribute 'GradScaler'. Write gainstage.TrainState", """
gs.GradScaler()
"""),
    "an importer as a name of the package": ("refused", "It is in gainstage.interop.importers", """
gs.from_torch({})
"""),
    "update with gradients": ("refused", "update\\(state, finite\\)", """
gs.DynamicLossScale().update([w])
"""),
    "a fixed scale that is loaded": ("works", "", """
old, new = (gs.TrainState.create(w, sgd, loss_scale=gs.FixedLossScale(s)) for s in (2.0**40, 64.0))
state, _ = gs.train_step(plain)(new.replace(opt_state=old.opt_state))
assert state.loss_scale == 64
"""),
    "a first step that overflows 100 times": ("works", "", """
state = gs.TrainState.create(W, sgd, loss_scale=gs.DynamicLossScale(2.0**120))
state, loss = gs.train_step(half, retries=120)(state, X)
assert state.applied and state.loss_scale < 2.0**20
"""),
    # ── retries ──────────────────────────────────────────────────────────────────────────────
    "retries with NaN data": ("works", "", """
state = gs.TrainState.create(w, sgd, telemetry=True)
state, _ = gs.train_step(plain, retries=30)(state, NAN)
assert state.loss_scale == 2.0**14 and state.info.skipped_steps == 1
"""),
    "retries with a fixed scale": ("warns", "leave `retries` out", """
calls = []
def loss(w, x): jax.debug.callback(calls.append, x); return half(w, x)
state = gs.TrainState.create(W, sgd, loss_scale=gs.FixedLossScale(2.0**40))
state, _ = gs.train_step(loss, retries=8)(state, X); jax.effects_barrier()
assert len(calls) == 1, len(calls)
"""),
    "retries of an optimizer with a fixed scale": ("warns", "leave `retries` out", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(), loss_scale=gs.FixedLossScale(8.0))
for _ in range(3): opt.minimize(lambda: v * v, [v], retries=2)
"""),
    # ── what the loss returns, and what it gets ──────────────────────────────────────────────
    "a loss that is a vector": ("refused", "scalar loss", """
gs.train_step(lambda w: w)(gs.TrainState.create(w, sgd))
"""),
    "a loss that is a vector, in value_and_grad": ("refused", "scalar loss, .*got shape \\(3,\\)", """
gs.value_and_grad(lambda w: w**2, gs.with_loss_scale(sgd).init(w))(w)
"""),
    "a forgotten has_aux": ("refused", "has_aux=True", """
gs.train_step(lambda w: (plain(w), 1.0))(gs.TrainState.create(w, sgd))
"""),
    "a forgotten has_aux, in value_and_grad": ("refused", "has_aux=True", """
gs.value_and_grad(lambda w: (plain(w), 1.0), gs.with_loss_scale(sgd).init(w))(w)
"""),
    "a loss of None": ("refused", "scalar loss", """
gs.train_step(lambda w: None)(gs.TrainState.create(w, sgd))
"""),
    "a string in the batch": ("refused", "Expected arrays, numbers or models in the batch; got token for `batch\\[0\\]\\['x'\\]`. If it is the same in all steps, bind it to the loss: functools.partial\\(loss_fn, name=value\\).", """
gs.train_step(lambda w, x: plain(w))(gs.TrainState.create(w, sgd), {'x': 'token'})
"""),
    "an array of strings in the batch": ("refused", "got array.*token.* for `batch\\[0\\]\\['x'\\]`", """
gs.train_step(lambda w, x: plain(w))(gs.TrainState.create(w, sgd), {'x': np.array(['token'])})
"""),
    "scale_loss in value_and_grad": ("lints", "Leave this factor out", """
tx = gs.with_loss_scale(sgd); args = w, tx.init(w)
step = lambda w, s: tx.update(gs.value_and_grad(lambda w: gs.transforms.scale_loss(plain(w), s), s)(w)[1], s, w)
"""),
    "scale_loss in train_step": ("lints", "Leave this factor out", """
args = (gs.TrainState.create(w, sgd),)
step = lambda s: gs.train_step(lambda w: gs.transforms.scale_loss(plain(w), s.opt_state))(s)
"""),
    "loss_scale times the loss, in value_and_grad": ("lints", "Leave this factor out", """
tx = gs.with_loss_scale(sgd); args = w, tx.init(w)
step = lambda w, s: tx.update(gs.value_and_grad(lambda w: plain(w) * gs.transforms.current_scale(s), s)(w)[1], s, w)
"""),
    "loss_scale times each loss, in value_and_grad": ("lints", "Leave this factor out", """
tx = gs.with_loss_scale(sgd); args = w, tx.init(w)
step = lambda w, s: tx.update(gs.value_and_grad(lambda w: jnp.mean(gs.transforms.current_scale(s) * SMALL * w ** 2), s)(w)[1], s, w)
"""),
    "loss_scale that is returned, or divides, in value_and_grad": ("works", "", """
tx = gs.with_loss_scale(sgd); state = tx.init(w)
def beside(w, s): return plain(w), {"scale": gs.transforms.current_scale(s), "scaled": plain(w) * gs.transforms.current_scale(s)}
def divided(w, s): return plain(w) / gs.transforms.current_scale(s), 0
def again(w, s):
    g = jax.grad(lambda w: plain(w) * gs.transforms.current_scale(s))(w) / gs.transforms.current_scale(s)
    return plain(w) + jnp.sum(g * g) + 0.0 * gs.transforms.current_scale(s), 0
for f in (beside, divided, again):
    for run in (jax.jit, lambda f: f):
        run(lambda w, s: gs.value_and_grad(f, s, has_aux=True)(w, s))(w, state)
"""),
    "scale_loss of a part, in value_and_grad": ("lints", "Leave this factor out", """
tx = gs.with_loss_scale(sgd); args = w, tx.init(w)
step = lambda w, s: tx.update(gs.value_and_grad(lambda w: gs.transforms.scale_loss(plain(w), s) + 1.0, s)(w)[1], s, w)
"""),
    "scale_loss of what it has returned": ("lints", "Leave this factor out", """
tx = gs.with_loss_scale(sgd); args = w, tx.init(w); scaled = gs.transforms.scale_loss
grad = lambda w, s: jax.grad(lambda w: scaled(scaled(plain(w), s), s))(w)
step = lambda w, s: tx.update(grad(w, s), s, w, loss_scale=gs.transforms.current_scale(s))
"""),
    "scale_loss of what an optimizer's has returned": ("lints", "Multiply once", """
v = gs.optimizers.Variable(w); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD()); opt.build([v])
args = (); step = gs.optimizers.jit(lambda: opt.apply([jax.grad(lambda w: opt.scale_loss(opt.scale_loss(plain(w)) / 2))(v.value())], [v]), ([v], opt.variables))
"""),
    "get_scaled_loss of what it has returned": ("lints", "multiplies by it", """
from gainstage.compat import tf2
v = gs.optimizers.Variable(w); opt = tf2.LossScaleOptimizer(gs.optimizers.SGD())
opt.build([v]); args = (); step = lambda: opt.apply_gradients(zip(opt.get_unscaled_gradients([jax.grad(lambda w: opt.get_scaled_loss(opt.get_scaled_loss(plain(w))))(v.value())]), [v])) is None
"""),
    "scale_loss of several losses, and of one that is true again": ("works", "", """
tx = gs.with_loss_scale(sgd); state = tx.init(w); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD())
for scaled, scale in [(opt.scale_loss, lambda: opt.loss_scale),
                      (lambda x: gs.transforms.scale_loss(x, state), lambda: gs.transforms.current_scale(state))]:
    def total(w):
        one, two = scaled(plain(w)), scaled(2 * plain(w))
        return one + two + scaled(one / scale())
    def with_penalty(w):
        g = jax.grad(lambda w: scaled(plain(w)))(w) / scale()
        return scaled(plain(w) + jnp.sum(g * g))
    for f in (total, with_penalty): jax.grad(f)(w); scaled(jnp.sum(jax.grad(f)(w)))
"""),
    "a state that a scan of train_step closes over": ("lints", "a part of the carry", """
args, take = (gs.TrainState.create(w, sgd),), gs.train_step(plain)
turn = lambda w, x, s: (take(s.replace(params=w), x)[0].params, x)
step = jax.jit(lambda s: jax.lax.scan(lambda w, x: turn(w, x, s), s.params, jnp.ones(3)))
"""),
    "a state in the carry of a scan, and a cond in it": ("works", "", """
state, step = gs.TrainState.create(w, sgd), gs.train_step(plain)
turn = lambda s, x: (jax.lax.cond(x > 0, lambda: step(s, x)[0], lambda: s), x)
out = jax.jit(lambda s: jax.lax.scan(turn, s, jnp.ones(3))[0].params)(state)
assert float(out[0]) < 1
"""),
    "a state of the function around a cond": ("works", "", """
state, step = gs.TrainState.create(w, sgd), gs.train_step(plain)
run = jax.jit(lambda s: jax.lax.cond(s.params[0] > 0, lambda: step(s, 1.0)[0], lambda: s))
assert float(run(state).params[0]) < 1
"""),
    "a part with its own scale, and no loss scale": ("lints", "No loss was multiplied", """
tx = gs.with_loss_scale(sgd); args = w, tx.init(w)
part = gs.transforms.locally_scaled(lambda w: w * 2.0, 8.0)
step = lambda w, s: tx.update(jax.grad(lambda w: plain(part(w)))(w), s, w)
"""),
    "an integer parameter": ("works", "", """
tx = gs.with_loss_scale(sgd); params = {'w': w, 'n': jnp.int32(3)}
loss, grads = gs.value_and_grad(lambda v: plain(v), tx.init(w))(params['w'])
assert jnp.isfinite(loss)
"""),
    "half-precision parameters": ("warns", "gainstage.autocast", """
state, loss = gs.train_step(plain)(gs.TrainState.create(w.astype(jnp.float16), sgd))
assert state.params.dtype == jnp.float16 and loss.dtype == jnp.float32
"""),
    # ── loops ────────────────────────────────────────────────────────────────────────────────
    "a run without a step": ("warns", "in a row were skipped", """
state, step = gs.TrainState.create(w, sgd), gs.train_step(plain)
for _ in range(130): state, _ = step(state, NAN)
"""),
    "an optimizer without a step": ("warns", "in a row were skipped", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD())
for _ in range(130): opt.minimize(lambda: v * NAN, [v])
"""),
    "short runs of one transformation": ("works", "", """
tx = gs.with_loss_scale(sgd)
for _ in range(5):
    state, step = gs.TrainState.create(w, tx), gs.train_step(plain, donate=False)
    for _ in range(40): state, _ = step(state, NAN)
"""),
    "an optimizer without a step, with apply_if": ("warns", "in a row were skipped", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD()); opt.scale_loss(1.0)
for n in range(130): opt.apply([NAN], [v], apply_if=n >= 0)
"""),
    "bad gradients that apply_if leaves out": ("works", "", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD()); opt.scale_loss(1.0)
for n in range(130): opt.apply([NAN], [v], apply_if=[False, jnp.array(False)][n % 2])
for n in range(130): opt.apply([NAN if n % 2 else 1.0], [v], apply_if=True)
"""),
    "a bad batch now and then": ("works", "", """
state, step = gs.TrainState.create(w, sgd), gs.train_step(plain)
for i in range(130): state, _ = step(state, 1.0 if i % 10 else NAN)
"""),
    "every second batch is bad": ("warns", "lowered the loss scale to its lowest, 2\\^0", """
state, step = gs.TrainState.create(w, sgd), gs.train_step(plain)
for i in range(130): state, _ = step(state, NAN if i % 2 else 1.0)
"""),
    "two steps share a state": ("works", "", """
state = gs.TrainState.create(w, sgd)
one, two = gs.train_step(plain), gs.train_step(lambda w: 2 * plain(w))
for step in (one, two, one, two): state, _ = step(state)
assert state.applied
"""),
    # ── a mesh ───────────────────────────────────────────────────────────────────────────────
    "a batch of the host on a mesh": ("warns", "PartitionSpec\\(\"data\"\\)", MESH + """
state, step = gs.TrainState.create(jax.device_put(W, whole), sgd), gs.train_step(half)
for _ in range(3): state, _ = step(state, np.ones((256, 4), np.float32))
"""),
    "a batch of the host on a mesh, with gs.optimizers.jit": ("warns", "PartitionSpec\\(\"data\"\\)", MESH + """
v = gs.optimizers.Variable(jax.device_put(W, whole)); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD()); opt.build([v])
step = gs.optimizers.jit(lambda x: opt.minimize(lambda: half(v.value(), x), [v]), ([v], opt.variables))
for _ in range(3): step(np.ones((256, 4), np.float32))
"""),
    "batches that lie right on a mesh": ("works", "", MESH + """
x, key = np.ones((256, 4), np.float32), jax.random.key(0)
sharded = lambda w, x: half(w, jax.lax.with_sharding_constraint(x, rows))
mean = lambda w, x: jax.lax.pmean(half(w, x), 'data')
mapped = jax.shard_map(mean, mesh=mesh, in_specs=(P(), P('data')), out_specs=P())
for loss, batch in [
    (half, jax.device_put(x, rows)), (half, jax.device_put(x, whole)), (half, x[:9]), (half, x[:8]),
    (sharded, x), (mapped, x), (lambda w, key: half(w, jax.random.uniform(key, (8, 4))), key),
]:
    p = jax.device_put(np.ones((4, 1), np.float32), whole)
    state, step = gs.TrainState.create(p, sgd), gs.train_step(loss)
    for _ in range(3): state, _ = step(state, batch)
state = gs.TrainState.create(jax.device_put(W, whole), sgd)
gs.train_step(lambda w, x, k: half(w, x))(state, jax.device_put(x, rows), np.ones((2048,)))
v = gs.optimizers.Variable(jax.device_put(np.ones((1024, 8), np.float32), whole)); opt = gs.optimizers.SGD()
for _ in range(3): opt.apply([np.ones((1024, 8), np.float32)], [v])
"""),
    "the loss of each device's part": ("warns", "jax.lax.pmean\\(loss, 'data'\\)", MESH + """
step = gs.train_step(half)
f = jax.shard_map(lambda *args: step(*args)[0].params, mesh=mesh, in_specs=(P(), P('data')), out_specs=P())
f(gs.TrainState.create(W, sgd), X)
"""),
    "the gradients of all parts, in a loop of one's own": ("works", "", MESH + """
tx = gs.with_loss_scale(sgd); p, spec = jnp.ones((4, 1)), dict(mesh=mesh, in_specs=(P(), P(), P('data')), out_specs=(P(), P()))
def step(loss, after, p, s, x):
    grads = gs.value_and_grad(loss, s)(p, x)[1]
    updates, s = tx.update(jax.tree.map(after, grads), s, p); return gs.transforms.apply_updates(p, updates, s), s
run = lambda loss, after=lambda g: g: jax.jit(jax.shard_map(lambda *a: step(loss, after, *a), **spec))(p, tx.init(p), X)
one = tx.update(gs.value_and_grad(half, tx.init(p))(p, X)[1], tx.init(p), p)[0] + p
mean, total = lambda w, x: jax.lax.pmean(half(w, x), 'data'), lambda w, x: jax.lax.psum(half(w, x) / 8, 'data')
for new in (run(mean), run(total), run(half, lambda g: g / 8)): np.testing.assert_allclose(new[0], one, rtol=1e-3)
spec |= dict(in_specs=(P('data'), P(), P('data')), out_specs=(P('data'), P())); p = jax.device_put(jnp.ones((32, 1)), rows)
local = lambda w, s, x: gs.value_and_grad(half, tx.init(w))(w, x)[1]
jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P('data'), P(), P('data')), out_specs=P('data')))(p, 0, X)
"""),
    "the loss of all parts": ("works", "", MESH + """
state, X = gs.TrainState.create(W, sgd), jnp.arange(32.0).reshape(8, 4)
parts = {'pmean': lambda w, x: jax.lax.pmean(half(w, x), 'data'),
         'psum': lambda w, x: jax.lax.psum(half(w, x) / 8, 'data')}
one, _ = gs.train_step(half, donate=False)(state, X)
for loss in parts.values():
    f = jax.jit(jax.shard_map(gs.train_step(loss), mesh=mesh, in_specs=(P(), P('data')), out_specs=P()))
    np.testing.assert_allclose(f(state, X)[0].params, one.params, rtol=1e-3)
alone = jax.make_mesh((1,), ('data',), axis_types=(AxisType.Auto,))
step = gs.train_step(half)
jax.jit(jax.shard_map(lambda *args: step(*args)[0], mesh=alone, in_specs=(P(), P('data')), out_specs=P()))(state, X)
each = jax.device_put(jnp.ones((32, 1)), rows)
def own(w, x): return gs.train_step(half)(gs.TrainState.create(w, sgd), x)[0].params
jax.jit(jax.shard_map(own, mesh=mesh, in_specs=(P('data'), P('data')), out_specs=P('data')))(each, X)
"""),
    "gradients that JAX has summed": ("warns", "to='varying'", MESH + """
def grad(w, x): return gs.distributed.mean_gradients(jax.grad(half)(w, x), 'data')
jax.jit(jax.shard_map(grad, mesh=mesh, in_specs=(P(), P('data')), out_specs=P()))(W, X)
"""),
    "gradients of each device": ("works", "", MESH + """
def grad(w, x):
    w = jax.lax.pcast(w, 'data', to='varying'); return gs.distributed.mean_gradients(jax.grad(half)(w, x), 'data')
f = jax.jit(jax.shard_map(grad, mesh=mesh, in_specs=(P(), P('data')), out_specs=P()))
np.testing.assert_allclose(f(W, X), jax.grad(half)(W, X), rtol=1e-3)
def grad(w, x): return gs.distributed.mean_gradients(jax.grad(half)(w, x), 'data')
jax.jit(jax.shard_map(grad, mesh=mesh, in_specs=(P(), P('data')), out_specs=P(), check_vma=False))(W, X)
"""),
    # ── the telemetry of a loop ──────────────────────────────────────────────────────────────
    "alarms without telemetry": ("warns", "gainstage.diagnostics.telemetry", """
from gainstage.diagnostics import Alarms
state, step = gs.TrainState.create(w, sgd), gs.train_step(plain)
with Alarms() as alarms:
    for n in range(20):
        state, loss = step(state)
        alarms.write(n, loss=loss, loss_scale=state.loss_scale)
"""),
    "alarms that get other records too": ("works", "", """
from gainstage.diagnostics import Alarms
state, step = gs.TrainState.create(w, sgd, telemetry=True), gs.train_step(plain)
with Alarms() as alarms:
    for n in range(40):
        alarms.write(n, validation=1.0)
        if n > 3: state, loss = step(state); alarms.write(n, state.info, loss=loss)
"""),
    "steps that begin again in each epoch": ("warns", "epoch \\* steps_per_epoch", """
from gainstage.diagnostics import JsonLines; import tempfile
state, step = gs.TrainState.create(w, sgd, telemetry=True), gs.train_step(plain, donate=False)
run = JsonLines(tempfile.mkdtemp() + "/run.jsonl", every=6)
for n in [0, 1, 2, 3, 4] * 4: state, loss = step(state); run.write(n, state.info, loss=loss)
run.close()
"""),
    "steps that go back to a checkpoint": ("works", "", """
from gainstage.diagnostics import JsonLines; import tempfile
state, step = gs.TrainState.create(w, sgd, telemetry=True), gs.train_step(plain, donate=False)
run = JsonLines(tempfile.mkdtemp() + "/run.jsonl", every=6)
kept = state
for n in range(10):
    state, loss = step(state); run.write(n, state.info, loss=loss); run.write(n, validation=1.0)
for first in (0, 5):
    state = kept
    for n in range(first, 10): state, loss = step(state); run.write(n, state.info, loss=loss)
run.close()
"""),
    "telemetry of a scan and of an optimizer": ("works", "", """
from gainstage.diagnostics import Alarms
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.1), telemetry=True)
with Alarms() as alarms:
    for n in range(20): opt.minimize(lambda: v * v, [v]); alarms.write(n, gs.diagnostics.telemetry(opt))
    step = gs.train_step(plain)
    def body(state, x): state, _ = step(state, x); return state, state.info
    _, infos = jax.lax.scan(body, gs.TrainState.create(w, sgd, telemetry=True), jnp.ones(20))
    for n in range(20): alarms.write(20 + n, jax.tree.map(lambda x: x[n], infos))
"""),
    # ── optimizers ───────────────────────────────────────────────────────────────────────────
    "an optax transformation for an optimizer": ("refused", "Use gainstage.optimizers.from_optax\\(tx\\), or gainstage.with_loss_scale\\(tx\\).", """
gs.optimizers.LossScaleOptimizer(sgd)
"""),
    "an optimizer with variables for a transformation": ("refused", "Write optax.adam\\(1e-3\\), or .*: gainstage.optimizers.LossScaleOptimizer\\(optimizer\\).minimize", """
gs.with_loss_scale(gs.optimizers.Adam())
"""),
    "a number for a transformation": ("refused", "Expected an optax.GradientTransformation for tx; got 0.1.", """
gs.with_loss_scale(0.1)
"""),
    "a gradient of another shape": ("refused", "shape", """
v = gs.optimizers.Variable(w); gs.optimizers.SGD().apply([jnp.ones(4)], [v])
"""),
    "a read in plain jax.jit": ("refused", "gainstage", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.SGD(0.1); opt.build([v])
jax.jit(lambda: opt.apply([1.0], [v]))()
"""),
    "a variable that gs.optimizers.jit is not told of": ("refused", "state", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.SGD(0.1); opt.build([v])
gs.optimizers.jit(lambda: opt.apply([1.0], [v]), state=[v])()
"""),
    "a scale that gs.optimizers.jit is not told of": ("refused", "In gainstage.optimizers.jit, add optimizer.variables to `state`.", """
v = gs.optimizers.Variable(w); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.Adam()); opt.build([v])
gs.optimizers.jit(lambda: opt.minimize(lambda: v.value().sum(), [v]), [v])()
"""),
    "jnp functions of a variable": ("refused", "value\\(\\)", """
jnp.sum(gs.optimizers.Variable(w))
"""),
    "a rate that is assigned": ("works", "", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.SGD(0.1); opt.build([v]); opt.learning_rate = 0.5
opt.apply([1.0], [v]); assert float(v) == 0.5
"""),
    "decay that is excluded from another decay": ("refused", r"mask=\[True, False\]", """
v, b = gs.optimizers.Variable(1.0), gs.optimizers.Variable(1.0, name="bias")
opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.from_optax(optax.adamw(0.1))); opt.exclude_from_weight_decay(var_names=["bias"])
opt.minimize(lambda: v * b, [v, b])
"""),
    "decay that is excluded for no variable": ("warns", "leaves out none", """
v, b = gs.optimizers.Variable(1.0), gs.optimizers.Variable(1.0); opt = gs.optimizers.AdamW()
opt.exclude_from_weight_decay(var_names=["bias"])
for _ in range(2): opt.apply([1.0, 1.0], [v, b])
"""),
    "decay that is excluded for a variable that is not trained": ("warns", "var_list=\\['other'\\] leaves", """
v, b = gs.optimizers.Variable(1.0), gs.optimizers.Variable(1.0, name="other"); opt = gs.optimizers.SGD(weight_decay=0.1)
opt.exclude_from_weight_decay([b]); opt.build([v])
"""),
    "decay that is excluded, by some names in vain": ("works", "", """
v, b = gs.optimizers.Variable(1.0, name="kernel"), gs.optimizers.Variable(1.0, name="bias"); opt = gs.optimizers.AdamW()
opt.exclude_from_weight_decay([gs.optimizers.Variable(1.0)], ["bias", "LayerNorm"]); opt.build([v, b])
"""),
    "decay that is excluded from a bias in a model without one": ("works", "", """
v = gs.optimizers.Variable(1.0, name="kernel"); opt = gs.optimizers.AdamW()
opt.exclude_from_weight_decay(var_names=["bias"]); opt.build([v])
"""),
    "decay that is excluded where there is none": ("works", "", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.SGD(); opt.exclude_from_weight_decay(var_names=["bias"]); opt.build([v])
opt = gs.optimizers.from_optax(sgd, weight_decay=0.1); opt.exclude_from_weight_decay([v]); opt.build([v])
"""),
    "a schedule with a Python condition": ("refused", r"jax\.numpy\.where\(step", """
v = gs.optimizers.Variable(1.0); gs.optimizers.SGD(lambda step: 0.5 if step < 1 else 0.25).apply([1.0], [v])
"""),
    "a schedule with numpy": ("refused", "learning_rate\\(step\\) to work on an array.*jit_compile=False", """
v = gs.optimizers.Variable(1.0); gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(lambda step: np.cos(step))).minimize(lambda: v * v, [v])
"""),
    "a schedule with a Python condition, uncompiled": ("works", "", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.SGD(lambda step: 0.5 if step < 1 else 0.25, jit_compile=False)
for _ in range(2): opt.apply([1.0], [v])
assert float(v) == 0.25
"""),
    "built, set by an optimizer's own build": ("works", "", """
class Own(gs.optimizers.SGD):
    def build(self, var_list):
        super().build(var_list); self.built = True
v = gs.optimizers.Variable(1.0); gs.optimizers.LossScaleOptimizer(Own(0.5)).minimize(lambda: v * 1.0, [v]); assert float(v) == 0.5
"""),
    "built, set without a base that builds": ("refused", r"super\(\)\.build\(var_list\) to set built; got True", """
class Own(gs.optimizers.SGD):
    def build(self, var_list):
        self.built = True
Own(0.5).build([gs.optimizers.Variable(1.0)])
"""),
    "half-precision variables": ("warns", "master_weights=True", """
v = gs.optimizers.Variable(jnp.ones(3, jnp.bfloat16)); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.1))
for _ in range(2): opt.minimize(lambda: (v * v).sum(), [v])
"""),
    "half-precision variables with master weights": ("works", "", """
v = gs.optimizers.Variable(jnp.ones(3, jnp.float16)); opt = gs.optimizers.LossScaleOptimizer(gs.optimizers.SGD(0.1, master_weights=True))
opt.minimize(lambda: (v * v).sum(), [v])
"""),
    "accumulation that is set too late": ("refused", "before the optimizer is built", """
v = gs.optimizers.Variable(1.0); opt = gs.optimizers.SGD(); opt.build([v]); opt.gradient_accumulation_steps = 2
"""),
    "a missing gradient": ("warns", "No gradient for", """
v, u = gs.optimizers.Variable(1.0), gs.optimizers.Variable(1.0); gs.optimizers.SGD().apply([1.0, None], [v, u])
"""),
    # ── models ───────────────────────────────────────────────────────────────────────────────
    "an NNX model": ("works", "", """
m = nnx.Linear(16, 16, rngs=nnx.Rngs(0)); before = m.kernel[...] + 0
state, step = gs.TrainState.create(m, sgd), gs.train_step(gs.autocast(lambda m, x: jnp.mean(m(x) ** 2)))
state, loss = step(state, jnp.ones((16, 16))); assert (state.params.kernel[...] != before).any()
"""),
    "all variables of a Linen module as params": ("warns", "create\\(variables\\['params'\\]", """
tx, variables = gs.with_loss_scale(optax.adam(0.1)), {"params": {"a": w}, "batch_stats": {"mean": w}}
for _ in range(2): tx.init(variables)
"""),
    "all variables of a Linen module, of which some are trained": ("works", "", """
variables = {"params": {"a": w}, "batch_stats": {"mean": w}}
for kind in (optax.masked(sgd, {"params": True, "batch_stats": False}),
             optax.partition({"a": sgd, "b": optax.set_to_zero()}, {"params": "a", "batch_stats": "b"})):
    gs.with_loss_scale(optax.chain(optax.clip(1.0), kind)).init(variables)
gs.with_loss_scale(sgd).init({"params": variables})
"""),
    "autocast inside of train_step": ("works", "", """
step = gs.train_step(gs.autocast(lambda w, x: jnp.mean((x @ w) ** 2)))
W = X = jnp.ones((16, 16)); state, loss = step(gs.TrainState.create(W, sgd), X); assert loss.dtype == jnp.float32
"""),
    "autocast of float64 alone": ("warns", "in float64, which it leaves", """
with jax.enable_x64(True):
    f = gs.autocast(lambda w, x: jnp.mean((x @ w) ** 2))
    for _ in range(2): jax.jit(jax.grad(f))(jnp.zeros((4, 1)), jnp.ones((8, 4)))
"""),
    "autocast of float64 beside float32, or kept": ("works", "", """
with jax.enable_x64(True):
    x, y = jnp.ones((8, 4)), jnp.ones((8, 4), jnp.float32)
    @gs.keep_float32()
    def kept(w): return jnp.sum(x @ w)
    both = lambda w: jnp.sum(x @ w) + jnp.sum(y @ w.astype(jnp.float32))
    for f in (kept, both, jnp.sum): jax.grad(gs.autocast(f))(jnp.zeros((4, 1)))
"""),
    "autocast around a step": ("works", "", """
tx = gs.with_loss_scale(sgd); state = tx.init(W)
loss, grads = gs.value_and_grad(gs.autocast(lambda w, x: jnp.mean((x @ w) ** 2)), state)(W, X)
assert grads.dtype == jnp.float32
"""),
}  # fmt: skip
