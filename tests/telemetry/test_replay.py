"""Replay: what other rules would have done is what they do when the run is taken again."""

import itertools
import math

import jax
import numpy as np
import pytest
from compilations import compilations
from hypothesis import given, settings
from hypothesis import strategies as st

import gainstage as gs
from gainstage.diagnostics import Run
from gainstage.optimizers import SGD
from gainstage.runs.other_rules import advice, default_rules, replay
from gainstage.runs.skip_causes import why_skipped

from oracles import AdaptiveAutomaton, scale_automaton

STEPS = 160
NAN = math.nan
RULES = [
    gs.FixedLossScale(2.0**12),
    gs.DynamicLossScale(2.0**20, increment_period=7),
    gs.DynamicLossScale(2.0**10, increment_period=3, hysteresis=2),
    gs.DynamicLossScale(2.0**16, increment_period=20, multiplier=4.0, backoff_factor=0.5),
    gs.AdaptiveLossScale(2.0**18, increment_period=30, memory=10),
]
pairs = st.tuples(st.sampled_from(RULES), st.sampled_from(RULES))


def real_run(rule, limits, largest=None, bad=None):
    """A run whose step t overflows above `limits[t]`, and whose loss is NaN where `bad`, recorded
    by the rule's automaton in plain Python. The largest gradient is told of applied steps only."""
    bad = np.zeros(len(limits), bool) if bad is None else bad
    scales, finite = [], []

    def took(scale):
        for limit, spoiled in zip(limits, bad, strict=True):
            scales.append(scale())
            finite.append(scales[-1] <= limit and not spoiled)
            yield finite[-1]

    if isinstance(rule, gs.AdaptiveLossScale):
        machine = AdaptiveAutomaton(rule)
        for t, good in enumerate(took(lambda: machine.scale)):
            told = np.inf if bad[t] else 1.0  # as a rule gets a loss that is NaN
            machine.step(good, np.float32(largest[t]), bool(bad[t]), told)
    elif isinstance(rule, gs.FixedLossScale):
        list(took(lambda: rule.loss_scale_value))
    else:
        now = [rule.initial_loss_scale]
        for scale, _ in scale_automaton(rule, took(lambda: now[-1])):
            now.append(scale)
    numbers = {
        "loss_scale": np.array(scales),
        "finite": np.array(finite, float),
        "loss": np.where(bad, NAN, 1.0),
        "grad_norm": np.where(bad, NAN, np.where(finite, 1.0, np.inf)),
    }
    if largest is not None:
        numbers["max_abs"] = np.where(finite, np.float32(largest), 0)
    return Run(np.arange(len(limits)), numbers)


def until(flags):
    """Up to where the first of the flags is True, that step with it."""
    return int(np.argmax(flags)) + 1 if flags.any() else len(flags)


exponents = st.lists(st.integers(-4, 24), min_size=1, max_size=STEPS)


def over_time(few):
    """Limits of `STEPS` steps: each of a few for as long as the others."""
    return 2.0 ** np.repeat(few, math.ceil(STEPS / len(few)))[:STEPS]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(pairs, exponents, st.integers(0, 2**32 - 1))
def test_what_the_steps_tell_is_what_another_rule_meets(pair, few, seed):
    """Whatever the limits are, however they change: as long as the steps themselves tell what
    becomes of them, replay is the real rerun; and a scale that the record excludes is not used."""
    recorded, other = pair
    limits = over_time(few)
    rng = np.random.default_rng(seed)
    bad = rng.random(STEPS) < 0.05
    run = real_run(recorded, limits, 60000.0 / limits, bad)
    rerun = real_run(other, limits, 60000.0 / limits, bad)
    outcome = replay(run, {"other": other}).outcomes["other"]
    sure = until(~outcome.known)
    np.testing.assert_array_equal(outcome.scales[:sure], rerun.get("loss_scale")[:sure])
    np.testing.assert_array_equal(outcome.skips[: sure - 1], rerun.skipped[: sure - 1])
    assert (outcome.skips[bad]).all()
    told = outcome.known & ~bad
    np.testing.assert_array_equal(outcome.skips[told], (outcome.scales > limits)[told])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(pairs, st.integers(-4, 24), st.booleans())
