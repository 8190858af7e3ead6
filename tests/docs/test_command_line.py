"""`gainstage`: the help of each command, and what it says of a wrong argument."""

import itertools
import re
import shlex
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import gainstage as gs
from gainstage import __main__ as command
from gainstage.diagnostics import JsonLines, StepRecorder

COMMANDS = ["demo", "doctor", "lint", "report", "xray"]
TRAIN = """
import jax, jax.numpy as jnp, optax, gainstage as gs
def make_model():
    return {"w": jnp.ones(64)}
@gs.autocast
def loss_fn(params, batch):
    return ((batch @ params["w"]) ** 2).sum()
def step(state, x):
    loss, extra, grads = state.value_and_grad(loss_fn)(x)
    return state.apply_gradients(grads)
def careless(state, x):
    return state.apply_gradients(jax.grad(loss_fn)(state.params, x))
def what_to_lint(step=step):
    return step, (gs.TrainState.create(make_model(), optax.sgd(0.1)), jnp.ones((64, 64)))
def what_is_wrong():
    return what_to_lint(careless)
def what_has_no_scale():
    return what_to_lint(lambda state, x: jax.grad(loss_fn)(state.params, x))
def what_has_a_callback():
    def hidden(state, x):
        loss, extra, grads = state.value_and_grad(loss_fn)(x)
        shape = jax.ShapeDtypeStruct((64,), "float32")
        scaled = grads["w"] * state.loss_scale
        return state.apply_gradients({"w": jax.pure_callback(lambda g: g, shape, scaled)})
    return what_to_lint(hidden)
"""


