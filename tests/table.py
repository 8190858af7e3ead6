"""Every optimizer, with options that give it all of its slots: each promise is tested with each."""

import optax

import gainstage as gs

OPTIMIZERS = {
    "sgd": lambda **options: gs.SGD(0.1, momentum=0.9, nesterov=True, **options),
    "adam": lambda **options: gs.Adam(0.1, amsgrad=True, **options),
    "adamw": lambda **options: gs.AdamW(0.1, **options),
    "rmsprop": lambda **options: gs.RMSprop(0.1, momentum=0.5, centered=True, **options),
    "adagrad": lambda **options: gs.Adagrad(0.1, **options),
    "adadelta": lambda **options: gs.Adadelta(1.0, **options),
    "lion": lambda **options: gs.Lion(0.1, **options),
    "optax": lambda **options: gs.Optax(optax.adam(0.1), **options),
}
WITHOUT_OPTAX = {name: make for name, make in OPTIMIZERS.items() if name != "optax"}
