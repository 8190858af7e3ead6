"""Alarms: none in a healthy run, one of its own kind in every other."""

import pickle
import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gainstage as gs
from gainstage.diagnostics import Alarm, Alarms, JsonLines, Run, alarms_in, read_run, telemetry
from gainstage.optimizers import SGD
from gainstage.runs.skip_causes import why_skipped
from gainstage.runs.summary import summary

from oracles import AdaptiveAutomaton, scale_automaton

NAN, INF = float("nan"), float("inf")
LIMIT = 65504.0


class Follower:
    """The scale of a rule, step by step in plain Python."""

    def __init__(self, rule):
        self.scale, self.finite = getattr(rule, "initial_loss_scale", None), True
        if isinstance(rule, gs.AdaptiveLossScale):
            machine = AdaptiveAutomaton(rule)
            self.step = lambda *seen: setattr(self, "scale", machine.step(*seen))
        elif isinstance(rule, gs.DynamicLossScale):
            run = scale_automaton(rule, iter(lambda: self.finite, None))
            self.step = lambda *seen: self.moved(seen[0], run)
        else:
            self.scale, self.step = rule.loss_scale_value, lambda *seen: None

    def moved(self, finite, run):
        self.finite = finite
        self.scale, _ = next(run)


def simulated(rule, largest, inside=1.0, bad=()):
    """The records of a run whose largest gradients are given, and of which the largest number in
    the backward pass is `inside` times as large; the losses of bad steps are NaN."""
    followed, bad = Follower(rule), set(bad)
    for n, max_abs in enumerate(largest.tolist()):
        scale, data = followed.scale, n in bad
        finite = max_abs * inside * scale <= LIMIT and not data
        loss = NAN if data else 1.0
        followed.step(finite, np.float32(max_abs), data, INF if data else loss)  # as it is told
        yield {
            "step": n,
            "finite": finite,
            "loss_scale": scale,
            "grad_norm": max_abs * 30 if finite else NAN if data else INF,
            "max_abs": max_abs if finite else 0.0,
            "loss": loss,
        }


def watch(alarms, records):
    """Writes the records of a run."""
    for record in records:
        alarms.write(**record)


def kinds(records, rule):
    """The kinds of the alarms that ring in a run, in order."""
    found = []
    with Alarms(rule, on_alarm=found.append) as alarms:
        watch(alarms, records)
    for alarm in found:
        assert str(alarm).startswith(f"Step {alarm.step}: ")
        assert alarm.message.endswith(".")
    return [alarm.kind for alarm in found]


def healthy(seed):
    """A rule, and a run under it in which nothing is wrong: gradients that wander and jump by a
    factor of two or so, numbers inside that are larger, a start too high or low, a bad batch."""
    rng = np.random.default_rng(seed)
    n = int(rng.choice([400, 2500]))  # few of these: each is compiled
    start = 2.0 ** int(rng.choice([5, 16, 31]))
    period = int(rng.choice([100, 400, 2000]))
    rule = [
        gs.DynamicLossScale(start, period),
        gs.DynamicLossScale(start, period, hysteresis=2),
        gs.AdaptiveLossScale(start, period),
        gs.FixedLossScale(2.0**8),
    ][rng.integers(4)]
    inside = 2.0 ** rng.uniform(0, 8)
    first = LIMIT / inside / (start if start < 2.0**20 else 2.0**20) / 2.0 ** rng.uniform(-2, 5)
    if isinstance(rule, gs.FixedLossScale):
        first, inside = LIMIT / 2.0**8 / 2.0 ** rng.uniform(4, 8), 1.0
    wander = np.cumsum(rng.normal(scale=0.01, size=n)) - np.linspace(0, rng.uniform(0, 2), n)
    # With hysteresis, and jumps at the limit, more than a tenth would really be skipped.
    spread = 0.1 if getattr(rule, "hysteresis", 1) > 1 else 0.3
    jumps = rng.normal(scale=spread, size=n).clip(-1.0, 1.0)
    largest = first * np.exp2(wander.clip(-3, 1) + jumps)
    bad = rng.choice(n, size=rng.integers(0, 3), replace=False)
    return rule, simulated(rule, largest, inside, bad)


