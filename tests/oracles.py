"""What the code is held against: a state machine in plain Python, and float64 numpy."""

import math

import numpy as np


def dynamic_step(rule, state, finite):
    """`DynamicLossScale`, as its description says it: scale, good and bad steps after a step."""
    scale, good, bad = state

    def move(factor):
        moved = scale * factor
        return max(moved, rule.min_scale) if factor < 1 else min(moved, rule.max_scale)

    good, bad = (good + 1, 0) if finite else (0, bad + 1)
    if good >= rule.increment_period:
        scale, good = move(rule.multiplier), 0
    if bad >= rule.hysteresis:
        scale, bad = move(rule.backoff_factor or 1 / rule.multiplier), 0
    return scale, good, bad


def scale_automaton(rule, finite_steps):
    """(scale, good steps) after each step of a run with `DynamicLossScale`."""
    state = rule.initial_loss_scale, 0, 0
    for finite in finite_steps:
        state = dynamic_step(rule, state, finite)
        yield state[:2]


def tensorflow_step(period, multiplier, state, finite):
    """`DynamicLossScale` of TensorFlow: (scale, good steps) after a step. Ours ends at 2**126."""
    scale, good = state
    if not finite:
        return max(scale / multiplier, 1.0), 0
    if good + 1 < period:
        return scale, good + 1
    return min(scale * multiplier, 2.0**126), 0


def keras_step(period, state, finite, lowest=2.0**-24):
    """Keras's rule: (scale, good steps) after a step. Ours stays within `lowest` and 2**126."""
    scale, good = state
    if not finite:
        return max(scale / 2, lowest), 0
    return (min(scale * 2, 2.0**126), 0) if good == period - 1 else (scale, good + 1)


def reachable(start, inputs, step, fold=lambda state: state):
    """All states that a machine can reach, each with the states after each of the inputs. `fold`
    makes one state of those that go on alike."""
    table, waiting = {}, [start]
    while waiting:
        state = waiting.pop()
        if state not in table:
            table[state] = [step(state, each) for each in inputs]
            waiting += map(fold, table[state])
    return table


def window(steps, period, rate, initial, grads):
    """SGD with windows of `steps` microbatches: the weight, the updates and the scale after each.

    A non-finite microbatch does not count in its window. The scale reacts to each. None is a finite
    microbatch that was turned down.
    """
    weight, updates, state = 0.0, 0, (initial, 0)
    total, good = 0.0, 0
    for gradient in grads:
        finite = gradient is None or math.isfinite(gradient)
        state = keras_step(period, state, finite)
        if gradient is not None and finite:
            total, good = total + gradient, good + 1
        if good == steps:
            weight, updates = weight - rate * total / steps, updates + 1
            total, good = 0.0, 0
        yield weight, updates, state[0]


