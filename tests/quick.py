"""What new processes get: nothing that JAX was told in this one but where programs are kept that
are compiled, and quickly."""

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
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return usual | kept | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{FLAGS} {flags}"} | more
