"""A scaled SGD step takes as long as PyTorch's fused one with `GradScaler`; one of Adam, longer.

Two frameworks disturb each other in one process, so they take turns, each turn in a process of its
own; a turn's time is the median over its rounds, and a pair of turns makes a ratio. PyTorch may be
in another environment, whose interpreter `--torch-python` names.
"""

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from . import parameters

PLAIN, SCALED = "torch, fused", "torch, fused, GradScaler"


# ── PyTorch's turn: nothing here imports jax ─────────────────────────────────────────────────


def torch_turn(
    tensors: str, kind: str, device: str, threads: int, rounds: int, shortest: float
) -> dict[str, Any]:
    """The seconds of a step of each variant, and what they depend on."""
    import torch

    if threads:
        torch.set_num_threads(threads)

    def optimizer() -> Any:
        params = [torch.tensor(v, device=device) for v in parameters.values(tensors, seed=0)]
        for param, grad in zip(params, parameters.values(tensors, seed=1), strict=True):
            param.grad = torch.tensor(grad, device=device)
        if kind == "sgd":
            return torch.optim.SGD(params, lr=1e-3, momentum=0.9, fused=True)
        return torch.optim.Adam(params, lr=1e-3, eps=1e-7, fused=True)

    scaler, scaled = torch.amp.GradScaler(device, init_scale=1.0), optimizer()
    scaler.scale(torch.ones((), device=device))  # makes its state

    def scaled_step() -> None:
        scaler.step(scaled)
        scaler.update()

    def sample(step: Callable[[], Any], calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    steps = {PLAIN: optimizer().step, SCALED: scaled_step}
    warm = [[sample(step, 1) for _ in range(3)][-1] for step in steps.values()]
    calls = math.ceil(shortest / min(warm)) or 1
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in list(steps) if turn % 2 == 0 else list(steps)[::-1]:
            sample(steps[name], 1)  # bears what the last variant has left
            samples[name].append(sample(steps[name], calls))
    seconds = {name: statistics.median(values) for name, values in samples.items()}
    environment = {"torch": torch.__version__, "torch_threads": torch.get_num_threads()}
    return {"environment": environment, "seconds": seconds}


# ── both in turns ────────────────────────────────────────────────────────────────────────────


def in_turns(case: Any, options: Any, missing: dict[str, str], say: Callable[[str], None]) -> Any:
    """What `harness.measure` returns, with a pair of turns in the place of a round."""
    from . import harness

    def jax_turn() -> dict[str, float]:
        nonlocal ours
        ours = harness.measure(case, options, missing, say)
        names = ours.rounds[0]
        return {name: statistics.median(r[name] for r in ours.rounds) for name in names}

    def other_turn() -> dict[str, float]:
        nonlocal theirs
        say("runs PyTorch")
        device = "cuda" if ours.environment["platform"] == "gpu" else "cpu"
        what = [case.labels["parameters"], case.labels["optimizer"], device]
        how = [options.torch_threads, options.rounds, options.shortest]
        theirs = call(options.torch_python, [*what, *how])
        return theirs["seconds"]

    ours: Any = None
    theirs: dict[str, Any] = {}
    rounds = []
    for turn in range(options.turns):
        order = [jax_turn, other_turn] if turn % 2 == 0 else [other_turn, jax_turn]
        one, other = (take() for take in order)
        rounds.append({name: (one | other)[name] for name in [PLAIN, SCALED, *ours.rounds[0]]})
    environment = ours.environment | theirs["environment"]
    compile_s = {PLAIN: 0.0, SCALED: 0.0, **ours.compile_s}
    return harness.Measured(environment, rounds, compile_s, missing)


def call(python: str, words: Sequence[Any], timeout: float | None = None) -> dict[str, Any]:
    """What a turn of PyTorch printed, in its own interpreter."""
    command = [python, "-m", "benchmarks.beside_torch", "--turn", json.dumps(words)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=root, timeout=timeout)
    return json.loads(done.stdout)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures float32 gradients: PyTorch wants them in the dtype of the parameters."""
    from . import harness, peers

    parser = harness.parser(__doc__)
    parser.add_argument("--turns", type=int, metavar="N", help="pairs of turns (5; quick: 2)")
    parser.add_argument("--torch-python", default=sys.executable, metavar="PATH")
    parser.add_argument(
        "--torch-threads", type=int, default=0, metavar="N", help="default: its own"
    )
    options = harness.parse(
        parser, argv, sets=("one resnet50 gpt2", "tiny20"), optimizers=("sgd adam", "sgd adam")
    )
    options.turns = options.turns or (2 if options.quick else 5)
    if subprocess.run([options.torch_python, "-c", "import torch"], capture_output=True).returncode:
        print(f"Not measured: {options.torch_python} has no PyTorch; see --torch-python.")
        return
    names = (peers.OPTAX, peers.OURS)
    cases = [
        peers.case(names, peers.OPTAX, *cell)._replace(baselines=[SCALED, PLAIN])
        for cell in product(options.sets, options.optimizers)
    ]
    harness.run(Path(__file__).stem, __doc__, cases, options, in_turns)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--turn"]:
        print(json.dumps(torch_turn(*json.loads(sys.argv[2]))))
    else:
        main()