def test_where_the_limit_is_constant_only_presumptions_err(pair, exponent, measured):
    """If all steps overflow above one scale, the steps around tell of it what they know: replay
    is the real rerun up to the first presumption."""
    limits = np.full(STEPS, 2.0**exponent)
    largest = 60000.0 / limits if measured else None
    rules = [rule for rule in pair if measured or not isinstance(rule, gs.AdaptiveLossScale)]
    for recorded, other in itertools.product(rules, rules):
        run, rerun = real_run(recorded, limits, largest), real_run(other, limits, largest)
        outcome = replay(run, {"other": other}).outcomes["other"]
        # of a step that overflowed nobody knows how large its gradients were
        inexact = outcome.presumed
        if isinstance(other, gs.AdaptiveLossScale):
            inexact = inexact | (run.skipped & ~outcome.skips)
        sure = until(inexact)
        np.testing.assert_array_equal(outcome.scales[:sure], rerun.get("loss_scale")[:sure])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(RULES), exponents, st.integers(0, 2**32 - 1))
def test_the_rule_that_recorded_does_it_again(rule, few, seed):
    """Replayed on its own record every rule takes exactly the recorded scales, and nothing of it
    is presumed."""
    bad = np.random.default_rng(seed).random(STEPS) < 0.2
    run = real_run(rule, over_time(few), 60000.0 / over_time(few), bad)
    outcome = replay(run, {"same": rule}).outcomes["same"]
    np.testing.assert_array_equal(outcome.scales, run.get("loss_scale"))
    np.testing.assert_array_equal(outcome.skips, run.skipped)
    assert outcome.known.all()
    assert not outcome.presumed.any()


def test_a_compiled_run_is_replayed_exactly(tmp_path):
    """Steps of a float16 network, recorded by `JsonLines`, read and replayed: the same scales."""
    from gainstage.diagnostics import JsonLines, read_run

    rule = gs.DynamicLossScale(2.0**20, increment_period=5)
    w = gs.Variable(np.linspace(0.5, 1.5, 16, dtype=np.float32))
    opt = gs.LossScaleOptimizer(SGD(0.0), rule=rule, telemetry=True)
    opt.build([w])

    def step(x):
        def loss():
            return (w.value().astype("float16") * x.astype("float16")).astype("float32").sum()

        return opt.minimize(loss, [w]), gs.telemetry(opt)

    program = gs.jit(step, ([w], opt.variables), donate=True)
    with JsonLines(tmp_path / "run.jsonl") as lines:
        for n in range(60):
            loss, info = program(np.full(16, NAN if n in (30, 31) else 1.0, np.float32))
            lines.write(n, info, loss=loss)
    run = read_run(tmp_path / "run.jsonl")
    again = replay(run, {"same": rule, "other": gs.FixedLossScale(8.0)})
    np.testing.assert_array_equal(again.outcomes["same"].scales, run.get("loss_scale"))
    skips = again.outcomes["other"].skips
    assert list(np.flatnonzero(skips)) == list(np.flatnonzero(why_skipped(run)["bad loss"]))
    assert list(np.flatnonzero(skips)) == [30, 31]


def recorded(scales, finite, **numbers):
    columns = {"loss_scale": np.array(scales, float), "finite": np.array(finite, float), **numbers}
    return Run(np.arange(len(scales)), {k: np.asarray(v, float) for k, v in columns.items()})


def test_bad_data_is_skipped_at_every_scale():
    """A loss of NaN, or gradients that stay NaN, are no scale's fault, and counted as such."""
    scales = [8192.0] * 5 + [8192 / 2.0**k for k in range(8)] + [8192.0] * 7
    finite = [1, 1, 0, 1, 1] + [0] * 8 + [1] * 7
    norm = [1, 1, NAN, 1, 1] + [NAN] * 8 + [1] * 7
    loss = [1, 1, NAN, 1, 1] + [1] * 8 + [1] * 7
    run = recorded(scales, finite, grad_norm=norm, loss=loss)
    outcome = replay(run, {"low": gs.FixedLossScale(2.0**-10)}).outcomes["low"]
    assert list(np.flatnonzero(outcome.skips)) == [2, *range(5, 13)]
    assert list(np.flatnonzero(outcome.bad)) == [2, *range(5, 13)]
    assert outcome.known.all()


