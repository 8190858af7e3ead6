"""What must hold in every reachable state of a loss-scale rule, in plain Python and numpy.

Each invariant returns the state and the last inputs of a shortest path to what breaks it, or None.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .rules_search import Search, in_words

BAD = {"NaN": np.nan, "0": 0.0, "-1": -1.0, "inf": np.inf, "-inf": -np.inf}
MANY = 1000  # states
ROUNDING = 1e-5  # of a float32 product, relative
Broken = tuple[int, list[str]] | None


def stays_within_bounds(search: Search) -> Broken:
    """The scale is finite, positive and within its bounds."""
    low, high = search.machine.bounds
    scales = search.scales
    good = np.isfinite(scales) & (scales > 0) & (scales >= low) & (scales <= high)
    return first_of(~good)


def rises_again(search: Search) -> Broken:
    """From every state that is not at the maximum, finite steps raise the scale again."""
    machine, scales = search.machine, search.scales
    if not machine.period:
        return None
    top = np.nan_to_num(scales, nan=np.inf) >= min(machine.bounds[1], 2.0**127)
    found = []
    for number in search.inputs_where(lambda i: i.rises):
        highest, jump = scales, search.next[:, number]
        for _ in range(len(search).bit_length()):  # then 2**n steps are behind each state
            highest = np.fmax(highest, highest[jump])
            jump = jump[jump]
        stuck = ~(np.fmax(highest, scales) > scales) & ~top
        found.append(first_of(stuck, [f"{machine.inputs[number].name} for ever"]))
    return shortest(found)


def loses_few_batches(search: Search) -> Broken:
    """Under overflows above a threshold, at most one batch in `increment_period` is lost; with
    retries, none.

    A loss of batches that never ends is a cycle of states. Each lost batch counts as a period,
    each applied one as minus what is allowed; there must be no cycle with a positive sum.
    """
    machine = search.machine
    if not machine.period:
        return None
    low = machine.bounds[0]  # no scale that the rule may use is below
    free = search.inputs_where(lambda i: i.threshold == np.inf) if machine.mixes else []
    found = []
    for number in search.inputs_where(lambda i: 0 < i.threshold < np.inf and i.threshold >= low):
        used = [*free, number]
        thresholds = np.array([machine.inputs[n].threshold for n in used])
        bad = ~(search.scales[:, None] <= thresholds)
        applied = search.changed[:, used]
        weights = np.where(bad & ~applied, float(machine.period), -machine.allowed * applied)
        found.append(positive_cycle(search, np.array(used), weights))
    return shortest(found)


def positive_cycle(search: Search, used: np.ndarray, weights: np.ndarray) -> Broken:
    """A cycle over some inputs whose weights have a positive sum, by Bellman and Ford."""
    count, nexts = len(search), search.next[:, used]
    everyone, values = np.arange(count), np.zeros(count)
    best = np.zeros(count, int)
    after = np.full(count + 1, count)  # where the best sum comes from; the last state is nowhere
    for turn in range(64, count + 129):
        sums = weights + values[nexts]
        better = sums.max(axis=1) > values
        if not better.any():
            return None
        best[better] = sums.argmax(axis=1)[better]
        values = np.maximum(values, sums.max(axis=1))
        after[:-1][better] = nexts[everyone, best][better]
        if turn % 64 == 63:
            jump = after
            for _ in range(count.bit_length()):
                jump = jump[jump]
            if (jump < count).any():  # where the best sums run in a cycle, its sum is positive
                return cycle_from(search, int(jump[jump < count].min()), after, used[best])
    raise RuntimeError("A positive cycle exists, and was not found.")


def cycle_from(search: Search, start: int, after: np.ndarray, numbers: np.ndarray) -> Broken:
    """The cycle through a state, written from its first state."""
    states = [start]
    while after[states[-1]] != start:
        states.append(int(after[states[-1]]))
    place = states.index(min(states))
    states = states[place:] + states[:place]
    names = [search.machine.inputs[numbers[state]].name for state in states]
    return states[0], [f"({in_words(names)}) for ever"]


def survives_bad_data(search: Search) -> Broken:
    """A batch with a non-finite loss changes the scale by at most one factor."""
    machine, scales = search.machine, search.scales
    (low, high), (down, up) = machine.bounds, machine.factors
    with np.errstate(invalid="ignore"):
        least = np.clip(scales * down, low, high) * (1 - ROUNDING)
        most = np.clip(scales * up, low, high) * (1 + ROUNDING)
    found = []
    for number in search.inputs_where(lambda i: i.is_data):
        after = scales[search.next[:, number]]
        same = (after == scales) | ~np.isfinite(scales)
        far = ~same & ~((after >= least) & (after <= most))
        found.append(first_of(far, [machine.inputs[number].name]))
    return shortest(found)


def skips_completely(search: Search) -> Broken:
    """A skipped step changes no weight, no slot, and no counter but those of the scale."""
    machine, found = search.machine, []
    for number, given in enumerate(machine.inputs):
        bad = ~(search.scales <= given.threshold)
        if machine.retries and given.threshold > 0:
            continue  # the step may be applied at a lower scale
        found.append(first_of(bad & search.changed[:, number], [given.name]))
    return shortest(found)


def is_saved(search: Search) -> Broken:
    """Saving and loading any state is the identity. Of very many states those are loaded that
    together hold every value of every scalar: each scalar is stored by itself."""
    if search.machine.reload is None:
        return None
    leaves, chosen = search.leaves(), np.arange(len(search))
    if len(search) > MANY:
        firsts = [np.unique(leaf, return_index=True)[1] for leaf in leaves]
        chosen = np.unique(np.concatenate(firsts))
        leaves = [leaf[chosen] for leaf in leaves]
    pairs = zip(leaves, search.machine.reload(leaves), strict=True)
    bits = {1: np.uint8, 4: np.uint32}
    other = [a.view(bits[a.itemsize]) != b.view(bits[a.itemsize]) for a, b in pairs]
    found = first_of(np.any(other, axis=0), ["save and load"])
    return found and (int(chosen[found[0]]), found[1])


def recovers_from_a_bad_scale(search: Search) -> Broken:
    """A state that holds a bad scale recovers to the rule's first one."""
    machine, count = search.machine, len(search.machine.inputs)
    found: dict[tuple[int, str], list[str]] = {}  # the bad scales, by state and input
    for name, value in BAD.items():
        rows = search.rows.copy()
        rows[:, machine.scale] = np.float32(value).view(np.uint32)
        rows = search.after(rows)[0].reshape(len(search), count, -1)
        for number, given in enumerate(machine.inputs):
            if machine.retries and 0 < given.threshold < machine.start:
                continue  # a retry lowers the first scale further
            now = rows[:, number]
            after = search.scales_of(now)
            away = ~(np.abs(after / machine.start - 1) < ROUNDING)
            if away.any():
                found.setdefault((int(away.argmax()), given.name), []).append(name)
    if not found:
        return None
    (state, batch), names = min(found.items(), key=lambda item: (item[0][0], -len(item[1])))
    return state, [f"load a scale of {' or '.join(names)}", batch]


INVARIANTS: dict[str, Callable[[Search], Broken]] = {
    "bounds": stays_within_bounds,
    "rises again": rises_again,
    "few lost": loses_few_batches,
    "bad data": survives_bad_data,
    "skips": skips_completely,
    "saved": is_saved,
    "recovers": recovers_from_a_bad_scale,
}


def first_of(broken: np.ndarray, last: list[str] | None = None) -> Broken:
    """The first of the states, in the order of their paths' lengths, that breaks an invariant."""
    return (int(broken.argmax()), last or []) if broken.any() else None


def shortest(found: list[Any]) -> Broken:
    """The one with the shortest path."""
    return min((f for f in found if f), key=lambda f: f[0], default=None)


def broken_by(search: Search) -> dict[str, list[str]]:
    """The invariants that a machine breaks, each with a shortest path."""
    results = {name: check(search) for name, check in INVARIANTS.items()}
    return {name: [*search.path(r[0]), *r[1]] for name, r in results.items() if r}
