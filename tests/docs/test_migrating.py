"""The migration guide: a test in `tests/documents` holds every row."""

import inspect
import re
from pathlib import Path

import pytest

import gainstage as gs
from gainstage.compat import dtensor, experimental, tf2, v1

from rows import rows_held

GUIDE = (Path(__file__).parents[2] / "docs/migrating.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", GUIDE, re.M))


def section_key(title):
    """The key of a section whose tables have rows: its number, or that of the differences."""
    if title == "What is different on purpose":
        return "differences"
    return int(title[0]) if title[0].isdigit() else None


def tables(text):
    """The lines of a section's tables, without those of "From DTensor to JAX", which map no API."""
    return re.findall(r"^\|.*\|$", text.partition("### From DTensor to JAX\n")[0], re.M)


def rows_of(cell):
    """The rows that a first cell stands for: it may list several names, or errors of one type."""
    kind, cell = re.fullmatch(r"((?:`\w+Error`|no error|warning|new): )?(.*)", cell).groups("")
    names = re.fullmatch(r"`[^`]+`(, `[^`]+`)*", cell)
    cells = re.findall(r"`[^`]+`", cell) if names else cell.split("; ")
    return [(kind + each).replace("`", "") for each in cells]


ROWS = [
    (section_key(title), *(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]))
    for title, text in SECTIONS.items()
    if section_key(title) is not None
    for line in tables(text)
    if not re.match(r"\| (there|what) \||\|---", line)
]
KEYS = [(section, key) for section, cell, *_ in ROWS for key in rows_of(cell)]


def test_every_row_is_there_once_and_has_a_test():
    """No row of the page is without a test in `tests/documents`, and no test names another row."""
    assert len(KEYS) == len(set(KEYS))
    assert set(KEYS) == set(rows_held())


# What the five documents name: arguments, attributes and methods.
OPTION_NAMES = """weight_decay clipnorm clipvalue global_clipnorm use_ema ema_momentum
ema_overwrite_frequency"""
METHOD_NAMES = """add_variable add_variable_from_reference apply apply_gradients assign assign_add
assign_sub build exclude_from_weight_decay finalize_variable_values from_config get_config
load_own_variables save_own_variables scale_loss set_weights stateless_apply update_step"""
DOCUMENTED = {
    1: f"""inner_optimizer initial_scale dynamic_growth_steps name {OPTION_NAMES} loss_scale_factor
        gradient_accumulation_steps {METHOD_NAMES} check_finite""",
    2: """opt loss_scale use_locking name compute_gradients apply_gradients grads_and_vars
        global_step minimize ValueError RuntimeError""",
    3: f"""learning_rate momentum nesterov amsgrad gradients_clip_option ema_option jit_compile name
        mesh {OPTION_NAMES} {METHOD_NAMES} compute_gradients minimize""",
    4: """optimizer loss_scale dynamic dynamic_counter dynamic_growth_steps initial_scale
        inner_optimizer learning_rate lr get_config ValueError""",
    5: """DynamicLossScale LossScale FixedLossScale initial_loss_scale increment_period multiplier
        loss_scale_value __call__ update get_config from_config""",
}
CLASSES = {
    1: [gs.optimizers.LossScaleOptimizer],
    2: [
        v1.MixedPrecisionLossScaleOptimizer,
        v1.GradientDescentOptimizer,
        v1.MomentumOptimizer,
        v1.AdamOptimizer,
    ],
    3: [dtensor.SGD, dtensor.GradientsClipOption, dtensor.EMAOption],
    4: [tf2.LossScaleOptimizer, experimental.LossScaleOptimizer],
    5: [experimental.FixedLossScale, experimental.DynamicLossScale],
}


def names_there(section):
    """The identifiers in code in the first column of a section's tables."""
    return {
        name
        for number, cell, *_ in ROWS
        if number == section
        for code in re.findall("`(.*?)`", cell)
        for name in words(code)
    }


def names_here(section):
    """The identifiers in the code with which the second column begins: ours, before any note."""
    return {
        name
        for number, _, cell, *_ in ROWS
        if number == section
        for code in re.findall("^`(.*?)`", cell)
        for name in words(code)
    }


def words(code):
    return re.findall(r"[A-Za-z_]\w*", code)


@pytest.mark.parametrize("section", DOCUMENTED)
def test_every_documented_name_has_a_row(section):
    """Every argument, attribute and method that a document names is in the column of its names."""
    assert set(DOCUMENTED[section].split()) - names_there(section) == set()


@pytest.mark.parametrize("section", CLASSES)
def test_every_argument_of_ours_has_a_row(section):
    """Every argument of the classes of a section is named in its tables, and not only in a note."""
    named = names_there(section) | names_here(section)
    for cls in CLASSES[section]:
        assert set(inspect.signature(cls).parameters) - named == set(), cls