@pytest.mark.parametrize(
    ("norm", "before", "after", "cause"),
    [
        (NAN, True, True, "overflow"),  # it ended at a lower scale
        (NAN, True, False, "NaN"),
        (NAN, False, False, "NaN"),  # nothing was ever applied
        (NAN, False, True, "overflow"),  # on the way to the first scale that fits
        (np.inf, True, True, "overflow"),
    ],
)
def test_a_row_of_nan_is_told_from_an_overflow(norm, before, after, cause):
    """Gradients that stay NaN to the end, while the scale falls by 2**6, are no overflow; a row
    that ends at a lower scale was one."""
    scales = [2.0**15] * (2 * before) + [2.0 ** (15 - k) for k in range(7)] + [2.0**8] * (2 * after)
    finite = [1] * (2 * before) + [0] * 7 + [1] * (2 * after)
    skips = why_skipped(recorded(scales, finite, grad_norm=np.where(finite, 1, norm)))
    assert {name: mask.sum() for name, mask in skips.items() if mask.any()} == {cause: 7}
    if cause == "NaN":  # one cause of each step: a loss that is bad too is the surer one
        loss = np.where(finite, 1, [NAN] * 4 + [1] * (len(finite) - 4))
        both = why_skipped(recorded(scales, finite, grad_norm=np.where(finite, 1, norm), loss=loss))
        assert sum(mask.astype(int) for mask in both.values()).max() == 1
    if norm != np.inf:  # of a shorter row one cannot know
        short = recorded(scales[:-3], finite[:-3], grad_norm=np.where(finite, 1, norm)[:-3])
        if not after:
            assert why_skipped(short)["overflow"].sum() == 4


def test_a_loss_that_was_not_written_is_no_bad_loss(tmp_path):
    """Where the loss is recorded of every tenth step only, the others tell nothing of it."""
    from gainstage.diagnostics import read_run

    lines = ['{"step": 0, "finite": 1, "loss_scale": 4, "loss": 1}',
             '{"step": 1, "finite": 0, "loss_scale": 4}',
             '{"step": 2, "finite": 0, "loss_scale": 2, "loss": "nan"}']  # fmt: skip
    (tmp_path / "run.jsonl").write_text("\n".join(lines) + "\n")
    run = read_run(tmp_path / "run.jsonl")
    causes = why_skipped(run)
    assert list(run.has("loss")) == [True, False, True]
    assert not run.has("max_abs").any()
    assert list(np.flatnonzero(causes["overflow"])) == [1]
    assert list(np.flatnonzero(causes["bad loss"])) == [2]


def test_the_largest_gradient_tells_which_scales_overflow():
    """With `max_abs` a higher scale is known to overflow from 65504 / max_abs on, not at it; in a
    run whose gradients are larger than float16 holds it tells nothing."""
    runs = {limit: recorded([4.0] * 3, [1] * 3, max_abs=[65504.0 / limit] * 3) for limit in (16, 2)}
    rules = {"at": gs.FixedLossScale(16.0), "above": gs.FixedLossScale(16.1)}
    found = replay(runs[16], rules).outcomes
    assert not found["at"].skips.any()
    assert found["at"].presumed.all()
    assert found["above"].skips.all()
    assert found["above"].known.all()
    assert not replay(runs[2], rules).outcomes["above"].skips.any()


def test_the_largest_gradient_is_estimated_from_the_norm_where_it_was_not_measured():
    """In a step without `max_abs` a rule gets an estimate from the norm, and no higher scale is
    known to overflow."""
    norms = [2.0, 4.0, 8.0, 2.0]
    held = recorded([4.0] * 4, [1] * 4, max_abs=[1.0, NAN, NAN, 3.0], grad_norm=norms)
    asked = recorded([4.0] * 4, [1] * 4, max_abs=[1.0, 2.0, 4.0, 3.0], grad_norm=norms)
    rules = {"adaptive": gs.AdaptiveLossScale(4.0), "high": gs.FixedLossScale(2.0**17)}
    one, other = (replay(run, rules).outcomes for run in (held, asked))
    assert list(one["adaptive"].scales) == list(other["adaptive"].scales)
    assert list(one["high"].known) == [True, False, False, True]
    assert other["high"].known.all()


