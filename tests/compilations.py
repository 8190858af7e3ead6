"""Which programs are compiled, as JAX tells everybody who listens."""

import contextlib

import jax


@contextlib.contextmanager
def compilations():
    """A list to which the name of every program is added that is compiled from now on."""
    compiled = []

    def listen(event, seconds, fun_name="", **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