@pytest.mark.parametrize("runs", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_healthy_runs_are_silent(runs):
    """On random healthy runs under all rules there is no alarm."""
    for seed in range(runs):
        rule, records = healthy(seed)
        assert kinds(records, rule) == [], seed


def ones(n, value=1.0):
    return np.full(n, value)


ILL = {
    # A row of batches whose loss is NaN.
    "data": (gs.AdaptiveLossScale(2.0**14), ones(300), {"bad": range(100, 145)}),
    # Gradients that no float16 holds.
    "floor": (gs.DynamicLossScale(4.0, min_scale=1.0), ones(300, 1e5), {}),
    # The scale is raised onto its limit after each fifth step.
    "skips": (gs.DynamicLossScale(2.0**14, 5), ones(600), {"inside": 2.2}),
    # A fixed scale, and gradients that have grown up to it.
    "headroom": (gs.FixedLossScale(2.0**15), ones(300, 1.5), {}),
    # A scale that is far too low, and does not rise soon.
    "growth": (gs.DynamicLossScale(2.0**15), ones(300, 1e-8), {}),
}


def lazy(rule, n=400, distance=16, factor=2.0**12, loss=1e4):
    """The records of a run whose loss and gradients are far larger in each 16th step."""
    is_lazy = np.arange(n) % distance == distance - 1
    for record, large in zip(simulated(rule, np.where(is_lazy, factor, 1.0)), is_lazy, strict=True):
        yield record | {"loss": loss if large else 1.0 + record["step"] % 7 / 10}


LAZY = {
    "the scale comes down": gs.DynamicLossScale(2.0**15),
    "the scale recovers": gs.DynamicLossScale(2.0**15, 15),
    "adaptive": gs.AdaptiveLossScale(2.0**15, 15),
    "fixed": gs.FixedLossScale(2.0**10),
}


@pytest.mark.parametrize("name", LAZY)
def test_steps_of_one_kind_that_are_lost_ring_once(name):
    """A run that skips the steps with a far larger loss says of how many, and what to write."""
    found = []
    with Alarms(LAZY[name], on_alarm=found.append) as alarms:
        watch(alarms, lazy(LAZY[name]))
    (alarm,) = found
    assert alarm.kind == "lost"
    assert "of the last 4 steps whose loss was far larger than that of the steps" in alarm.message
    assert "gainstage.train_step(loss_fn, retries=True)" in alarm.message
    assert ("needs a lower loss_scale than" in alarm.message) == (name == "fixed")


def test_steps_that_are_lost_at_a_regular_distance_ring():
    """With a loss like any other, the distance tells them; without a recorded loss nothing does,
    as it could be bad data."""
    rule = gs.DynamicLossScale(2.0**15)
    records = list(lazy(rule, loss=1.0))
    assert kinds(records, rule) == ["lost"]
    assert kinds(without_loss(records), rule) == []


def test_steps_that_are_retried_in_vain_ring():
    """Skipped steps that the telemetry counts as retried are lost in spite of it."""
    rule = gs.DynamicLossScale(2.0**15, 15)
    records, tries = list(lazy(rule, loss=1.0)), 0
    assert kinds(records, rule) == []
    for record in records:
        tries += 0 if record["finite"] else 3
        record["retried_steps"] = tries
    found = []
    with Alarms(rule, on_alarm=found.append) as alarms:
        watch(alarms, records)
    (alarm,) = found
    assert alarm.kind == "lost"
    assert "4 times in the last 64 steps all retries failed" in alarm.message
    assert "gainstage.train_step(loss_fn, retries=True) goes on until a step fits" in alarm.message


def test_gradients_that_vanish_ring_under_any_rule():
    """If all gradients of 50 applied steps are 0, an alarm asks for a higher scale, also of a run
    that does not scale."""
    for rule in (gs.FixedLossScale(1.0), gs.DynamicLossScale()):
        found = []
        with Alarms(rule, on_alarm=found.append) as alarms:
            watch(alarms, simulated(rule, ones(60, 0.0)))
        (alarm,) = found
        assert alarm.kind == "growth"
        assert "all gradients of the last 50 applied steps are 0" in alarm.message
        assert "take a higher scale than" in alarm.message
    assert kinds(simulated(rule, ones(60)), rule) == []


@pytest.mark.parametrize("kind", ILL)
def test_each_alarm_rings_once_on_its_own(kind):
    """A run with one fault rings the one alarm that is meant for it, and rings it once."""
    rule, largest, how = ILL[kind]
    assert kinds(simulated(rule, largest, **how), rule) == [kind]


@pytest.mark.parametrize("kind", ["floor", "growth", "skips"])
def test_an_alarm_names_advise_where_a_precision_may_be_the_answer(kind):
    """So where gradients are beyond what float16 holds, at the lowest scale or all flushed to 0;
    not where a setting of the rule mends it."""
    rule, largest, how = ILL[kind]
    if kind == "growth":
        largest = ones(60, 0.0)
    said = []
    with Alarms(rule, on_alarm=said.append) as alarms:
        watch(alarms, simulated(rule, largest, **how))
    (alarm,) = said
    assert alarm.kind == kind
    assert ("gs.advise(loss_fn, params, batches)" in alarm.message) == (kind != "skips")


def test_a_scale_at_its_highest_or_a_fixed_one_cannot_grow():
    """The reason why the scale does not rise is told, with the setting that mends it."""
    for rule, words in (
        (gs.FixedLossScale(16.0), "it is fixed. Take loss_scale_value=2^30"),
        (gs.DynamicLossScale(16.0, max_scale=16.0), "max_scale=2^4. Take max_scale=2^30"),
    ):
        said = []
        with Alarms(rule, on_alarm=said.append) as alarms:
            watch(alarms, simulated(rule, ones(300, 2.0**-16)))
        (alarm,) = said
        assert words in alarm.message  # 2**-16 * 2**30 is one bit below the highest power


def without_loss(records):
    """The records of a run whose loss nobody wrote."""
    for record in records:
        del record["loss"]
        yield record


def test_nan_gradients_are_put_down_to_the_data_only_where_no_scale_would_help():
    """Without losses, after the scale has fitted: NaN is an overflow or bad data while the scale
    can still fall, and probably bad data where nothing of the gradients would be left."""
    rule = gs.DynamicLossScale(2.0**14, min_scale=2.0**-24)
    for last, expected in ((276, []), (298, ["overflow"]), (299, ["overflow", "data"])):
        records = simulated(rule, ones(last + 1), bad=range(270, last + 1))
        assert kinds(without_loss(records), rule) == expected


def test_an_alarm_rings_again_after_a_quiet_while():
    """A second storm, long after the first, is told again; one that follows at once is not."""
    rule = gs.AdaptiveLossScale(2.0**14)
    twice = [*range(100, 145), *range(900, 945)]
    assert kinds(simulated(rule, ones(1500), bad=twice), rule) == ["data", "data"]
    close = [*range(100, 112), *range(120, 140)]
    assert kinds(simulated(rule, ones(300), bad=close), rule) == ["data"]


def test_alarms_are_warnings_that_can_be_made_errors():
    """By default an alarm is warned of; as an error it leaves `write`, between two steps."""
    records = [*simulated(gs.DynamicLossScale(2.0**14), ones(20), bad=range(20))]
    with pytest.warns(Alarm, match="their loss was not finite") as caught, Alarms() as alarms:
        watch(alarms, records)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", Alarm)
        with pytest.raises(Alarm) as raised:
            watch(Alarms(every=1), records)
    assert (raised.value.kind, raised.value.step) == ("data", 7)


def test_a_recorded_run_has_the_same_alarms(tmp_path):
    """`alarms_in` a run that was read back finds what would have rung."""
    rule, largest, how = ILL["data"]
    with JsonLines(tmp_path / "run.jsonl") as lines:
        watch(lines, simulated(rule, largest, **how))
    (alarm,) = alarms_in(read_run(tmp_path / "run.jsonl"), rule)
    assert (alarm.kind, alarm.step) == ("data", 107)


def test_a_run_of_an_optimizer_is_watched():
    """The telemetry of a compiled step is what the alarms need: NaN data, and nothing else."""
    w = gs.optimizers.Variable(np.ones(4, np.float32))
    opt = gs.optimizers.LossScaleOptimizer(SGD(0.01), telemetry=True)
    opt.build([w])

    def step(x):
        return opt.minimize(lambda: ((w.value() * x) ** 2).sum(), [w]), telemetry(opt)

    program, found = gs.optimizers.jit(step, ([w], opt.variables), donate=True), []
    with Alarms(opt.rule, on_alarm=found.append) as alarms:
        for n in range(60):
            loss, info = program(jnp.float32(NAN if 20 <= n < 40 else 1.0))
            alarms.write(n, info, loss=loss)
    assert [(alarm.kind, alarm.step) for alarm in found] == [("data", 27)]


def test_between_looks_the_largest_gradient_moves_with_the_norm():
    """A gradient that comes close to the limit is noticed by its norm in steps that did not measure
    `max_abs`."""
    rule = gs.FixedLossScale(2.0**10)
    largest = np.append(np.full(20, 1.0), np.full(20, 40.0))
    records = list(simulated(rule, largest))
    assert kinds(records, rule) == ["headroom"]
    for step, record in enumerate(records):
        record["max_abs"] = float(largest[step]) if step % 34 == 0 else NAN
    assert kinds(records[:34], rule) == ["headroom"]


def recorded(n, **numbers):
    columns = {name: np.broadcast_to(np.asarray(x, float), n) for name, x in numbers.items()}
    return Run(np.arange(n), columns)


@pytest.mark.parametrize(
    "scale", [2.0**24, np.maximum(2.0 ** (15.0 - np.arange(300)), 2.0**-24)], ids=["fixed", "low"]
)
def test_a_run_without_one_applied_step_is_told(scale):
    """A report on a run of which nothing was applied says so, though it does not know the rule."""
    run = recorded(300, finite=0, loss=1, max_abs=0, grad_norm=INF, loss_scale=scale)
    assert any("the scale stayed at" in line for line in summary(run).advice)


def test_a_run_that_does_not_scale_is_left_alone():
    """A scale of 1 in every step is meant so; another that never moves may be a fixed one."""
    calm = {"finite": 1, "loss": 1, "max_abs": 2.0**-10, "grad_norm": 1}
    assert not summary(recorded(300, loss_scale=1, **calm)).advice
    (advice, *_) = summary(recorded(300, loss_scale=2, **calm)).advice
    assert "it has never been another. Take 2^24" in advice


def test_gradients_that_stay_nan_are_nan_though_the_scale_comes_back():
    """A rule that goes back to where it was has seen NaN at the lowest scale, too."""
    fell = 2.0 ** -np.concatenate([np.arange(13.0), np.zeros(7)])
    scale = np.concatenate([np.ones(40), fell, np.ones(40)])
    bad = np.concatenate([np.zeros(40), np.ones(20), np.zeros(40)]).astype(bool)
    run = recorded(100, finite=~bad, grad_norm=np.where(bad, NAN, 1), loss=1, loss_scale=scale)
    assert {name: mask.sum() for name, mask in why_skipped(run).items()} == {
        "overflow": 0, "NaN": 20, "bad loss": 0,
    }  # fmt: skip


def test_alarms_say_what_the_rule_can_do():
    """A fixed scale is told of its own argument; an alarm survives a pickle."""
    told = []
    with Alarms(gs.FixedLossScale(2.0**17), on_alarm=told.append) as alarms:
        for n in range(300):
            alarms.write(n, finite=n % 5 != 4, loss_scale=2.0**17, grad_norm=1.0, max_abs=1e-6)
    said = {alarm.kind: alarm.message for alarm in told}
    assert "take a lower loss_scale_value" in said["skips"]
    again = pickle.loads(pickle.dumps(told[0]))
    assert (type(again), again.kind, str(again)) == (Alarm, told[0].kind, str(told[0]))


def test_an_advised_scale_is_below_what_overflowed():
    """The growth alarm advises a scale below the lowest that overflowed, though the gradients of
    the parameters would bear a higher one, until a step is finite there."""
    rule = gs.DynamicLossScale(2.0**12, increment_period=10**6)

    def records(refuted):
        for n in range(2600):
            scale = 2.0**24 if n == 0 or (refuted and n == 1) else 2.0**12
            yield {"step": n, "finite": n > 0, "loss_scale": scale, "loss": 1.0,
                   "grad_norm": 1e-9 if n else INF, "max_abs": 1e-9 if n else 0.0}  # fmt: skip

    other = "or loss_scale=gs.AdaptiveLossScale()."
    for refuted, setting in ((False, "2^23"), (True, "2^32")):
        said = []
        with Alarms(rule, on_alarm=said.append) as alarms:
            watch(alarms, records(refuted))
        assert [alarm.kind for alarm in said] == ["growth"]
        assert f"Take initial_loss_scale={setting}, {other}" in str(said[0])


def test_the_report_knows_how_a_row_of_skips_ended():
    """Alarms of a recorded run are judged by what came after: a row that ended at a lower scale was
    an overflow, although it looked like bad data while it lasted."""
    rule = gs.DynamicLossScale(2.0**14, min_scale=2.0**-24)
    bad = range(100, 135)
    records = [*without_loss(simulated(rule, ones(200), bad=bad))]
    assert kinds(records, rule) == ["overflow", "data"]
    names = [name for name in records[0] if name != "step"]
    run = Run(np.arange(200), {n: np.array([r[n] for r in records], float) for n in names})
    (alarm,) = alarms_in(run, rule)
    assert (alarm.kind, alarm.step) == ("overflow", 107)
    assert "35 steps in a row" in alarm.message
    assert "finite again at 2^-21: an overflow" in alarm.message
    assert why_skipped(run)["overflow"].sum() == 35


@pytest.mark.filterwarnings("ignore:Skipped steps have lowered the loss scale")
@pytest.mark.parametrize(("every", "bad", "rings"), [(10, 2, True), (10, 0, False), (1, 0, False)])
def test_skips_without_a_record_ring(every, bad, rings):
    """Alarms that get every tenth step know from the counts that many of the others were skipped; a
    search for the first scale and a few bad batches are no problem."""
    rule, said = gs.DynamicLossScale(2.0**40, 50), []
    x = jnp.ones(4)
    state = gs.TrainState.create(jnp.ones(4), optax.sgd(0.1), loss_scale=rule, telemetry=True)
    step = gs.train_step(lambda w, x: (w.astype("float16") * x).astype("float32").sum())
    with Alarms(rule, on_alarm=said.append) as alarms:
        for n in range(500):
            is_bad = n % 10 < bad or n % 30 == 7
            state, loss = step(state, x * NAN if is_bad else x)
            if n % every == every - 1:
                alarms.write(n, state.info, loss=loss)
    assert [alarm.kind for alarm in said if alarm.kind == "skips"] == ["skips"] * rings
    if rings:
        assert "without a record" in str(said[0])


def test_alarms_of_an_unknown_place_point_to_the_x_ray():
    """What is skipped for a reason that telemetry cannot name is to be looked at in an X-ray."""
    for kind in ("data", "floor", "skips"):
        rule, largest, how = ILL[kind]
        said = []
        with Alarms(rule, on_alarm=said.append) as alarms:
            watch(alarms, simulated(rule, largest, **how))
        assert "gs.xray(loss_fn, state, *batch)" in str(said[0])


def test_infinities_in_some_tensors_alone_are_an_overflow():
    """NaN to the end of a run is not known to be an overflow, unless the last report has tensors
    that were infinite and others that were finite."""
    scale = 2.0 ** -np.arange(12.0)
    run = recorded(12, finite=np.arange(12) < 2, grad_norm=NAN, loss=1, loss_scale=scale)
    assert why_skipped(run)["NaN"].sum() == 10
    clean = {"inf": 0, "nan": 0, "first": -1, "last": -1}
    infinite = {"inf": 10, "nan": 0, "first": 2, "last": 11}
    for tensors, cause in (
        ({"a": infinite}, "NaN"),
        ({"a": infinite, "b": clean}, "overflow"),
        ({"a": infinite | {"nan": 10}, "b": clean}, "NaN"),
    ):
        assert why_skipped(run._replace(tensors=tensors))[cause].sum() == 10
