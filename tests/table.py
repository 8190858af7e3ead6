"""Every optimizer, with options that give it all of its slots: each promise is tested with each."""

import optax

from gainstage.optimizers import SGD, Adadelta, Adagrad, Adam, AdamW, RMSprop, from_optax

OPTIMIZERS = {
    "sgd": lambda **options: SGD(0.1, momentum=0.9, nesterov=True, **options),
    "adam": lambda **options: Adam(0.1, amsgrad=True, **options),
    "adamw": lambda **options: AdamW(0.1, **options),
    "rmsprop": lambda **options: RMSprop(0.1, momentum=0.5, centered=True, **options),
    "adagrad": lambda **options: Adagrad(0.1, **options),
    "adadelta": lambda **options: Adadelta(1.0, **options),
    "optax": lambda **options: from_optax(optax.adam(0.1), **options),
}
WITHOUT_OPTAX = {name: make for name, make in OPTIMIZERS.items() if name != "optax"}
