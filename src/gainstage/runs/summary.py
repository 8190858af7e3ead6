"""What a report shows of a run: its findings and its tables, for the terminal and the page."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gainstage._base.checks import as_power
from gainstage._scaling.step_telemetry import StepInfo
from gainstage.rules.adaptive import AdaptiveLossScale
from gainstage.runs.alarms import alarms_in
from gainstage.runs.findings import AUDITED, IF_DATA, XRAY
from gainstage.runs.recording import NOTHING, Run, measures, stretches
from gainstage.runs.rows import LONGEST, Rows, printable
from gainstage.runs.skip_causes import why_skipped
from gainstage.runs.telemetry import left_out, underflow_summary
from gainstage.training.audit import percentage

LOST_BITS = 3  # powers of two that bad data took from the scale, from which on it is said
SLACK = 600  # seconds between the first step and its record, which may wait for others
SHOWN_ROWS = 10  # rows of a table
ENDS = 6  # rows at each end of the table of skipped steps
DRAWN = 6  # curves of other numbers
CURVES = {
    "loss_scale": "Loss scale", "loss": "Loss", "grad_norm": "Norm of all gradients",
    "audit_gradient_error": "Error of all gradients in audits",
}  # fmt: skip
ERRORS = {f"audit_{kind}_error": kind for kind in AUDITED}
KNOWN = {*CURVES, *StepInfo._fields, "written_at", "audit_ok", "audit_far_off", *ERRORS}
WHY = {
    "overflow": "an overflow",
    "NaN": "gradients that were NaN at lower scales too",
    "bad loss": "a loss that was not finite before any scaling",
    "vetoed": "apply_if, though gradients were finite",
}
RECORD = (
    "No skipped step is kept in a step file beside the recording. To keep the next one, create "
    'recorder = gs.diagnostics.StepRecorder("bad.safetensors"), and after each step call '
    "recorder.write(n, gs.diagnostics.telemetry(opt_state), params, batch)."
)
SHARES = {
    "error": "Off", "unscaled_error": "Unscaled", "flushed": "Flushed", "subnormal": "Subnormal",
    "zero": "Zero",
}  # fmt: skip


class Summary(NamedTuple):
    """What a report shows of a run."""

    headline: dict[str, str]
    advice: list[str]
    curves: dict[str, str]  # the titles of the curves, by the names of their numbers
    causes: dict[str, np.ndarray]  # which steps were skipped, by cause
    skips: Rows
    numbers: Rows
    overflows: Rows
    underflow: Rows

    @property
    def tables(self) -> list[Rows]:
        """The tables, in the order in which they are shown."""
        return [self.skips, self.overflows, self.underflow, self.numbers]


class StepFile(NamedTuple):
    """A step file, as far as its description says."""

    step: int
    scale: float
    written_at: float  # seconds since the epoch


def summary(run: Run, step_files: Mapping[str, StepFile] = NOTHING) -> Summary:
    """Returns what a report shows of a run.

    Args:
        run: the recorded run.
        step_files: the step files beside it, by the commands that look into them.
    """
    kept = {command: file for command, file in step_files.items() if _is_of(run, file)}
    sentences = [_look(run, file, command) for command, file in kept.items()]
    alarms = alarms_in(run)
    if not any(alarm.kind == "growth" for alarm in alarms):
        sentences = [*_without_gradient(run), *sentences]
    if not any(IF_DATA in alarm.message for alarm in alarms):
        sentences += _lowered_in_vain(run)
    said = [*(alarm.message for alarm in alarms), *sentences]
    if not any(_is_bad(run, file) for file in kept.values()) and any(XRAY in s for s in said):
        sentences.append(RECORD)
    causes = {c: m for c, m in (why_skipped(run) | {"vetoed": run.vetoed}).items() if m.any()}
    others = [name for name in run.numbers if name not in KNOWN and _finite_values(run, name).size]
    drawn = {name: CURVES[name] for name in CURVES if _finite_values(run, name).size}
    drawn |= {name: printable(name) for name in others[:DRAWN]}
    return Summary(
        headline(run),
        [printable(alarm.message, 10 * LONGEST) for alarm in alarms] + sentences,
        drawn,
        causes,
        _skips(run, causes),
        _other_numbers(run, others),
        overflows(run),
        underflow(run),
    )


def _lowered_in_vain(run: Run) -> list[str]:
    """One sentence if steps that no scale makes finite have lowered the scale for good."""
    skips, scale = why_skipped(run), run.get("loss_scale")
    bad = (skips["NaN"] | skips["bad loss"])[:-1]
    before, after = scale[:-1], scale[1:]
    lowered = bad & (after < before) & (after > 0)
    bits = np.log2(before[lowered] / after[lowered]).sum()
    highest = np.max(scale, initial=0, where=np.isfinite(scale))
    back = scale[-1] > highest / 2**LOST_BITS
    if isinstance(run.rule, AdaptiveLossScale) or bits < LOST_BITS or back:
        return []
    return [
        f"Steps that no scale makes finite lowered it to {as_power(float(scale[-1]))}. They have "
        f"bad data, too high a learning rate, or an overflow in the forward pass. {XRAY}. "
        f"{IF_DATA}, given the loss, holds the scale; it skips the same steps."
    ]


def _without_gradient(run: Run) -> list[str]:
    """One sentence if all gradients are 0."""
    zeros = [known.get("zero") == 1 for known in run.tensors.values()]
    norms, scale = _finite_values(run, "grad_norm"), _finite_values(run, "loss_scale")
    if not (zeros and all(zeros)) and (not norms.size or norms.any()):
        return []
    higher = f" Take a higher scale than {as_power(scale[-1])}." if scale.size else ""
    if scale.size and (scale == 1).all():
        higher = (
            " A fixed scale of 1 does not scale: leave out the rule, and with_loss_scale takes "
            "gs.DynamicLossScale(), which starts at 2^15."
        )
    return [
        f"All gradients are 0: the loss does not depend on the parameters, or float16 has lost all "
        f"of it.{higher} To see which it is, keep any step with recorder.save(n, info, params, "
        f"batch) of a gs.diagnostics.StepRecorder, and take its X-ray."
    ]


def _look(run: Run, kept: StepFile, command: str) -> str:
    """A sentence with the command for a step file."""
    look = "Find its cause" if _is_bad(run, kept) else "Look into it"
    return printable(f"Step {kept.step} is kept in a step file. {look}: {command}", 10 * LONGEST)


def _is_bad(run: Run, kept: StepFile) -> bool:
    """Whether the step of a file was skipped."""
    return bool((run.skipped & (run.steps == kept.step)).any())


def _is_of(run: Run, kept: StepFile) -> bool:
    """Whether a step file is of this run: of a step and scale of it, and not older than it."""
    scales = run.get("loss_scale")[run.steps == kept.step]
    times = _finite_values(run, "written_at")
    is_older = bool(times.size) and kept.written_at < times.min() - SLACK
    return not is_older and any(scales == np.float32(kept.scale))


def headline(run: Run) -> dict[str, str]:
    """Formats the numbers of a run, by their labels; what was not recorded is left out."""
    numbers = measures(run)
    forms = {
        "Steps recorded": "{steps} ({first} to {last})",
        "Duration": "{duration}",
        "Skipped, of those recorded": "{skipped} ({skipped_share:.1%})",
        "Causes": "{causes}",
        "Finite, but skipped by apply_if": "{vetoed}",
        "Longest run of skipped steps": "{longest}",
        "Tries that were repeated at a lower scale": "{retried}",
        "Loss scale, first and last": "{scale_first}, {scale_last}",
        "Loss scale, lowest and highest": "{scale_lowest}, {scale_highest}",
        "Steps at the lowest": "{at_lowest} ({lowest_share:.1%})",
        "Times raised, lowered": "{raised}, {lowered}",
        "Loss, first and last tenth (median)": "{loss_first:.4g}, {loss_last:.4g}",
        "Norm of all gradients (median)": "{grad_norm:.4g}",
        "Audits, past a bound": "{audits}, {audits_off}",
        "Largest error in audits: loss, all gradients": "{audit_loss}, {audit_gradient}",
        "Largest error of a tensor in audits": "{audit_tensor}",
    }
    shown: dict[str, Any] = {
        k: as_power(v) if k.startswith("scale") else v for k, v in numbers.items()
    }
    shown["skipped_share"] = numbers.get("skipped", 0) / numbers["steps"]
    shown["lowest_share"] = numbers.get("at_lowest", 0) / numbers["steps"]
    shown |= _audits(run)
    counts = {cause: int(mask.sum()) for cause, mask in why_skipped(run).items()}
    if any(counts.values()):
        shown["causes"] = ", ".join(f"{n} {cause}" for cause, n in counts.items() if n)
    if (times := _finite_values(run, "written_at")).size > 1:
        minutes, seconds = divmod(round(np.ptp(times)), 60)
        shown["duration"] = f"{minutes // 60} h {minutes % 60} min {seconds} s"
    rows = circumstances(run)
    for name, form in forms.items():
        try:
            rows[name] = form.format(**shown)
        except KeyError:
            continue
    return rows


def _audits(run: Run) -> dict[str, Any]:
    """The audits of a run that compared it with float32, if there are any."""
    column = {kind: run.get(name) for name, kind in ERRORS.items()}
    there = np.isfinite(column["gradient"])
    if not there.any():
        return {}
    off = there & (run.get("audit_ok") == 0)
    worst = {kind: np.where(there, errors, -1).argmax() for kind, errors in column.items()}
    most = {kind: percentage(column[kind][place]) for kind, place in worst.items()}
    step = int(run.steps[worst["tensor"]])
    name = printable(run.audited.get(step, "?"))
    return {
        "audits": int(there.sum()),
        "audits_off": int(off.sum()),
        "audit_loss": most["loss"],
        "audit_gradient": most["gradient"],
        "audit_tensor": f"{most['tensor']} ({name}, step {step})",
    }


def circumstances(run: Run) -> dict[str, str]:
    """Formats the description of a run, as far as it is there."""
    versions = dict(run.made.get("versions", {}))
    device = versions.pop("device", "")
    counts = (f"{count} {dtype}" for dtype, count in run.made.get("dtypes", {}).items())
    rows = {
        "Rule": run.made.get("rule", ""),
        "Parameters": ", ".join(counts),
        "Device": device,
        "Versions": ", ".join(f"{name} {at}" for name, at in versions.items()),
    }
    return {name: printable(row) for name, row in rows.items() if row}


def _finite_values(run: Run, name: str) -> np.ndarray:
    """The finite numbers of a name."""
    return run.get(name)[np.isfinite(run.get(name))]


def _skips(run: Run, causes: Mapping[str, np.ndarray]) -> Rows:
    """The skipped steps, a row for those that follow each other: the first and the last."""
    scale, rows = run.get("loss_scale"), []
    parts = stretches(np.any([*causes.values(), np.zeros(len(scale), bool)], axis=0)).tolist()
    for start, stop in parts if len(parts) <= 2 * ENDS else parts[:ENDS] + parts[-ENDS:]:
        counts = {cause: mask[start:stop].sum() for cause, mask in causes.items()}
        which = {cause: n for cause, n in counts.items() if n}
        words = ", ".join(
            cause if len(which) == 1 else f"{n} {cause}" for cause, n in which.items()
        )
        steps = _range(run.steps[start], run.steps[stop - 1], str)
        scales = _range(float(scale[start]), float(scale[stop - 1]), as_power)
        rows.append((steps, f"{stop - start}", scales, words))
    if left := len(parts) - len(rows):
        rest = sum(stop - start for start, stop in parts[ENDS:-ENDS])
        rows.insert(ENDS, (f"and {left} more", f"{rest}", "", ""))
    notes = [f"{cause}: {mask.sum()} by {WHY[cause]}." for cause, mask in causes.items()]
    return Rows("Skipped steps", ("Steps", "Count", "Loss scale", "Cause"), rows, notes)


def _range(first: Any, last: Any, form: Any) -> str:
    return form(first) if first == last else f"{form(first)} to {form(last)}"


def _other_numbers(run: Run, names: Sequence[str]) -> Rows:
    """The other numbers that were logged."""
    columns = ("Number", "First", "Last", "Lowest", "Highest")
    rows = []
    for name in names:
        values = _finite_values(run, name)
        ends = (values[0], values[-1], values.min(), values.max())
        rows.append((printable(name), *(f"{number:.4g}" for number in ends)))
    return Rows("Other numbers", columns, *_cut(rows))


def _cut(rows: Sequence[Sequence[str]], notes: Iterable[str] = ()) -> tuple[Any, list[str]]:
    """The first rows, and notes, one of which counts the others."""
    more = [f"and {len(rows) - SHOWN_ROWS} more"] * (len(rows) > SHOWN_ROWS)
    return rows[:SHOWN_ROWS], [*more, *notes]


def overflows(run: Run) -> Rows:
    """The tensors with non-finite gradients, the most frequent first; equal ones in one row."""
    columns = ["Tensor", "Inf", "NaN", "First", "Last"]
    hit = {name: known for name, known in run.tensors.items() if known["first"] >= 0}
    alike: dict[tuple[float, ...], list[str]] = defaultdict(list)
    for name, known in hit.items():
        alike[tuple(known[key] for key in ("inf", "nan", "first", "last"))].append(name)
    headroom = any("headroom" in known for known in hit.values())
    rows = []
    for counts in sorted(alike, key=lambda counts: -max(counts[:2])):
        names = alike[counts]
        bits = min(hit[name].get("headroom", math.nan) for name in names)
        last = [f"{bits:.1f}" if math.isfinite(bits) else "-"] * headroom
        rows.append((_joint_name(names, len(run.tensors)), *(f"{n}" for n in counts), *last))
    notes = [
        "Inf, NaN: in how many skipped steps the tensor held one. First, last: which steps.",
        f"Tensors that were finite in every step: {len(run.tensors) - len(hit)}.",
    ]
    notes += [
        "Headroom: how often the scale could be doubled before this gradient overflows; values "
        "inside of the network may overflow earlier."
    ] * headroom
    columns += ["Headroom (bits)"] * headroom
    return Rows("Tensors that were not finite", columns, *_cut(rows, notes if rows else ()))


def _layer(name: str) -> str:
    return name.rpartition("/")[0] or name


def _joint_name(names: Sequence[str], of: int) -> str:
    """A name for some tensors: their own, all, or those of their layers."""
    if len(names) == 1:
        return printable(names[0])
    if len(names) == of:
        return f"all {of} tensors"
    layers = Counter(map(_layer, names))
    words = [
        printable(layer, 50) + f" ({n} of them)" * (n > 1) for layer, n in list(layers.items())[:3]
    ]
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    return f"{len(names)} tensors: {', '.join(words)}{more}"


def underflow(run: Run) -> Rows:
    """The tensors with flushed or subnormal elements, the worst of each layer."""
    lead, layers = _underflow_summary(run), Counter(map(_layer, run.tensors))
    kinds = [kind for kind in SHARES if lead or not kind.endswith("error")]  # else an older file
    worst: dict[str, tuple[str, ...]] = {}

    aside = _left_out(run.tensors)

    def badness(name: str) -> tuple[float, ...]:
        known = run.tensors[name]
        numbers = [known.get(kind, math.nan) for kind in ("error", "flushed", "subnormal")]
        return (name in aside, *-np.nan_to_num(numbers))

    for name in sorted(run.tensors, key=badness):
        known, layer = run.tensors[name], _layer(name)
        if layer not in worst and (known.get("flushed", 0) > 0 or known.get("subnormal", 0) > 0):
            shares = (_percent(known.get(kind, math.nan)) for kind in kinds)
            note = " (left out)" * (name in aside)
            worst[layer] = (f"{printable(name)}{note}", *shares, f"{layers[layer]}")
    notes = [
        "Off: the rounding error of float16 as a share of the tensor's root mean square. Unscaled: "
        "the same without loss scaling."
    ] * bool(lead)
    notes += [
        "Flushed: the share of elements that float16 makes 0. Subnormal: those that it holds with "
        "fewer digits. Zero: those that are 0 already. Worst of: how many tensors the layer has.",
    ]
    columns = ("Tensor", *(SHARES[kind] for kind in kinds), "Worst of")
    return Rows("Underflow", columns, *_cut(list(worst.values()), notes if worst else ()), lead)


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else "overflow" if math.isinf(share) else f"{share:.2%}"


def _underflow_summary(run: Run) -> list[str]:
    """Sentences on whether float16 loses what matters, if that was recorded."""
    tensors = {
        printable(name): k for name, k in run.tensors.items() if k.get("error", math.nan) >= 0
    }
    if not tensors:
        return []
    underflows = any(k.get("flushed", 0) > 0 or k.get("subnormal", 0) > 0 for k in tensors.values())
    error, unscaled = _known(tensors, "error"), _known(tensors, "unscaled_error")
    scale = _finite_values(run, "loss_scale")
    unscaled = {} if scale.size and scale[-1] == 1 else unscaled
    zeros = [name for name, k in tensors.items() if k.get("zero") == 1]
    return underflow_summary(error, unscaled, underflows, zeros, _left_out(tensors))


def _known(tensors: Mapping[str, dict[str, float]], kind: str) -> dict[str, float]:
    """The numbers of one kind, as far as they were recorded, by tensor."""
    return {name: known[kind] for name, known in tensors.items() if known.get(kind, -1) >= 0}


def _left_out(tensors: Mapping[str, dict[str, float]]) -> list[str]:
    """The tensors that the sentences on underflow leave out."""
    error, unscaled = _known(tensors, "error"), _known(tensors, "unscaled_error")
    return left_out(error, unscaled, _known(tensors, "norm_share"))
