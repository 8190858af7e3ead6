"""What a precision costs is measured as noise and bias, and said before training."""

import contextlib
import itertools
import re
import time
import types
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gainstage as gs
from gainstage import advise
from gainstage.__main__ import main
from gainstage.precision import float8_rule
from gainstage.precision.cards import CARDS, known_card


def draw(number, *shape):
    return jnp.asarray(np.random.default_rng(number).normal(size=shape), jnp.float32)


PARAMS = {"a": draw(1, 48, 64) / 7, "b": draw(2, 64, 32) / 8}
BATCHES = [(draw(10 + i, 96, 48), draw(20 + i, 96, 32)) for i in range(4)]


def network(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


def years(params, x, y):
    """Features of about 2,000, whose mean is subtracted after the product."""
    h = jnp.tanh((x + 2000.0) @ params["a"] - 2000.0 * params["a"].sum(0))
    return jnp.mean((h @ params["b"] - y) ** 2)


@pytest.fixture(scope="module")
def advice():
    return advise(network, PARAMS, BATCHES)


def costs(advice):
    return {cost.name: cost for cost in advice.candidates}


def vector(tree):
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_noise_and_bias_are_those_of_the_definition(advice, dtype):
    """Both are computed again in float64 from the gradients of JAX."""
    exact = np.stack([vector(jax.jit(jax.grad(network))(PARAMS, *b)) for b in BATCHES])
    cast, scale = gs.autocast(network, dtype), 2.0 ** (costs(advice)[dtype].exponent or 0)

    def scaled(params, x, y):
        return cast(params, x, y) * scale

    found = np.stack([vector(jax.jit(jax.grad(scaled))(PARAMS, *b)) for b in BATCHES]) / scale
    off = found - exact
    batch = exact.var(0, ddof=1).sum()
    noise = off.var(0, ddof=1).sum()
    assert costs(advice)[dtype].accuracy.noise == pytest.approx(noise / batch, rel=0.02)
    mean = (exact.mean(0) ** 2).sum() - batch / 4
    bias = max((off.mean(0) ** 2).sum() - noise / 4, 0.0)
    assert costs(advice)[dtype].accuracy.bias == pytest.approx((bias / mean) ** 0.5, rel=0.02)
    parts = []  # the square of the bias without each batch
    for left_out in range(4):
        rest = np.delete(off, left_out, 0)
        parts.append((rest.mean(0) ** 2).sum() - rest.var(0, ddof=1).sum() / 3)
    at_most = max((off.mean(0) ** 2).sum() - noise / 4 + 2 * (3 * np.var(parts)) ** 0.5, 0.0)
    assert costs(advice)[dtype].bias_at_most == pytest.approx((at_most / mean) ** 0.5, rel=0.02)


def test_a_bias_that_few_batches_do_not_show_is_no_bias_of_0():
    """It says what it is below, which holds with more batches; and asks for more if that is beyond
    the budget."""
    params = {"a": PARAMS["a"] / 8, "b": PARAMS["b"]}
    more = [(draw(40 + i, 64, 48), draw(80 + i, 64, 32)) for i in range(16)]
    few, many = (advise(network, params, some) for some in (more[:2], more))
    for cost in few.candidates[1:]:
        own = costs(many)[cost.name]
        assert own.accuracy.bias <= cost.bias_at_most
        assert own.bias_at_most <= 1.5 * cost.bias_at_most
        assert not cost.is_bias_clear
    assert [row[2] for row in few.table()[2:5] if not row[2].startswith("< ")] == []
    assert any(cost.is_bias_clear for cost in many.candidates)
    assert ("measure on more" in str(few)) == (few.recommended.bias_at_most > 0.02)
    assert "0 %" not in [row[2] for row in many.table()[2:5]]


def test_the_sentence_shows_the_numbers_that_are_compared():
    """What is said to be within 1 % and 2 % are the noise and the bias of the recommendation, and
    that bias may be larger stands beside; it asks to be asked again late in training."""
    params = {"a": PARAMS["a"] / 8, "b": PARAMS["b"]}
    found = advise(network, params, [(draw(40 + i, 64, 48), draw(80 + i, 64, 32)) for i in (0, 1)])
    best = found.recommended
    assert best.name != "float32"
    said = re.search(r"noise (\S+) % and bias (\S+) % are within 1 % and 2 %", str(found))
    assert float(said[1]) == pytest.approx(100 * best.accuracy.noise, rel=0.06)
    assert float(said[2]) == pytest.approx(100 * best.accuracy.bias, rel=0.06)
    assert float(said[2]) <= 2
    assert "Ask again late in training" in str(found)


@pytest.fixture(scope="module")
def wide():
    """Of a layer in float8, and of its loss."""

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    xs, w = [draw(number, 256, 512) for number in range(2)], draw(9, 512, 512) / 23
    with where_float8_costs_nothing():
        found = advise(loss, w, [(x,) for x in xs])
    return found, loss, (w, xs)


@contextlib.contextmanager
def where_float8_costs_nothing():
    """A stand-in for layers that are large enough for a card to gain, which are slow on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8_rule, "BYTES_OF_ACTIVATION", 0)
        patch.setattr(float8_rule, "BYTES_OF_WEIGHT", 0)
        yield


def test_the_lines_of_each_row_are_those_of_what_was_measured(advice, wide):
    """Unscaled float16 says so; float8 has a row where its line computes in float8."""
    lines = {cost.name: cost.code for cost in wide[0].candidates}
    fixed = "state = gs.TrainState.create(params, tx, loss_scale=None)"
    assert [n for n in lines if lines[n][0] == fixed] == ["float16, unscaled"]
    assert lines["float16, unscaled"][1] == lines["float16"][1]
    assert lines["float8"][1] == 'step = gs.train_step(gs.autocast(loss_fn, "float8"))'
    assert "float8" not in costs(advice)
    assert "\nfloat8             as float16\n" in str(advice)
    assert 'large enough to gain by float8 on an H100: "float8" computes as "float16"' in str(
        advice
    )


def test_the_row_of_float8_is_what_its_line_computes(wide):
    """Its noise is that of the gradients of `gs.autocast(loss_fn, "float8")`, and a card without
    float8 has no row."""
    found, loss, (w, xs) = wide
    exact = np.stack([vector(jax.jit(jax.grad(loss))(w, x)) for x in xs])
    cost, eight = costs(found)["float8"], gs.autocast(loss, "float8")

    def scaled(w, x):
        return eight(w, x) * 2.0**cost.exponent

    with where_float8_costs_nothing():
        found8 = np.stack([vector(jax.jit(jax.grad(scaled))(w, x)) for x in xs])
    off = found8 / 2.0**cost.exponent - exact
    noise = off.var(0, ddof=1).sum() / exact.var(0, ddof=1).sum()
    assert cost.accuracy.noise == pytest.approx(noise, rel=0.02)
    assert cost.arithmetic == {"float8": 1.0}
    on_a100 = advise(loss, w, [(x,) for x in xs], card="A100")
    assert "float8" not in costs(on_a100)
    assert "\nfloat8             not there\n" in str(on_a100)
    assert "The A100 has no products in float8." in str(on_a100)


def test_each_precision_costs_more_with_fewer_digits(wide):
    """Float32 costs nothing; then float16, bfloat16 and float8, in this order."""
    each = costs(wide[0])
    noises = [each[n].accuracy.noise for n in ("float32", "float16", "bfloat16", "float8")]
    assert noises[0] == 0.0
    assert noises == sorted(noises)
    assert noises[3] > 100 * noises[1]
    assert each["float16"].kept < each["float32"].kept


def test_the_time_on_paper_is_arithmetic_or_memory(advice):
    """Products of this size take as long as their bytes take the memory, three times."""
    shapes = [(96, 48, 64), (96, 64, 32)]
    moved = sum(r * s + s * c + r * c for r, s, c in shapes)
    each = costs(advice)
    assert each["float16"].seconds == pytest.approx(3 * 2 * moved / 3.35e12)
    assert each["float32"].seconds == pytest.approx(3 * 4 * moved / 3.35e12)


CONVOLUTIONS = {
    "plain": {},
    "strides": {"window_strides": (2, 2)},
    "groups": {"feature_group_count": 4},
    "dilated": {"rhs_dilation": (2, 2)},
    "transposed": {"lhs_dilation": (1, 2), "padding": [(0, 0), (2, 2)]},
    "groups of the batch": {"batch_group_count": 2},
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_the_arithmetic_of_a_convolution_is_counted(kind):
    """On ones, the sum of the results is the number of products: the zeros between the elements of
    a transposed one are not multiplied. A V100 takes that long for three of them."""
    how = {"window_strides": (1, 1), "padding": "VALID", **CONVOLUTIONS[kind]}
    channels = 64 // how.get("feature_group_count", 1)

    def convolved(kernel, x):
        return jax.lax.conv_general_dilated(x, kernel, **how)

    ones = jnp.ones((64, channels, 3, 3)), jnp.ones((4, 64, 12, 12))
    count = float(convolved(*ones).sum())
    xs = [(draw(number, *ones[1].shape),) for number in range(2)]
    found = advise(
        lambda w, x: jnp.mean(convolved(w, x) ** 2), draw(9, *ones[0].shape), xs, card="V100"
    )
    assert found.candidates[0].seconds == pytest.approx(3 * 2 * count / 15.7e12, rel=0.07)


def test_a_precision_that_pulls_training_elsewhere_is_refused():
    """Year numbers: both half precisions are out of the budget, and neither is recommended by its
    rules; with the plan of the advice, float16 is within it."""
    params = {"a": PARAMS["a"] / 8, "b": PARAMS["b"]}
    advice = advise(years, params, BATCHES)
    each = costs(advice)
    assert each["bfloat16"].accuracy.bias > 0.02
    assert "Not bfloat16" in advice.reason
    assert not each["float16"].accuracy.fits(0.01, 0.02)
    assert advice.recommended.name == "float16, mended"
    assert advice.recommended.accuracy.fits(0.01, 0.02)
    assert "step = gs.train_step(gs.autocast(loss_fn, advice.plan))" in str(advice)
    assert f"{advice.plan.left:.0%} of what is in half precision is left" in str(advice)


def test_the_plan_of_an_advice_does_what_it_says():
    """Under `autocast` with it, the gradient of each batch is as near to float32 as the row says,
    and what autocast has in half precision by its rules is farther off."""
    params = {"a": PARAMS["a"] / 8, "b": PARAMS["b"]}
    advice = advise(years, params, BATCHES)
    errors = []
    for half in (gs.autocast(years, advice.plan), gs.autocast(years)):
        each = []
        for batch in BATCHES:
            grads = jax.jit(jax.grad(lambda p, b, f=half: 2.0**10 * f(p, *b)))(params, batch)
            exact = jax.jit(jax.grad(lambda p, b: years(p, *b)))(params, batch)
            off = jax.tree.map(lambda g, e: np.asarray(g, "d") / 2.0**10 - e, grads, exact)
            norms = [np.hypot(*map(np.linalg.norm, tree.values())) for tree in (off, exact)]
            each.append(norms[0] / norms[1])
        errors.append(max(each))
    assert errors[0] == pytest.approx(costs(advice)["float16, mended"].accuracy.error, rel=0.1)
    assert errors[0] < errors[1] / 2


def test_where_half_precision_is_good_enough_there_is_no_plan(advice):
    """A network within the budget has no row more."""
    assert advice.plan is None
    assert not any("mended" in cost.name for cost in advice.candidates)


def test_a_card_without_bfloat16_is_given_float16(advice):
    """On a T4 bfloat16 is as slow as float32."""
    assert advice.recommended.name == "bfloat16"
    assert "Bfloat16 needs no loss scale, and steps that are not finite are skipped" in str(advice)
    on_t4 = advise(network, PARAMS, BATCHES[:2], card="T4")
    assert on_t4.recommended.name == "float16"
    assert str(on_t4).endswith('step = gs.train_step(gs.autocast(loss_fn, "float16"))')


def test_on_a_cpu_all_cards_are_shown_if_none_is_asked_for(advice):
    """Each has the times of its own rates, and what to use there; a card that is asked for is
    alone."""
    asked = advise(network, PARAMS, BATCHES, card="T4")
    assert (len(advice.cards), asked.cards) == (len(CARDS), {})
    for mine, own in zip(advice.cards["T4"], asked.candidates, strict=True):
        assert (mine.name, mine.seconds) == (own.name, own.seconds)
    head, *rows = str(advice).partition("On other cards:\n")[2].splitlines()[: len(CARDS) + 1]
    assert head.split() == ["card", "float32", "bfloat16", "float16", "use"]
    assert [row.split("  ")[0] for row in rows][:3] == ["H100", "B200", "H200"]
    assert {row.split("  ")[0]: row.split()[-1] for row in rows}.items() >= {
        "H100": "bfloat16", "T4": "float16", "V100": "float16", "TPU v6e": "bfloat16",
    }.items()  # fmt: skip
    assert "On other cards" not in str(asked)


@pytest.mark.parametrize(("factor", "needed"), [(1.0, False), (2.0**-12, True)])
def test_it_says_from_which_batch_size_on_float16_needs_scaling(factor, needed):
    """A loss whose gradients are thousands of times smaller needs it now, the other one later."""
    advice = advise(lambda p, x, y: network(p, x, y) * factor, PARAMS, BATCHES[:2])
    assert (advice.needs_scaling_from == 1) == needed
    assert ("and this batch size" in str(advice)) == needed
    lost = {cost.name: cost.accuracy.lost for cost in advice.candidates}
    assert (lost["float16, unscaled"] > 0.01) == needed
    assert lost["float16"] < 1e-3


def test_it_names_a_parameter_whose_small_gradient_is_lost():
    """The gradient of all together is right without a scale, and hides that of a small part of the
    loss, which is lost; an optimizer such as Adam steps by each."""

    def loss(params, x, y):
        return network(params["large"], x, y) + 1e-6 * network(params["small"], x, y)

    params = {"large": PARAMS, "small": {name: w / 2 for name, w in PARAMS.items()}}
    found = advise(loss, params, BATCHES)
    assert costs(found)["float16, unscaled"].accuracy.fits(0.01, 0.02)
    assert found.needs_scaling_from == 1
    assert "Without it 'small/" in str(found)

    # A gradient that is 0 but for rounding is not lost, however few the batches.
    def with_shift(params, x, y):
        scores = jax.nn.softmax(x @ params["a"] + params["shift"].sum())
        return jnp.mean((scores @ params["b"] - y) ** 2)

    shifted = {**PARAMS, "shift": jnp.ones(3)}
    for some in (BATCHES, BATCHES[:2], BATCHES[2:]):
        assert "shift" not in str(advise(with_shift, shifted, some))
    alone = advise(lambda p, x, y: loss({**params, "large": p}, x, y), PARAMS, BATCHES)
    assert alone.needs_scaling_from != 1
    assert "Without it" not in str(alone)


@pytest.mark.slow
def test_a_layer_that_the_rule_puts_in_float8_saves_time_on_paper():
    """Also with fewer rows than columns, where the weight is the larger operand."""
    w, xs = draw(1, 2560, 8192) / 50, [(draw(10 + i, 256, 2560),) for i in range(2)]
    found = advise(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), w, xs)
    each = costs(found)
    assert each["float8"].arithmetic == {"float8": 1.0}
    assert each["float8"].seconds < each["float16"].seconds
    assert "float8 saves no time" not in str(found)


@pytest.mark.parametrize("how", ["overflow", "rounding"])
def test_it_does_not_say_that_a_scale_helps_where_none_does(how):
    """An overflow of the forward pass, or its rounding, is the same at each scale."""
    loss = {
        "overflow": lambda p, x, y: network({**p, "b": p["b"] * 1e6}, x, y),
        "rounding": lambda p, x, y: years({**p, "a": p["a"] * 4}, x, y),
    }[how]
    found = advise(loss, PARAMS, BATCHES)
    assert not costs(found)["float16"].accuracy.fits(0.01, 0.02)
    assert found.needs_scaling_from is None
    assert "not that of small gradients: no loss scale helps" in str(found)
    assert "needs loss scaling" not in str(found)


@pytest.mark.parametrize("kind", ["dict", "one array", "nnx", "equinox", "aux"])
def test_batches_and_models_of_any_kind(kind):
    """A batch is the tuple of all other arguments, each any pytree; the parameters may be a
    model."""
    if kind == "nnx":
        model = nnx.Linear(48, 32, rngs=nnx.Rngs(0))
        found = advise(lambda m, x, y: jnp.mean((m(x) - y) ** 2), model, BATCHES)
    elif kind == "equinox":
        model = eqx.nn.MLP(48, 32, 64, 1, key=jax.random.key(0))  # with functions as leaves
        found = advise(lambda m, x, y: jnp.mean((jax.vmap(m)(x) - y) ** 2), model, BATCHES)
    elif kind == "aux":
        found = advise(lambda p, x, y: (network(p, x, y), x), PARAMS, BATCHES, has_aux=True)
    elif kind == "dict":
        batches = [({"x": x, "y": y},) for x, y in BATCHES]
        found = advise(lambda p, batch: network(p, **batch), PARAMS, batches)
    else:
        found = advise(lambda p, x: jnp.mean((x @ p["a"]) ** 2), PARAMS, [(x,) for x, _ in BATCHES])
    assert found.recommended.name == "bfloat16"


class Pair(NamedTuple):
    x: jax.Array
    y: jax.Array


def optional(params, x, y=None):
    return jnp.mean((x @ params["a"]) ** 2) if y is None else network(params, x, y)


def whole(params, batch, training=True):
    return network(params, *batch) if training else jnp.zeros(())


@pytest.mark.parametrize(
    ("loss", "batches"),
    [
        (optional, BATCHES),
        (whole, [(pair,) for pair in BATCHES]),
        (whole, [(Pair(*pair),) for pair in BATCHES]),
    ],
    ids=["optional", "a pair", "named"],
)
def test_a_batch_is_the_tuple_of_what_follows_the_parameters(loss, batches, advice):
    """Its elements are the arguments, optional ones too; an argument may be a tuple itself."""
    found = advise(loss, PARAMS, batches, progress=False)
    prices = [cost.accuracy for cost in found.candidates]
    np.testing.assert_allclose(
        prices, [cost.accuracy for cost in advice.candidates], rtol=0.02, atol=1e-9
    )


def penalised(params, x, y):
    slope = jax.grad(lambda x: network(params, x, y))(x)
    return network(params, x, y) + jnp.sum(slope**2)


def forwards(params, x, y):
    return network(params, x, y) + jax.jvp(lambda x: network(params, x, y), (x,), (x,))[1]


@pytest.mark.parametrize("loss", [penalised, forwards])
def test_derivatives_inside_of_a_loss_are_measured_in_every_precision(loss):
    """So a gradient penalty and a derivative in forward mode are."""
    each = costs(advise(loss, PARAMS, BATCHES[:2]))
    assert 0 < each["float16"].accuracy.noise < each["bfloat16"].accuracy.noise < 1


DRAWS = itertools.cycle(np.float32([0, 1, -1]))  # as of `numpy.random`, but never twice the same


def randomly(params, x, y):
    return network(params, x + next(DRAWS), y)


MISTAKES = {
    "one batch": ((network, PARAMS, BATCHES[:1]), "at least 2 batches; got 1"),
    "an array": ((network, PARAMS, BATCHES[0][0]), "list of batches"),
    "a last batch": (
        (network, PARAMS, [*BATCHES, tuple(x[:5] for x in BATCHES[0])]),
        "batch 4 differs from batch 0",
    ),
    "a batch as a list": (
        (network, PARAMS, [list(b) for b in BATCHES]),
        r"takes after the parameters.*; got list, for a fun with the arguments params, x, y",
    ),
    "an array as a batch": (
        (lambda p, x: jnp.mean((x @ p["a"]) ** 2), PARAMS, [x for x, _ in BATCHES]),
        r"\[\(x1,\), \(x2,\)\] for one argument; got ArrayImpl",
    ),
    "a named tuple": ((network, PARAMS, [Pair(*pair) for pair in BATCHES]), "got Pair, for a fun"),
    "names": ((lambda p, x, *, y: network(p, x, y), PARAMS, BATCHES), r"got a tuple of 2, for"),
    "a dict of arguments": (
        (optional, PARAMS, [dict(zip("xy", pair, strict=True)) for pair in BATCHES]),
        r"got dict, for a fun with the arguments params, x, y",
    ),
    "one that is no tuple": ((network, PARAMS, [*BATCHES, 3]), "each batch as the tuple.*got int"),
    "three": ((network, PARAMS, [(*pair, 1) for pair in BATCHES]), "got a tuple of 3, for a fun"),
    "a pair for one argument": (
        (lambda params, batch: network(params, *batch), PARAMS, BATCHES),
        "got a tuple of 2, for a fun",
    ),
    "a tuple of batches": ((network, PARAMS, tuple(BATCHES)), "list of batches"),
    "parameters in half": (
        (network, jax.tree.map(lambda w: w.astype(jnp.bfloat16), PARAMS), BATCHES),
        "Expected float32 parameters; got bfloat16",
    ),
    "the same batch": ((network, PARAMS, [BATCHES[0]] * 2), "different batches"),
    "the same seven times": ((network, PARAMS, [BATCHES[0]] * 7), "different batches"),
    "another shape": (
        (network, PARAMS, [*BATCHES, (BATCHES[0][0], BATCHES[0][1][:5])]),
        r"batch 4 differs from batch 0: float32\[5, 32\], for float32\[96, 32\]. Leave",
    ),
    "another order": (
        (PARAMS.get, network, BATCHES),
        r"params; got .*\(loss_fn, params, batches\)",
    ),
    "no function": ((None, PARAMS, BATCHES), "Expected a function for fun"),
    "autocast": ((gs.autocast(network), PARAMS, BATCHES), "under autocast already"),
    "no gradient": ((lambda p, x, y: jnp.mean(x) * y.sum(), PARAMS, BATCHES), "its gradient is 0"),
    "not finite": (
        (lambda p, x, y: network(p, x * jnp.inf, y), PARAMS, BATCHES),
        "finite in float32",
    ),
    "no key": ((randomly, PARAMS, BATCHES), "same loss from two calls"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_measured_is_an_error(mistake):
    """Each mistake is named, before or after the float32 gradients, with what to do."""
    args, words = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError), match=words):
        advise(*args)


def test_an_unknown_card_is_an_error():
    """The cards whose rates are known are listed."""
    with pytest.raises(ValueError, match=r"'T4'.*for card; got 'B300'"):
        advise(network, PARAMS, BATCHES, card="B300")


KINDS = {
    "NVIDIA H200": "H200", "NVIDIA H100 80GB HBM3": "H100", "NVIDIA A100-SXM4-80GB": "A100",
    "Tesla T4": "T4", "Tesla V100-SXM2-16GB": "V100", "NVIDIA L4": "L4", "NVIDIA L40S": "L40S",
    "NVIDIA A10": "A10", "NVIDIA B200": "B200", "NVIDIA GeForce RTX 4090": "RTX 4090",
    "TPU v6 lite": "TPU v6e", "TPU v5": "TPU v5p", "TPU v4": "TPU v4",
    "TPU v5 lite": "TPU v5e", "TPU7x": "TPU v7", "cpu": "H100", "NVIDIA L40": "H100",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), KINDS.items())
def test_the_card_is_that_of_this_machine(kind, name, monkeypatch):
    """Without `card` the times are those of the device that JAX has; of an H100 on a CPU, and where
    the rates are not known."""
    device = types.SimpleNamespace(device_kind=kind)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert known_card(None).name == name


@pytest.mark.parametrize("written", ["t4", "T4", " T4"])
def test_the_name_of_a_card_may_be_in_small_letters(written):
    """`card="t4"` and `"rtx4090"` are `"T4"` and `"RTX 4090"`."""
    assert known_card(written).name == "T4"
    assert known_card("rtx4090").name == known_card("RTX-4090").name == "RTX 4090"


@pytest.mark.parametrize("tick", [5.0, 0.001], ids=["long", "short"])
def test_without_a_terminal_long_work_writes_lines(tick, capsys, monkeypatch):
    """As in CI or a notebook: an estimate, and how much is done each ten seconds, to standard
    error. Short work writes nothing, and neither does `progress=False`."""
    clock = itertools.count(0, tick)
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, name, lambda: next(clock))
    advise(network, PARAMS, BATCHES[:2], progress=False)
    assert capsys.readouterr().err == ""
    advise(network, PARAMS, BATCHES[:2])
    lines = capsys.readouterr().err.splitlines()
    if tick < 1:
        assert lines == []
        return
    assert re.fullmatch(r"advise: about \d+ s", lines[0])
    assert len(lines) > 3
    assert all(re.fullmatch(r"advise: \d+ of 15, after \d+ s", line) for line in lines[1:])


MODULE = """
import jax, jax.numpy as jnp

def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params) ** 2)

