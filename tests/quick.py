"""What new processes get: nothing that JAX was told in this one, and programs compiled quickly."""

import os

import jax

# A later XLA may not know the others.
FLAGS = "--xla_backend_optimization_level=0" + (
    " --xla_cpu_use_fusion_emitters=false --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
    if jax.__version_info__ < (0, 11)
    else ""
)


def environment(flags="", **more):
    """The environment of a process with these flags of XLA, and more variables."""
    usual = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    return usual | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{FLAGS} {flags}"} | more