def test_a_run_may_begin_between_two_measurements():
    """Steps before the first measured `max_abs` are estimated from the norm too."""
    norms = [2.0, 4.0, 8.0]
    begun = recorded([4.0] * 3, [1] * 3, max_abs=[NAN, NAN, 4.0], grad_norm=norms)
    whole = recorded([4.0] * 3, [1] * 3, max_abs=[1.0, 2.0, 4.0], grad_norm=norms)
    rules = {"adaptive": gs.AdaptiveLossScale(4.0)}
    one, other = (replay(run, rules).outcomes["adaptive"] for run in (begun, whole))
    assert list(one.scales) == list(other.scales)


def test_a_measured_value_is_never_replaced_by_an_estimate():
    """A measured `max_abs` that repeats while the norm doubles stays as it is."""
    norms = [2.0, 4.0, 8.0]
    repeats = recorded([4.0] * 3, [1] * 3, max_abs=[2.0] * 3, grad_norm=norms)
    rules = {"above": gs.FixedLossScale(2.0**15)}
    assert replay(repeats, rules).outcomes["above"].known.all()


def test_one_bad_batch_is_not_held_against_the_scale():
    """A scale that overflowed once among many steps that were finite at it is taken to fit those
    that were not tried at it: hysteresis is seen to save what one outlier costs."""
    scales = [2.0**15] * 60 + [2.0**14] * 100
    finite = [1] * 59 + [0] + [1] * 100
    rules = {"patient": gs.DynamicLossScale(hysteresis=2)}
    outcome = replay(recorded(scales, finite), rules).outcomes["patient"]
    assert outcome.skips.sum() == 1
    assert set(outcome.scales) == {2.0**15}
    assert 0 < outcome.presumed.sum() < 60
    assert outcome.bits > 0


def test_an_overflow_is_outvoted_by_finite_steps_within_a_hundred():
    """20 steps were finite at 2**16, and 70 steps later one was not: that was one bad batch, for
    all steps within 100 of two of the finite ones."""
    scales = [2.0**16] * 20 + [2.0**15] * 70 + [2.0**16] + [2.0**15] * 40
    finite = [1] * 90 + [0] + [1] * 40
    outcome = replay(recorded(scales, finite), {"fixed": gs.FixedLossScale(2.0**16)})
    skips = np.flatnonzero(outcome.outcomes["fixed"].skips)
    assert [step for step in skips if step <= 118] == [90]


def test_a_limit_that_was_met_again_and_again_is_presumed_between():
    """A run that overflows each time it is doubled: a rule that doubles ten times as often is not
    presumed to fit where nobody has tried."""
    period, limit = 400, 2.0**15
    run = real_run(gs.DynamicLossScale(2.0**15, period), np.full(4000, limit))
    outcome = replay(run, {"often": gs.DynamicLossScale(2.0**15, 40)}).outcomes["often"]
    rerun = real_run(gs.DynamicLossScale(2.0**15, 40), np.full(4000, limit))
    assert outcome.scales.max() <= 2.0**16
    after = int(np.argmax(run.skipped)) + 1
    assert abs(int(outcome.skips[after:].sum()) - int(rerun.skipped[after:].sum())) <= 2


def test_rules_that_measure_what_was_not_recorded_are_left_out():
    """Without `max_abs` the adaptive rule cannot be asked, and the reason is told."""
    plain = recorded([8.0] * 5, [1] * 5)
    found = replay(plain)
    assert found.left_out == {"AdaptiveLossScale()": "needs max_abs and any_nan, not recorded"}
    assert "DynamicLossScale()" in found.outcomes
    full = recorded([8.0] * 5, [1] * 5, max_abs=[1.0] * 5, grad_norm=[1.0] * 5)
    assert replay(full).left_out == {}