def what():
    keys = jax.random.split(jax.random.key(0), 5)
    batches = [(jax.random.normal(key, (32, 16)),) for key in keys[1:]]
    return loss_fn, jax.random.normal(keys[0], (16, 16)) / 4, batches

def with_aux():
    loss, params, batches = what()
    return lambda params, x: (loss(params, x), x), params, batches

def one():
    return loss_fn
"""


def test_the_command_prints_the_advice(tmp_path, monkeypatch, capsys):
    """It ends with the recommendation and two lines of code."""
    (tmp_path / "of_advice.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    assert main(["advise", "of_advice:what", "--batches", "3"]) == 0
    printed = capsys.readouterr().out
    assert "Measured on 3 batches" in printed
    assert "Use bfloat16: noise" in printed
    assert 'gs.autocast(loss_fn, "bfloat16")' in printed
    assert "float16, unscaled" in printed
    assert main(["advise", "of_advice:one"]) == 1
    assert "Expected (loss_fn, params, batches) from of_advice:one" in capsys.readouterr().err
    assert main(["advise", "of_advice:with_aux", "--batches", "2", "--has-aux"]) == 0
    assert "Use bfloat16: noise" in capsys.readouterr().out
    assert main(["advise", "of_advice:what", "--card", "B300"]) == 1
    assert "Expected one of ['B200'" in capsys.readouterr().err
    assert main(["advise", "of_advice:what", "--batches", "1"]) == 1
    assert "at least 2 batches" in capsys.readouterr().err