def help_of(words, columns, monkeypatch, capsys):
    """The help of a command in a terminal of so many columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as ended:
        command.main([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.fixture
def examples(monkeypatch, capsys):
    """Returns the examples of the help of a command, as they are written there."""

    def examples(*words):
        text = help_of(words, 80, monkeypatch, capsys)
        lines = text.partition("examples:\n")[2].splitlines()
        return [line.removeprefix("  ") for line in lines]

    return examples


def words_of(example):
    """The arguments of an example, without variables of the shell in front and a `>` behind."""
    before, _, after = re.sub(" > .*", "", example).partition("gainstage ")
    assert re.fullmatch(r"([A-Z_]+=\w+ )*", before), example
    return shlex.split(after)


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_each_example_of_a_help_is_a_line_of_its_own(words, columns, monkeypatch, capsys):
    """In a narrow terminal and a wide one the help ends with examples, one a line, that fit it."""
    text = help_of(words, columns, monkeypatch, capsys)
    head, _, tail = text.partition("\nexamples:\n")
    assert max(map(len, text.splitlines())) <= columns
    assert all(re.match(r"  ([A-Z_]+=\w+ )?gainstage ", line) for line in tail.splitlines())
    assert tail.count("gainstage ") == len(tail.splitlines()) >= 1
    assert len(head.split("\n\n")[1].splitlines()) > 1  # the description is wrapped all the same


@pytest.mark.parametrize("name", COMMANDS)
def test_each_help_names_the_exit_status(name, monkeypatch, capsys):
    """The help of a command says which exit status means what."""
    assert "exit status is 0, or 1 if" in " ".join(help_of([name], 80, monkeypatch, capsys).split())


def test_the_first_help_has_an_example_of_each_command(examples):
    """`gainstage --help` shows how each command is called, in a form that it takes."""
    assert sorted(words_of(example)[0] for example in examples()) == COMMANDS


@pytest.mark.parametrize("words", [(), *((name,) for name in COMMANDS)], ids=" ".join)
def test_the_examples_of_a_help_work_as_written(words, examples, tmp_path, monkeypatch, capsys):
    """Beside the files that they name, the examples end with status 0 and write what they say; of
    `gainstage demo`, which trains, the arguments are taken."""
    pytest.importorskip("matplotlib")
    (tmp_path / "train.py").write_text(TRAIN)
    zero = jnp.float32(0)
    told = gs.typing.StepInfo(jnp.array(False), jnp.float32(8), zero, zero, zero, zero)
    arguments = {"w": jnp.ones(64)}, jnp.full((64, 64), 3e4)
    assert StepRecorder(tmp_path / "bad.safetensors").write(0, told, *arguments)
    with JsonLines(tmp_path / "run.jsonl") as run:
        run.write(0, told, loss=1.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    monkeypatch.setattr("gainstage.demo.main", drawn)
    for example in examples(*words):
        arguments = words_of(example)
        assert command.main(arguments) == 0, (example, capsys.readouterr().err)
        for option, value in itertools.pairwise(arguments):
            if option == "--output":
                assert (tmp_path / value).stat().st_size > 100
    sys.modules.pop("train", None)


def drawn(output, *about):
    """The demo without its training: a file where the picture would be."""
    output.write_bytes(bytes(200))


# Wrong arguments, and a part of the message with the remedy.
MISTAKES = [
    ("", "--helpp", "unrecognized arguments: --helpp. See gainstage --help."),
    ("", "trian", "'trian' (choose from"),
    ("demo", "--steps 0", "Expected an integer >= 1; got 0. See gainstage demo --help."),
    ("demo", "--steps abc", "Expected an integer >= 1; got abc."),
    ("demo", "--seed -1", "Expected an integer >= 0; got -1."),
    ("demo", "--output", "expected one argument. See gainstage demo --help."),
    ("demo", "--output picture.txt", "Expected a .png, .pdf or .svg file; got picture.txt."),
    ("demo", "--output nowhere/a.png", "nowhere/a.png (No such file or directory). Create its fo"),
    ("demo", "now", "unrecognized arguments: now. See gainstage demo --help."),
    ("doctor", "--json", "unrecognized arguments: --json. See gainstage doctor --help."),
    ("report", "", "are required: RUN.jsonl. See gainstage report --help."),
    ("report", "''", "Expected the file of a run; got no name."),
    ("report", "a.jsonl b.jsonl", "unrecognized arguments: b.jsonl. See gainstage report --help."),
    ("report", "a.jsonl --output a.txt", "Expected a .html, .png, .pdf or .svg file; got a.txt."),
    ("report", "a.jsonl --output a.html", "got a.html (Is a directory). Choose another path."),
    ("xray", "bad.safetensors", "are required: --loss. See gainstage xray --help."),
    ("xray", "--loss train:loss_fn", "are required: STEP.safetensors. See gainstage xray --help."),
    (
        "xray",
        "bad.safetensors --loss train",
        "such as train:loss_fn for loss_fn in train.py; got train.",
    ),
    ("advise", "train.py:what", "such as train:what_to_advise for what_to_advise in train.py; got"),
    ("lint", "train.py:what", "such as train:what_to_lint for what_to_lint in train.py; got"),
    ("xray", "bad.safetensors --loss a/b.py:f", "Expected MODULE:FUNCTION, such as train:loss_fn"),
    ("xray", "bad.safetensors --loss ./train:f", "argument --loss: Expected MODULE:FUNCTION"),
    ("xray", "bad.safetensors --loss a:f --like make", "argument --like: Expected MODULE:FUNCTION"),
    (
        "xray",
        "bad.safetensors --loss a:f --using grad",
        "argument --using: Expected MODULE:FUNCTION",
    ),
]


@pytest.mark.parametrize(("name", "words", "message"), MISTAKES)
def test_a_wrong_argument_is_named_before_the_work(
    name, words, message, tmp_path, monkeypatch, capsys
):
    """A wrong argument ends with status 2 and a remedy on standard error; nothing is computed or
    written."""
    (tmp_path / "bad.safetensors").write_bytes(b"kept")
    (tmp_path / "a.html").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_run", lambda arguments: pytest.fail("computed"))
    with pytest.raises(SystemExit) as ended:
        command.main(shlex.split(f"{name} {words}"))
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "bad.safetensors"]
    assert (tmp_path / "bad.safetensors").read_bytes() == b"kept"


@pytest.mark.parametrize("words", ["demo", "doctor", "xray bad.safetensors --loss train:loss_fn"])
def test_a_missing_platform_is_named(words, tmp_path, monkeypatch, capsys):
    """If JAX finds no device, the status is 1 and the message has JAX's remedy; a step file is not
    called damaged."""
    pytest.importorskip("matplotlib")
    (tmp_path / "train.py").write_text("def loss_fn(x):\n    return x\n")
    zero = jnp.float32(0)
    told = gs.typing.StepInfo(jnp.array(False), jnp.float32(8), zero, zero, zero, zero)
    assert StepRecorder(tmp_path / "bad.safetensors").write(0, told, np.ones(3))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)

    def devices():
        raise RuntimeError("Unable to initialize backend 'tpu' (set JAX_PLATFORMS='')")

    monkeypatch.setattr("jax.devices", devices)
    assert command.main(words.split()) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "JAX_PLATFORMS=''" in said.err
    sys.modules.pop("train", None)


def test_a_missing_extra_is_named_before_the_work(tmp_path, monkeypatch, capsys):
    """Without the package that a page needs, the status is 1 and the extra to install is named."""
    for name in ("gainstage.runs.render", "gainstage.runs.report"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.chdir(tmp_path)
    assert command.main(["report", "run.jsonl"]) == 1
    said = capsys.readouterr()
    assert "jinja2" in said.err
    assert ".[report]" in said.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("what_to_lint", "Nothing found: each gradient is multiplied by the loss scale once"),
        ("what_has_no_scale", "Nothing to check: there is no loss scale of gainstage"),
        ("what_has_a_callback", "Nothing found, but 1 of the gradients cannot be followed"),
    ],
)
def test_lint_says_what_it_has_checked(function, said, tmp_path, monkeypatch, capsys):
    """That nothing is found does not mean the same without a scale, or beside a callback."""
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    assert command.main(["lint", f"train:{function}"]) == 0
    assert capsys.readouterr().out.startswith(said)
    sys.modules.pop("train", None)


def test_lint_prints_what_is_wrong_and_ends_with_1(tmp_path, monkeypatch, capsys):
    """A step that does not scale its loss is named with its line; what is no step says what is
    expected."""
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    assert command.main(["lint", "train:what_is_wrong"]) == 1
    said = capsys.readouterr().out
    assert said.startswith(
        "No loss was multiplied by the loss scale before the update at train.py:"
    )
    assert said.count("\n") == 1
    assert command.main(["lint", "train:make_model"]) == 1
    assert "Expected (step, arguments) from train:make_model" in capsys.readouterr().err
    sys.modules.pop("train", None)
