"""What a step moves, starts and waits for on GPUs and TPUs, beside the same step in optax.

The programs are compiled without the devices, in processes of their own: `pytest -m programs`, with
the dependency group `programs` installed.
"""

import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("rich")
ROOT = Path(__file__).parents[2]

from benchmarks import lowered, parameters
from benchmarks.programs import CHECKED, OPTAX, Program

pytestmark = [pytest.mark.programs, pytest.mark.as_users]

LOOP, ONE_CALL = "ours, optax loop", "ours, train_step"
STATELESS, MINIMIZE = "ours, stateless_apply", "ours, minimize"
KINDS, DTYPES = ("sgd", "adam"), ("float32", "float16")
# The most bytes over those of optax. At least the gradients have to be read once more: 4 bytes an
# element over the 20 of SGD and the 28 of Adam, 2 over 18 and 26 if they are float16.
BYTES = {
    ("sgd", "float32"): 1.21,
    ("sgd", "float16"): 1.12,
    ("adam", "float32"): 1.15,
    ("adam", "float16"): 1.09,
}
SCALARS = 1.001  # the scale and its counters, and copies of small tensors


def output_of(device, *command):
    """What a command of Python that compiles for a device prints, in a process of its own."""
    if message := lowered.missing(device):
        pytest.skip(message)
    here = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    settings = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": here}
    settings["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # the process of pytest may have loaded it
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@functools.cache
def compiled(device, *words):
    """The programs of some cases, by title: each is compiled once."""
    with tempfile.TemporaryDirectory() as folder:
        output_of(
            device, "-m", "benchmarks.programs", "--devices", device, "--output", folder, *words
        )
        cases = json.loads((Path(folder) / "programs.json").read_text())["cases"]
    return {
        title: {name: Program(**numbers) for name, numbers in case["variants"].items()}
        for title, case in cases.items()
    }


def optimizer_step(device, tensors, kind, dtype):
    """The variants of an optimizer step."""
    words = ("--optimizers", *KINDS, "--dtypes", *DTYPES)
    words = words if tensors == "one" else ("--optimizers", kind, "--dtypes", dtype)
    found = compiled(device, "--sets", tensors, "--models", *words)
    return found[f"{device}, {tensors}, {kind}, {dtype}"]


def train_step(device, model):
    """The variants of a train step."""
    found = compiled(device, "--sets", "--models", model)
    return found[f"{device}, train {model}, adam, float16"]


def ours(variants):
    """Our variants by name."""
    return {name: found for name, found in variants.items() if name.startswith("ours")}


ONE = [
    (device, "one", kind, dtype)
    for device in ("h100", "a100", "v100", "t4")
    for kind in KINDS
    for dtype in DTYPES
]
MODELS = [
    ("h100", tensors, kind, dtype)
    for tensors in ("resnet50", "gpt2")
    for kind in KINDS
    for dtype in DTYPES
]
TRAINED = [(device, "mlp") for device in ("h100", "a100", "v100", "t4")] + [("h100", "transformer")]


@pytest.mark.parametrize("cell", ONE + MODELS, ids=", ".join)
def test_a_step_reads_the_gradients_once_more(cell):
    """It moves no other bytes than optax and that reading, and no more than optax's own check."""
    variants = optimizer_step(*cell)
    for name, found in ours(variants).items():
        assert found.moved <= BYTES[cell[2:]] * variants[OPTAX].moved, name
        assert found.moved <= SCALARS * variants[CHECKED].moved, name


@pytest.mark.parametrize("cell", ONE + MODELS, ids=", ".join)
def test_a_step_waits_for_no_conditional_and_stores_nothing(cell):
    """It has no conditional, temporary memory below 1 % of the parameters, and reuses the memory
    of weights and state."""
    variants = optimizer_step(*cell)
    parameters_ = 4 * sum(math.prod(shape) for shape in parameters.shapes(cell[1]))
    for name, found in ours(variants).items():
        assert found.conditionals == 0, name
        assert found.temp < 0.01 * parameters_, name
        assert found.aliased >= variants[OPTAX].aliased, name


@pytest.mark.parametrize("cell", ONE, ids=", ".join)
def test_a_step_on_one_tensor_starts_few_kernels_more(cell):
    """At most 4 more than optax in an optax loop, and 8 in the optimizers: reading the gradients,
    and scalars."""
    variants = optimizer_step(*cell)
    for name in (LOOP, ONE_CALL):
        assert variants[name].kernels <= variants[OPTAX].kernels + 4, name
    assert variants[STATELESS].kernels <= variants[OPTAX].kernels + 8


@pytest.mark.parametrize("cell", MODELS, ids=", ".join)
def test_a_step_on_a_model_starts_at_most_1_7_times_the_kernels_of_optax(cell):
    """Small gradients are read together."""
    variants = optimizer_step(*cell)
    for name, found in ours(variants).items():
        assert found.kernels <= 1.7 * variants[OPTAX].kernels, name


@pytest.mark.parametrize("cell", ONE + MODELS, ids=", ".join)
def test_an_optax_loop_starts_at_most_two_kernels_more_than_apply_if_finite(cell):
    """The rule of the scale has two scalars of its own."""
    variants = optimizer_step(*cell)
    for name in (LOOP, ONE_CALL):
        assert variants[name].kernels <= variants[CHECKED].kernels + 2, name


@pytest.mark.parametrize("cell", TRAINED, ids=", ".join)
def test_a_train_step_costs_what_optax_s_own_check_costs(cell):
    """It moves no more bytes, starts at most two kernels more, and waits for no conditional."""
    variants = train_step(*cell)
    for name, found in ours(variants).items():
        assert found.moved <= SCALARS * variants[CHECKED].moved, name
        assert found.kernels <= variants[CHECKED].kernels + 2, name
        assert found.conditionals == 0, name


@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_a_train_step_moves_at_most_4_percent_more_than_optax(model):
    """On an H100, in float16."""
    variants = train_step("h100", model)
    for name, found in ours(variants).items():
        assert found.moved <= 1.04 * variants[OPTAX].moved, name


@pytest.mark.parametrize("device", ["tpu4", "tpu256"])
def test_one_sum_over_the_mesh_decides_a_step(device):
    """Beside the collectives of optax there is one all-reduce of at most 8 bytes, whether weights
    are sharded in several ways or the batch is."""
    sharded = compiled(device, "--sets", "sharded", "--optimizers", "adam", "--dtypes", "float16",
                       "--models", "mlp")  # fmt: skip
    for variants in sharded.values():
        base = variants[OPTAX].collectives
        for name, found in ours(variants).items():
            assert len(found.collectives) <= len(base) + 1, (name, found.collectives)
            assert sum(found.collectives) <= sum(base) + 8, (name, found.collectives)


def test_the_check_of_sums_reads_gradients_and_sums_once():
    """With `optax.MultiSteps` the check reads each gradient and each sum once more, no more."""
    elements = 8 * (1024 * 1024 + 1024)
    output = output_of("h100", str(Path(__file__).with_name("sums.py")))
    for dtype, (alone, scaled) in json.loads(output).items():
        assert scaled - alone <= SCALARS * elements * (8 if dtype == "float32" else 6), dtype


def test_retries_cost_nothing_until_they_are_needed():
    """A step with retries moves what one without does, and a loss with a scale of its own reads
    gradients once more; temporaries are the same."""
    found = json.loads(output_of("h100", str(Path(__file__).with_name("retries.py"))))
    parameters = found.pop("parameters")
    for name, more in (("step", 0), ("gradient", parameters)):
        without, retried = found[name], found[f"{name}, retries"]
        assert (without["retries"], retried["retries"]) == (0, 1)
        assert retried["moved"] <= SCALARS * (without["moved"] + more), name
        assert retried["temp"] <= 1.1 * without["temp"], name


def test_a_model_with_a_plan_costs_no_more_than_one_written_in_float16():
    """With a measured plan it moves and stores no more than the model by hand. A weight is cast
    once, also under default rules, and a normalisation's factors no more often than by hand."""
    found = json.loads(output_of("h100", str(Path(__file__).with_name("casts.py"))))
    for name, arms in found.items():
        by_hand, plan, default = arms["by hand"], arms["plan"], arms["autocast"]
        assert plan["moved"] <= SCALARS * by_hand["moved"] < arms["float32"]["moved"], name
        assert plan["temp"] <= SCALARS * by_hand["temp"] < arms["float32"]["temp"], name
        assert default["casts"] == 1, name
        assert plan["casts"] <= by_hand["casts"], name
        for cast in (plan, default):
            assert cast["casts of factors"] <= by_hand["casts of factors"], name


def test_float8_products_are_multiplied_in_float8_and_save_memory(tmp_path):
    """All 27 products of a wide language model read float8; temporaries are at most 0.85 of
    float16's, bytes at most 1.08. A narrow one has the program of float16."""
    file, command = tmp_path / "found.json", "benchmarks.float8_programs"
    output_of("h100", "-m", command, "--widths", "4096", "256", "--json", str(file))
    found = json.loads(file.read_text())["widths"]
    half, small = found["4096"]["float16"], found["4096"]["float8"]
    assert small["products"] == 27
    assert half["products"] == 0
    assert small["temp"] <= 0.85 * half["temp"]
    assert small["moved"] <= 1.08 * half["moved"]
    assert found["256"]["float8"] == found["256"]["float16"]


@pytest.mark.parametrize("device", ["tpu4", "h100"])
def test_planned_variables_on_a_topology(device):
    """An optimizer is built for the mesh of a topology, and its step compiled."""
    output_of(device, str(Path(__file__).with_name("planned.py")), device)


def test_a_run_for_256_chips_is_sized_on_a_laptop(tmp_path):
    """The code of the page on sharded optimizers prints what stands below it."""
    page = (ROOT / "docs" / "sharded-optimizers.md").read_text()
    ((code, printed),) = re.findall(r"```py\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "size.py"
    script.write_text(code)
    assert output_of("tpu256", str(script)) == printed
