"""What may be wrong with a run: one table, of which alarms and the report print the same words."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from gainstage._base.checks import as_power
from gainstage._base.lost_steps import lost_steps, what_helps
from gainstage.runs.history import LONG_STREAK, MEMORY, WINDOW, History
from gainstage.runs.skip_causes import SkipCause, Streak, cause_of
from gainstage.runs.telemetry import ADVISE
from gainstage.training.audit import XRAY_IT, percentage
from gainstage.training.audited_run import ENOUGH

AUDITED = "loss", "gradient", "tensor"  # what an audit compares with float32
SHARE = 0.1  # the largest share of skipped steps that is no finding
IN_A_ROW = 16  # steps in a row that were retried
JUDGED = 16  # records between two searches for a kind of steps that is lost
ZEROS = 50  # applied steps in a row without any gradient
LOW = 16  # bits between the largest gradient and the limit
XRAY = "gs.xray(loss_fn, state, *batch) of such a step names the operation"
PASS_LOSS = (
    "update(..., value=loss) in an optax loop, apply(..., loss=loss); minimize does it itself"
)
IF_DATA = "If it is the data, loss_scale=gs.AdaptiveLossScale()"
HOLDS = f" {IF_DATA} that is given the loss ({PASS_LOSS}) would hold the scale."
LOSS_MISSING = (
    "The rule, AdaptiveLossScale, is not given the loss, so it cannot tell bad data from an "
    f"overflow. Pass it: {PASS_LOSS}"
)
IN_TEXTS = {"XRAY": XRAY, "ADVISE": ADVISE, "LOSS_MISSING": LOSS_MISSING, "XRAY_IT": XRAY_IT}

Facts = dict[str, Any] | None  # the fields of a text; None if it is not so


class Finding(NamedTuple):
    """Something that may be wrong with a run.

    Args:
        name: the kind of the alarm.
        test: a function of the history of a run that returns the fields of the text; None if
            nothing is wrong.
        text: what happened, and what to do.
        of_streak: whether it explains skipped steps in a row.
    """

    name: str
    test: Callable[[History], Facts]
    text: str
    of_streak: bool = False


def findings_on(history: History) -> tuple[dict[str, str], dict[str, str]]:
    """The texts of what is wrong with a run at its last step, by the names of the findings: the one
    on skipped steps in a row, and the others."""
    is_long = history.streak.length >= LONG_STREAK
    of_streak = _texts(history, of_streak=True) if is_long else {}
    history.explain(bool(of_streak))
    return of_streak, _texts(history, of_streak=False)


def _texts(history: History, of_streak: bool) -> dict[str, str]:
    """The text of the first finding of each name; of a streak, there is one finding."""
    texts: dict[str, str] = {}
    for finding in FINDINGS:
        is_due = finding.of_streak == of_streak and finding.name not in texts
        facts = finding.test(history) if is_due else None
        if facts is not None:
            texts[finding.name] = finding.text.format(**IN_TEXTS, **facts)
            if of_streak:
                return {finding.name: texts[finding.name] + _again(history)}
    return texts


# ── skipped steps in a row ───────────────────────────────────────────────────────────────────


def _by_cause(*causes: SkipCause, unless_fixed: bool = False, fitted: bool = False) -> Any:
    """A test of the cause of a streak; perhaps only of one whose scale may fall, and fitted
    before."""

    def test(history: History) -> Facts:
        streak = history.judged
        wanted = cause_of(streak) in causes and not (unless_fixed and history.is_fixed)
        return _words_for(streak) if wanted and (streak.fitted > 0 or not fitted) else None

    return test


def _words_for(streak: Streak) -> dict[str, str]:
    """What texts say of a streak."""
    scales = f"scales from {as_power(streak.first)} to {as_power(streak.low)}"
    if streak.low == streak.first:
        scales = f"a scale of {as_power(streak.first)}"
    steps = f"{streak.length} steps in a row were skipped because"
    overflow = "an overflow" if streak.inf else "probably an overflow"
    if not streak.recorded:
        overflow = "an overflow, or bad data, which a recorded loss would tell apart"
    look = "Look at the data and the learning rate, and record the loss."
    if streak.good_loss:
        look = "The loss was finite: look for 0/0 or sqrt(0) in the backward pass."
    fell = streak.low < streak.first and streak.ended is None
    return {
        "steps": steps,
        "skipped": f"{steps} gradients were {'NaN' if streak.nan else 'not finite'}, at {scales}",
        "place": " in the backward pass, for the loss was finite" if streak.good_loss else "",
        "end": as_power(streak.ended or 0.0),
        "outcome": _outcome(streak),
        "data": "" if streak.good_loss else "bad data, ",
        "known": overflow,
        "look": look,
        "falls": " The scale still falls, which ends an overflow." if fell else "",
    }


def _outcome(streak: Streak) -> str:
    """Says at which scale gradients were finite again, if they were."""
    if streak.ended is None or math.isnan(streak.ended):
        return ""
    again = f"Gradients were finite again at {as_power(streak.ended)}"
    if streak.ended < streak.first:
        return f"{again}: an overflow. "
    return f"{again}, so it was not the scale: probably bad data. "


def _again(history: History) -> str:
    """How often it happened in a recorded run."""
    same = history.same_cause
    if same is None or same.streaks == 1:
        return ""
    return f" This happened {same.streaks} times: {same.steps} steps in all."


def _bad_loss(history: History) -> Facts:
    streak = history.judged
    if cause_of(streak) is not SkipCause.BAD_LOSS:
        return None
    held = history.is_adaptive or streak.low == streak.first
    return _words_for(streak) | {"holds": "" if held else HOLDS}


def _gave_up_without_loss(history: History) -> Facts:
    """`AdaptiveLossScale` gave up as early as it does without a loss."""
    streak = history.judged
    lacks = streak.fitted > 0 and streak.gave_up and streak.nan and not streak.recorded
    return _words_for(streak) if history.is_adaptive and lacks else None


# ── the scale ────────────────────────────────────────────────────────────────────────────────


def _fell_for_a_loss(history: History) -> Facts:
    if not (history.is_adaptive and history.fell_for_a_loss):
        return None
    return {"before": as_power(history.scale_before), "scale": as_power(history.scale)}


def _at_floor(history: History) -> Facts:
    """What a skipped step is told whose scale does not fall, with a loss that may be finite."""
    streak = history.streak
    if history.finite or streak.bad_loss:
        return None
    mend = "their loss is finite, so" if streak.good_loss else "if their loss is finite,"
    return {"steps": streak.length, "scale": as_power(history.scale), "mend": mend}


def _fixed_too_high(history: History) -> Facts:
    is_long = history.streak.length >= LONG_STREAK
    return _at_floor(history) if history.is_fixed and is_long else None


def _stays(history: History) -> Facts:
    stays = history.streak.held >= 2 * LONG_STREAK and not history.is_explained
    return _at_floor(history) if history.rule is None and stays else None


def _at_its_lowest(history: History) -> Facts:
    low = history.streak.length >= 2 and history.scale <= history.floor
    return _at_floor(history) if low else None


def _no_headroom(history: History) -> Facts:
    cannot_fall = history.is_fixed or history.scale <= history.floor
    if not (cannot_fall and history.finite and history.largest[-1] > history.limit / 2):
        return None
    lower = "a lower loss_scale_value" if history.scale > history.floor else "a lower min_scale"
    return {"size": history.largest[-1], "scale": as_power(history.scale), "lower": lower}


def _other_rule(history: History) -> str:
    """The advice to try another rule, unless the run uses it or its rule is unknown."""
    is_other = history.rule is not None and not history.is_adaptive
    return ", or loss_scale=gs.AdaptiveLossScale()" if is_other else ""


def _no_gradient(history: History) -> Facts:
    recent = list(history.largest)[-ZEROS:]
    if len(recent) < ZEROS or any(recent):
        return None
    return {"n": ZEROS, "scale": as_power(history.scale), "other": _other_rule(history)}


def _too_low(history: History) -> Facts:
    """Gradients are far below the limit, and the scale does not rise."""
    scale, (lowest, when) = history.scale, history.overflowed
    learned = lowest <= 4 * scale and history.step - when <= MEMORY
    if learned or history.since_raised < WINDOW or any(history.skips):
        return None
    if len(history.largest) < WINDOW or any(map(math.isnan, history.largest)):
        return None
    largest = max(history.largest)
    stays = history.is_fixed or (history.rule is None and not history.ever_changed)
    if (stays and scale == 1) or not largest:
        return None  # the run does not scale, on purpose
    bits = int(math.log2(history.limit / largest))
    if bits < LOW:
        return None
    fits = min(scale * 2.0 ** (bits - 1), history.lowest_overflow / 2)
    setting = f"initial_loss_scale={as_power(fits)}"
    if scale >= history.ceiling and not history.is_fixed:
        why = f"it is at its highest, max_scale={as_power(scale)}"
        setting = f"max_scale={as_power(fits)}"
    elif history.is_fixed:
        why, setting = "it is fixed", f"loss_scale_value={as_power(fits)}"
    elif stays:
        why, setting = "it has never been another", as_power(fits)
    elif history.is_adaptive:
        why, setting = "an earlier overflow limits it", "a shorter increment_period"
    else:
        why = f"it has not risen for {history.since_raised} steps"
    setting = setting if fits > scale else "a shorter increment_period"
    facts = {"n": WINDOW, "bits": bits, "scale": as_power(scale), "why": why, "setting": setting}
    return facts | {"other": _other_rule(history)}


# ── steps ────────────────────────────────────────────────────────────────────────────────────


def _skipped_without_record(history: History) -> Facts:
    steps, skipped = history.unrecorded or (0.0, 0.0)
    if skipped <= SHARE * steps:
        return None
    return {"skipped": skipped, "steps": steps, "scale": as_power(history.scale)}


def _many_skips(history: History) -> Facts:
    skips = [why for why in history.skips if why]
    if len(history.skips) < WINDOW or len(skips) <= SHARE * WINDOW:
        return None
    mend = "raised too often: take a longer increment_period"
    if history.is_fixed:
        mend = "too high: take a lower loss_scale_value"
    bad, good = skips.count("bad loss"), skips.count("loss")
    if bad == len(skips):
        why = "The loss of those steps was not finite before any scaling"
    elif good == len(skips):
        why = f"Their loss was finite, so the scale is {mend}"
    else:
        why = (
            f"{bad} of them had a loss that was not finite, so no scale helps. Of those whose loss "
            f"is finite, the scale is {mend}"
        )
    return {"skips": len(skips), "n": WINDOW, "scale": as_power(history.scale), "why": why}


def _many_retries(history: History) -> Facts:
    row = history.retried_in_a_row
    return None if row < IN_A_ROW else {"n": row, "scale": as_power(history.scale)}


def _kind_is_lost(history: History) -> Facts:
    """Steps of one kind that are mostly skipped, though their loss is finite."""
    what = None if history.records % JUDGED else lost_steps(history.seen)
    if what is None:
        return None
    are_retried = any(step.is_retried for step in history.seen)
    advice = what_helps(
        retries=are_retried and None,
        is_fixed=history.is_fixed,
        hysteresis=getattr(history.rule, "hysteresis", 1),
    )
    return {"what": what, "advice": advice}


def _audited(history: History) -> Facts:
    """Audits in a row that are past a bound, or one that is far past it."""
    audits = history.audits
    is_far = bool(audits) and bool(audits[-1]["audit_far_off"])
    if not (is_far or len(audits) == ENOUGH):
        return None
    worst = audits[0]
    errors = {kind: percentage(float(worst[f"audit_{kind}_error"])) for kind in AUDITED}
    return {"at": worst["step"], "name": worst.get("audit_tensor", ""), **errors}


# ── all of them: of those with one name the first counts ─────────────────────────────────────

FINDINGS = (
    Finding(
        "data",
        _bad_loss,
        "{steps} their loss was not finite before any scaling: bad data, too high a learning rate, "
        "or an overflow in the forward pass. No scale helps that. {XRAY}.{holds}",
        of_streak=True,
    ),
    Finding(
        "loss",
        _gave_up_without_loss,
        "{skipped}. {LOSS_MISSING}. Record it too: write(step, info, loss=loss). {outcome}{XRAY}.",
        of_streak=True,
    ),
    Finding(
        "overflow",
        _by_cause(SkipCause.OVERFLOW),
        "{skipped}, and finite again at {end}: an overflow{place}. {XRAY}.",
        of_streak=True,
    ),
    Finding("data", _by_cause(SkipCause.NAN), "{skipped}. {outcome}{XRAY}.", of_streak=True),
    Finding(
        "data",
        _by_cause(SkipCause.NAN_BELOW, unless_fixed=True),
        "{skipped}. At the lowest hardly anything of them would be left in float16, so probably it "
        "is not the scale. {look} {XRAY}.",
        of_streak=True,
    ),
    Finding(
        "overflow",
        _by_cause(SkipCause.NAN_TO_THE_END, unless_fixed=True, fitted=True),
        "{skipped}, and that did not end: {data}a formula of the backward pass such as 0/0, or an "
        "overflow that only a still lower scale ends. {XRAY}.",
        of_streak=True,
    ),
    Finding(
        "overflow",
        _by_cause(SkipCause.LIKELY_OVERFLOW, unless_fixed=True, fitted=True),
        "{skipped}: {known}{place}.{falls} {XRAY}.",
        of_streak=True,
    ),
    Finding(
        "loss",
        _fell_for_a_loss,
        "the scale fell from {before} to {scale} after a loss that was not finite. {LOSS_MISSING}.",
    ),
    Finding(
        "floor",
        _fixed_too_high,
        "{steps} steps in a row were skipped, and the scale of {scale} cannot fall; {mend} it is "
        "too high: take a lower loss_scale_value. {XRAY}.",
    ),
    Finding(
        "floor",
        _stays,
        "{steps} steps in a row were skipped, and the scale stayed at {scale}; {mend} it is too "
        "high, or gradients are beyond what the dtype holds: let it fall lower, or lower the "
        "learning rate. {XRAY}. {ADVISE}.",
    ),
    Finding(
        "floor",
        _at_its_lowest,
        "the scale is at its lowest, {scale}, and steps are still skipped; {mend} gradients are "
        "beyond what the dtype holds: lower min_scale, or the learning rate. {XRAY}. {ADVISE}.",
    ),
    Finding(
        "skips",
        _skipped_without_record,
        "{skipped:g} of the last {steps:g} steps were skipped, most of them without a record; the "
        "scale is {scale}. The other alarms need a record of each step: "
        "alarms.write(n, gainstage.diagnostics.telemetry(opt_state), loss=loss).",
    ),
    Finding(
        "skips",
        _many_skips,
        "{skips} of the last {n} steps were skipped; the scale is {scale}. {why}. {XRAY}.",
    ),
    Finding(
        "retries",
        _many_retries,
        "each of the last {n} steps was computed more than once, because it overflowed at first. "
        "The scale is {scale}: start from a lower one, or take a longer increment_period.",
    ),
    Finding("lost", _kind_is_lost, "{what}. {advice} {XRAY}."),
    Finding(
        "audit",
        _audited,
        "in an audit of step {at} the loss is off by {loss} from float32, all gradients by "
        "{gradient}, and that of {name!r} by {tensor}, past the bounds. {XRAY_IT}",
    ),
    Finding(
        "headroom",
        _no_headroom,
        "the largest gradient times the scale is {size:.3g}, within one bit of overflow, and the "
        "scale of {scale} cannot fall. Take {lower}.",
    ),
    Finding(
        "growth",
        _no_gradient,
        "all gradients of the last {n} applied steps are 0. If that should not be, they are "
        "flushed: take a higher scale than {scale}{other}. {ADVISE}.",
    ),
    Finding(
        "growth",
        _too_low,
        "the largest gradient of the last {n} steps is {bits} bits below what float16 holds, so "
        "small ones may be lost. The scale is {scale}, and {why}. Take {setting}{other}.",
    ),
)