def test_default_rules_are_named_by_the_code_that_makes_them():
    """Each name, evaluated, is the rule; the recorded first scale is among the starts."""
    rules = default_rules(recorded([2.0**22, 1.0], [1, 1]))
    assert {name: eval(f"gs.{name}") for name in rules} == rules
    assert list(rules) == [
        "AdaptiveLossScale()", "DynamicLossScale(2.0**22)", "DynamicLossScale()",
        "DynamicLossScale(increment_period=200)", "DynamicLossScale(hysteresis=2)",
        "FixedLossScale(2.0**15)", "FixedLossScale(2.0**10)", "FixedLossScale(1.0)",
    ]  # fmt: skip
    assert len(default_rules(recorded([2.0**15], [1]))) == 7
    assert len(default_rules(recorded([NAN], [1]))) == 7


def test_advice_is_one_sentence_with_the_setting():
    """A rule that skips less than half as many steps at no lower a scale is advised; one that only
    scales less is not, and nothing is where little was skipped."""
    limits = np.full(100, 2.0**15)
    run = real_run(gs.DynamicLossScale(2.0**40), limits, 60000.0 / limits)
    assert run.skipped.sum() == 25
    assert advice(replay(run)) == [
        "DynamicLossScale() would have skipped 0 steps instead of 25: rule=gs.DynamicLossScale()"
    ]
    rules = {"FixedLossScale(1.0)": gs.FixedLossScale(1.0), "low": gs.DynamicLossScale(1.0)}
    assert advice(replay(run, rules)) == []
    assert advice(replay(real_run(gs.DynamicLossScale(2.0**17), limits))) == []


def test_the_rule_that_holds_the_scale_through_bad_data_is_advised():
    """If bad steps lowered the scale, the advice names the rule that holds it through bad data,
    unless it is in use. Nothing lowered a fixed scale."""
    limits, bad = np.full(120, 2.0**20), np.arange(120) % 10 == 9
    run = real_run(gs.DynamicLossScale(), limits, 60000.0 / limits, bad)
    (sentence,) = advice(replay(run), "DynamicLossScale()")
    assert sentence.startswith("Steps that no scale makes finite lowered it to 2^4. They have bad")
    assert "If it is the data, rule=gs.AdaptiveLossScale(), given the loss, holds" in sentence
    fixed = real_run(gs.FixedLossScale(1.0), limits, 60000.0 / limits, bad)
    assert advice(replay(fixed), "FixedLossScale(1.0)") == []
    assert advice(replay(run), "AdaptiveLossScale(2.0**10)") == []
    with pytest.raises(TypeError, match=r"replay for replayed; got Run\. Write advice\(replay"):
        advice(run)


def test_the_rule_in_use_is_not_advised():
    """Neither the rule of the run, nor `AdaptiveLossScale` in place of one with other arguments."""
    limits = np.full(100, 2.0**15)
    found = replay(real_run(gs.DynamicLossScale(2.0**40), limits, 60000.0 / limits))
    assert [sentence.split()[0] for sentence in advice(found)] == ["DynamicLossScale()"]
    (other,) = advice(found, in_use="DynamicLossScale()")
    assert other.endswith("rule=gs.DynamicLossScale(increment_period=200)")
    rules = {"AdaptiveLossScale()": gs.AdaptiveLossScale()}
    found = replay(real_run(gs.DynamicLossScale(2.0**40), limits, 60000.0 / limits), rules)
    assert advice(found)[0].endswith("rule=gs.AdaptiveLossScale(), given the loss")
    assert advice(found, in_use="AdaptiveLossScale(2.0**4)") == []


def test_steps_that_are_missing():
    """A hole of a few steps does no harm; of every tenth step alone nothing can be replayed."""
    run = recorded([8.0] * 100, [1] * 100)
    steps = np.arange(100)
    hole = run._replace(steps=np.where(steps < 50, steps, steps + 5))
    assert replay(hole).outcomes["FixedLossScale(2.0**10)"].scales.size == 100
    with pytest.raises(ValueError, match=r"Expected finite and loss_scale .* got 100 of 991\."):
        replay(run._replace(steps=10 * steps))
    with pytest.raises(ValueError, match="got 0 of 3"):
        replay(Run(np.arange(3), {"loss": np.ones(3)}))


