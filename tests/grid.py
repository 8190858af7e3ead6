"""Optimizers and options to be tested together, and the same in float64 numpy."""

import itertools

import numpy as np

import gainstage as gs
from gainstage.optimizers import SGD, Adam

from oracles import Oracle

OPTIMIZERS = {
    "sgd": (SGD, {}),
    "momentum": (SGD, {"momentum": 0.9}),
    "nesterov": (SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (Adam, {}),
    "amsgrad": (Adam, {"amsgrad": True}),
}
RATE = 1 / 64
OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "clipnorm": {"clipnorm": 0.5},
    "clipvalue": {"clipvalue": 0.3},
    "global_clipnorm": {"global_clipnorm": 0.7},
    "ema": {"use_ema": True, "ema_momentum": 0.8},
    "overwrite": {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "all": {
        "weight_decay": 0.1,
        "global_clipnorm": 0.7,
        "use_ema": True,
        "ema_momentum": 0.8,
        "ema_overwrite_frequency": 3,
        "gradient_accumulation_steps": 2,
    },
}
GRID = list(itertools.product(OPTIMIZERS, OPTIONS))
SHAPES = [(4, 3), (5,), ()]


def bound(value):
    """A constraint that changes some of the initial weights."""
    return value.clip(-1, 1)


def make(optimizer, option="plain", dtype=np.float32, constraint=bound, **scale):
    """Variables, and the optimizer for them, wrapped if a scale is given."""
    cls, arguments = OPTIMIZERS[optimizer]
    rng = np.random.default_rng(1)
    variables = [
        gs.optimizers.Variable(rng.normal(size=s), dtype=dtype, name=f"v{i}", constraint=constraint)
        for i, s in enumerate(SHAPES)
    ]
    opt = cls(RATE, **arguments, **OPTIONS[option])
    opt = gs.optimizers.LossScaleOptimizer(opt, **scale) if scale else opt
    opt.build(variables)
    return variables, opt


def oracle_for(variables, optimizer, option):
    """The same in float64 numpy."""
    cls, arguments = OPTIMIZERS[optimizer]
    options = {**arguments, **OPTIONS[option], "constraint": bound}
    return Oracle([v.numpy() for v in variables], cls.__name__, RATE, **options)


def random_gradients(rng, scale=1.0, dtype=np.float32):
    return [np.array(dtype(scale) * np.asarray(rng.normal(size=s), dtype)) for s in SHAPES]


def values(*groups):
    return [[v.value() for v in group] for group in groups]