class Oracle:
    """SGD and Adam of Keras 3 with every option, for one list of float64 arrays."""

    def __init__(self, weights, cls, learning_rate, **options):
        self.w = [np.asarray(w, np.float64) for w in weights]
        self.cls, self.lr, self.o = cls, learning_rate, options
        self.it = 0
        self.acc, self.avg, self.m, self.v, self.vhat = (
            [np.zeros_like(w) for w in self.w] for _ in range(5)
        )

    def step(self, grads):
        o, n = self.o, self.o.get("gradient_accumulation_steps") or 1
        self.acc = [a + g for a, g in zip(self.acc, grads, strict=True)]
        updates = self.it // n
        if (self.it + 1) % n == 0:
            self.update([a / n for a in self.acc], updates + 1)
            self.acc = [a * 0 for a in self.acc]
        if o.get("use_ema"):
            mu = o.get("ema_momentum", 0.99) if updates else 0.0
            self.avg = [mu * a + (1 - mu) * w for a, w in zip(self.avg, self.w, strict=True)]
            frequency = o.get("ema_overwrite_frequency")
            if frequency and (updates + 1) % frequency == 0:
                self.w = [a.copy() for a in self.avg]
        if constraint := o.get("constraint"):
            self.w = [constraint(w) for w in self.w]
        self.it += 1

    def update(self, grads, t):
        o, lr = self.o, self.lr
        if c := o.get("clipvalue"):
            grads = [np.clip(g, -c, c) for g in grads]
        if c := o.get("clipnorm"):
            grads = [g * c / max(np.linalg.norm(g), c) for g in grads]
        if c := o.get("global_clipnorm"):
            norm = math.sqrt(sum((g**2).sum() for g in grads))
            grads = [g * c / max(norm, c) for g in grads]
        for i, g in enumerate(grads):
            self.w[i] = self.w[i] * (1 - o.get("weight_decay", 0) * lr)
            self.w[i] = self.w[i] + getattr(self, self.cls)(i, g, t)

    def SGD(self, i, g, t):  # noqa: N802 - named as the class
        mu = self.o.get("momentum", 0)
        self.m[i] = mu * self.m[i] - self.lr * g
        return mu * self.m[i] - self.lr * g if self.o.get("nesterov") else self.m[i]

    def Adam(self, i, g, t):  # noqa: N802 - named as the class
        b1, b2 = 0.9, 0.999
        self.m[i] = b1 * self.m[i] + (1 - b1) * g
        self.v[i] = b2 * self.v[i] + (1 - b2) * g**2
        self.vhat[i] = np.maximum(self.vhat[i], self.v[i])
        v = self.vhat[i] if self.o.get("amsgrad") else self.v[i]
        alpha = self.lr * math.sqrt(1 - b2**t) / (1 - b1**t)
        return -alpha * self.m[i] / (np.sqrt(v) + 1e-7)


class AdaptiveAutomaton:
    """`AdaptiveLossScale`, as its description says it, one step after the other."""

    FIELDS = ("scale", "good", "bad", "ceiling", "before", "first", "largest")  # as in its state

    def __init__(self, rule):
        self.rule, self.scale = rule, rule.initial_loss_scale
        self.ceiling = self.before = rule.max_scale
        self.first = self.scale
        self.good = self.bad = 0
        self.largest = np.float32(0)

    def step(self, finite, max_abs, any_nan, loss):
        rule = self.rule
        if not finite:
            known, retries = self.largest > 0, self.bad > 0 and self.bad % 64 == 0
            in_vain = self.bad >= (3 if (any_nan and math.isnan(loss)) or not known else 12)
            probed = 1.0 if known else 2.0**-12
            if self.bad == 0:
                self.before, self.first = self.ceiling, self.scale
            self.good = 0
            if math.isinf(loss):
                if in_vain:
                    self.ceiling = self.before
                    self.scale = max(self.first * probed, rule.min_scale)
                return self.scale
            if retries:
                deeper = min(self.bad // 64, 10) + (0 if known else 2)
                tried = self.first * probed * 2.0 ** (-12 * deeper)
                self.scale = max(tried, rule.min_scale)
                self.ceiling = max(tried * 64, rule.min_scale)
            elif in_vain:
                self.ceiling = self.before
                self.scale = max(self.first * probed, rule.min_scale)
            else:
                self.ceiling = max((self.scale if known else self.first) / 2, rule.min_scale)
                self.scale = max(self.scale * (0.5 if known else 2.0**-12), rule.min_scale)
            self.bad += 1
            return self.scale
        faded = self.largest * np.float32(0.5 ** (1 / rule.memory))
        self.largest = max(np.float32(max_abs), faded)
        self.good, self.bad = self.good + 1, 0
        if self.good >= rule.increment_period:
            self.good, self.ceiling = 0, self.ceiling * 2
        self.ceiling = min(self.ceiling, rule.max_scale)
        wanted = self.scale * (16 if self.scale < rule.initial_loss_scale else 2)
        if self.largest > 0:
            quotient = rule.largest_number * 2.0**-rule.margin / float(self.largest)
            wanted = 2.0 ** min(max(math.frexp(quotient)[1] - 1, -126), 126)
        self.scale = max(min(wanted, self.ceiling), rule.min_scale)
        return self.scale

    def step_from(self, state, seen):
        """The state after a step from any state, as a tuple of `FIELDS`."""
        vars(self).update(zip(self.FIELDS, state, strict=True))
        self.step(*seen)
        return tuple(vars(self)[name] for name in self.FIELDS)