numbers_of_a_run = given(st.lists(st.tuples(*[st.floats()] * 5), min_size=30, max_size=30))


@settings(max_examples=15, deadline=None, derandomize=True)
@numbers_of_a_run
def test_any_numbers_are_replayed_or_refused(rows):
    """Whatever numbers a file holds, scales are positive and finite, or a ValueError is raised."""
    check_replay(rows)


@pytest.mark.thorough
@settings(max_examples=75, deadline=None, derandomize=True)
@numbers_of_a_run
def test_many_numbers_are_replayed_or_refused(rows):
    """The same, five times as often."""
    check_replay(rows)


def check_replay(rows):
    names = ("loss_scale", "finite", "loss", "grad_norm", "max_abs")
    run = Run(np.arange(30), dict(zip(names, np.array(rows).T, strict=True)))
    for numbers in (run.numbers, run.numbers | {"loss_scale": np.full(30, 8.0)}):
        try:
            found = replay(run._replace(numbers=numbers))
        except ValueError:
            continue
        for outcome in found.outcomes.values():
            assert (np.isfinite(outcome.scales) & (outcome.scales > 0)).all()


def test_one_program_for_runs_of_one_length():
    """A rule is compiled once, not for every run that it is asked of."""
    rule = gs.DynamicLossScale(increment_period=12345)
    with compilations() as compiled:
        for scale in (2.0, 4.0):
            replay(recorded([scale] * 77, [1] * 77), {"rule": rule})
    assert compiled.count("jit(_scales)") == 1
    assert jax.config.jax_enable_x64 is False


def test_a_limit_that_falls_is_seen():
    """When several halvings in a row were needed, no scale that overflowed is taken to fit after
    them, though it did before; of the last of them one cannot know."""
    limits = np.repeat([2.0**20, 2.0**12], 150)
    run = real_run(gs.DynamicLossScale(2.0**20), limits)
    outcome = replay(run, {"high": gs.DynamicLossScale(2.0**22, hysteresis=2)}).outcomes["high"]
    assert set(outcome.scales[180:]) == {2.0**13}
    assert outcome.skips[150:].sum() == 14


@pytest.mark.parametrize("name", ["max_abs", "grad_norm"])
def test_what_is_presumed_follows_the_size_of_the_gradients(name):
    """Gradients that get 2**8 times smaller bear scales 2**8 times higher: what overflowed at first
    is presumed to fit at the end, and what nothing has come near is not."""
    size = 2.0 ** -np.linspace(0, 8, 1000)
    scales = [2.0**16] + [2.0**15] * 3 + [2.0**10] * 996
    run = recorded(scales, [0] + [1] * 999, **{name: size})
    rules = {k: gs.FixedLossScale(2.0**k) for k in (15, 16, 23)}
    skips = {k: outcome.skips for k, outcome in replay(run, rules).outcomes.items()}
    assert not skips[15].any()
    assert skips[16][:50].all()
    assert not skips[16][200:].any()
    assert skips[23][:870].all()
    assert not skips[23][880:].any()


def test_one_step_does_not_outvote_one():
    """Of a scale that overflowed once and was finite once nothing better is known than that it
    overflows; two finite steps outvote one that was not."""
    for count, skips in ((1, True), (2, False)):
        scales = [2.0**16] * (count + 1) + [2.0**15] * 3
        run = recorded(scales, [1] * count + [0] + [1] * 3)
        outcome = replay(run, {"high": gs.FixedLossScale(2.0**16)}).outcomes["high"]
        assert list(outcome.skips[count + 1 :]) == [skips] * 3


def test_the_steps_around_are_asked_before_the_size_of_a_gradient():
    """A step of large gradients, between others that were finite at a scale, is taken to be so,
    whatever the whole run says of its size."""
    scales = [2.0**10] * 20 + [2.0**4] + [2.0**10] * 20 + [2.0**12] + [2.0**4] * 100
    finite = [1] * 41 + [0] + [1] * 100
    norm = [1.0] * 20 + [32.0] + [1.0] * 121
    outcome = replay(recorded(scales, finite, grad_norm=norm), {"10": gs.FixedLossScale(2.0**10)})
    assert not outcome.outcomes["10"].skips.any()
