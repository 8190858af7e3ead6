"""Writers, what they write, and the report on it."""

import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gainstage as gs
from gainstage.__main__ import main
from gainstage.diagnostics import JsonLines, Writer, described, read_run
from gainstage.diagnostics.runs import measures


def info(finite=True, scale=8.0, skipped=0, norm=1.5):
    return gs.StepInfo(jnp.array(finite), jnp.float32(scale), jnp.int32(skipped), jnp.float32(norm))


class Kept(Writer):
    """Keeps what it is to put, batch by batch."""

    def __init__(self, every):
        super().__init__(every)
        self.batches = []

    def put(self, records):
        self.batches.append(records)


def test_numbers_are_read_many_steps_at_a_time():
    """Nothing is read before `every` steps are there; the rest comes when the writer closes."""
    with Kept(every=3) as kept:
        for step in range(4):
            with jax.transfer_guard("disallow") if step != 2 else jax.transfer_guard("allow"):
                kept.write(step, loss=1.0)
        assert [len(batch) for batch in kept.batches] == [3]
    assert [len(batch) for batch in kept.batches] == [3, 1]
    assert kept.batches[1] == [{"step": 3, "loss": 1.0}]


def test_a_number_that_was_donated_is_told():
    """An array whose memory a later step got is an error that says what to do."""
    kept, scale = Kept(every=10), jnp.float32(1.0)
    kept.write(0, scale=scale)
    jax.jit(lambda x: x + 1, donate_argnums=0)(scale)
    with pytest.raises(ValueError, match=r"Expected numbers that live .* got scale, which was"):
        kept.flush()


def test_what_is_no_scalar_is_told():
    """A vector, or a step that is no integer, is refused where it enters."""
    with pytest.raises(TypeError, match=r"Expected a scalar for loss; got shape \(2,\)"):
        Kept(1).write(0, loss=jnp.ones(2))
    for wrong in ([1.0], "high", None):
        with pytest.raises(TypeError, match="Expected a number for loss"):
            Kept(1).write(0, loss=wrong)
    with pytest.raises(TypeError, match="for step"):
        Kept(1).write("0")
    with pytest.raises(ValueError, match="every"):
        Kept(0)


def test_json_lines_come_back(tmp_path):
    """What is written is valid JSON, and is read as it was, infinities and gaps included."""
    path = tmp_path / "run.jsonl"
    with JsonLines(path) as run:
        run.write(0, info(), loss=0.5)
        run.write(1, info(False, 4.0, 1, np.inf))
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert lines[1]["grad_norm"] == "inf"
    back = read_run(path)
    np.testing.assert_array_equal(back.steps, [0, 1])
    np.testing.assert_array_equal(back.get("loss"), [0.5, np.nan])
    np.testing.assert_array_equal(back.get("grad_norm"), [1.5, np.inf])
    np.testing.assert_array_equal(back.skipped, [False, True])


def test_a_run_that_went_back_counts_as_it_went_on(tmp_path):
    """After a return to step 1 what stood behind it is forgotten; an unfinished line is left."""
    path = tmp_path / "run.jsonl"
    for steps, loss in (([0, 1, 2, 3], 1.0), ([1, 2], 2.0)):
        with JsonLines(path) as run:
            for step in steps:
                run.write(step, loss=loss)
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    run = read_run(path)
    assert (list(run.steps), list(run.get("loss"))) == ([0, 1, 2], [1.0, 2.0, 2.0])
    with JsonLines(path) as run:  # and written over
        run.write(3, loss=3.0)
    assert list(read_run(path).get("loss")) == [1.0, 2.0, 2.0, 3.0]


def test_a_file_of_something_else_is_left_alone(tmp_path):
    """Notes are not cut off, and a whole last line without an end is kept."""
    notes = tmp_path / "notes.txt"
    notes.write_text("to do")
    with pytest.raises(ValueError, match="Expected a file of JSON objects"):
        JsonLines(notes)
    assert notes.read_text() == "to do"
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 0, "loss": 1.0}')
    with JsonLines(path) as run:
        run.write(1, loss=2.0)
    assert list(read_run(path).get("loss")) == [1.0, 2.0]


def test_a_variable_is_written_as_it_is_then():
    """What a variable holds is taken when it is written, not when it is read."""
    rate = gs.Variable(0.5)
    with Kept(every=10) as kept:
        kept.write(0, rate=rate)
        rate.assign(0.25)
        kept.write(1, rate=rate)
    assert [record["rate"] for record in kept.batches[0]] == [0.5, 0.25]


@pytest.mark.parametrize(
    "text", ["", "\n", "[]\n", "7\n", "{}\n", '{"step": 1.5}\n', '{"step": true}\n',
             '{"step": -1}\n', '{"step": 0, "loss": "high"}\n', '{"step": 0, "loss": null}\n',
             '{"step": 1e999}\n', '{"step": "1"}\n', '{"st\n{"step": 0}\n'],
)  # fmt: skip
def test_a_file_that_is_no_run_is_told(text, tmp_path):
    """A clear error that names the file, and the line if there is one."""
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"Expected .* got .*\."):
        read_run(path)


@settings(max_examples=200, deadline=None)
@given(st.text() | st.lists(st.dictionaries(st.sampled_from(["step", "a"]), st.none() | st.floats()
       | st.integers() | st.text())).map(lambda rs: "\n".join(map(json.dumps, rs))))  # fmt: skip
def test_any_file_is_read_or_refused(tmp_path_factory, text):
    """Whatever a file holds, it is read, or a ValueError says what is wrong."""
    path = tmp_path_factory.getbasetemp() / "fuzzed.jsonl"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        run = read_run(path)
    except ValueError:
        return
    assert (np.diff(run.steps) > 0).all()


def test_measures_of_a_run(tmp_path):
    """Skips, stretches, extremes and medians are those of the records."""
    path = tmp_path / "run.jsonl"
    finite = [True, False, False, True, False, True, True, True, True, True]
    scales = [8.0, 8, 4, 2, 2, 1, 1, 2, 2, 2]
    with JsonLines(path) as run:
        for step, (f, s) in enumerate(zip(finite, scales, strict=True)):
            run.write(step, info(f, s, 0, step), loss=10.0 - step)
    found = measures(read_run(path))
    wanted = {
        "steps": 10, "first": 0, "last": 9, "skipped": 3, "longest": 2, "scale_first": 8.0,
        "scale_last": 2.0, "scale_lowest": 1.0, "scale_highest": 8.0, "at_lowest": 2, "raised": 1,
        "lowered": 3, "loss_first": 10.0, "loss_last": 1.0, "grad_norm": 6.0,
    }  # fmt: skip
    assert found == wanted


def test_described():
    """A few words for a bar; what is not there is not mentioned."""
    assert described(info(scale=2.0**-3, skipped=2)._asdict()) == "scale 2^-3, 2 skipped"
    assert described({"loss": 0.12345, "step": 3, "loss_scale": 3.0}) == "loss 0.123, scale 3"


def test_report_prints_a_table_and_draws(tmp_path, capsys):
    """`gainstage report` fits 80 columns without colours, and draws beside the run."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.jsonl"
    with JsonLines(path) as run:
        for step in range(30):
            run.write(step, info(step != 4, 2.0**10, step > 4), loss=1 / (step + 1))
    assert main(["report", str(path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"Skipped, of those recorded\s+│\s+1 \(3\.3%\)", said)
    assert "\x1b" not in said
    assert max(map(len, said.splitlines()[:-1])) <= 80
    assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"


def test_report_says_what_is_wrong(tmp_path, capsys):
    """A missing or broken file: one line on standard error, and status 1."""
    pytest.importorskip("matplotlib")
    assert main(["report", str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl" in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text("no\n")
    assert main(["report", str(tmp_path / "bad.jsonl")]) == 1
    assert "in line 1" in capsys.readouterr().err


def test_progress_bar_writes_only_on_standard_error(tmp_path):
    """In a pipe the bar ends as plain text, with the scale and the skips behind it."""
    pytest.importorskip("rich")
    code = """
import jax.numpy as jnp, gainstage as gs
from gainstage.diagnostics.progress import ProgressBar
with ProgressBar(total=12) as bar:
    for step in range(12):
        info = gs.StepInfo(jnp.array(True), jnp.float32(2.0**15), jnp.int32(2), jnp.float32(1))
        bar.write(step, info, loss=jnp.float32(0.25))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "12/12" in done.stderr
    assert "loss 0.25, scale 2^15, 2" in re.sub(r"\s+", " ", done.stderr)
    assert "\x1b" not in done.stderr


def test_tensorboard_has_every_number(tmp_path):
    """The event file holds each number of each step under its name."""
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter

    from gainstage.interop.tensorboard import TensorBoard

    assert RecordWriter  # the format is theirs
    with TensorBoard(tmp_path) as board:
        board.write(3, info(False, 4.0, 1, 2.5), loss=0.5)
    data, values = next(tmp_path.glob("events*")).read_bytes(), {}
    while data:
        length = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + length])
        values |= {(event.step, v.tag): v.simple_value for v in event.summary.value}
        data = data[16 + length :]
    wanted = {"finite": 0.0, "loss_scale": 4.0, "skipped_steps": 1.0, "grad_norm": 2.5, "loss": 0.5}
    assert values == {(3, f"train/{name}"): value for name, value in wanted.items()}
