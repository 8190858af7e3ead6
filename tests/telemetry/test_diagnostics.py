"""Writers, what they write, and the report on it."""

import contextlib
import json
import math
import re
import resource
import subprocess
import sys
import tempfile
import time
from html.parser import HTMLParser
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gainstage as gs
from gainstage.__main__ import main
from gainstage._xray.from_file import commands
from gainstage.diagnostics import JsonLines, Run, Writer, read_run
from gainstage.runs.recording import measures
from gainstage.runs.summary import StepFile, summary


def info(finite=True, scale=8.0, skipped=0, norm=1.5):
    applied, largest = jnp.int32(7), jnp.float32(norm / 2)
    before = (jnp.array(finite), jnp.float32(scale), jnp.int32(skipped), jnp.float32(norm))
    return gs.typing.StepInfo(*before, applied, largest, jnp.array(finite))


KNOWN = {"inf": 3, "nan": 0, "first": 5, "last": 9}
SHARES = {"zero": 0.1, "flushed": 0.02, "subnormal": 0.3, "headroom": 4.5}


def page(*words):
    """The page of a run."""
    for needed in ("jinja2", "matplotlib"):
        pytest.importorskip(needed)
    from gainstage.runs.report import page

    return page(*words)


class Told:
    """A report, as far as it is written."""

    def __init__(self, **known):
        self.known = known

    def tensors(self):
        return self.known


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


def donated(*arrays):
    """Hands the memory of these to a later step."""
    for array in arrays:
        jax.jit(lambda x: x + 1, donate_argnums=0)(array)


def test_a_number_that_is_donated_after_write_is_left_out_alone():
    """Of its record the other numbers are written, and all other records; a warning says it once,
    with its name and what to write."""
    kept, scales = Kept(every=10), [jnp.float32(n) for n in range(3)]
    kept.write(0, loss=0.5)
    kept.write(1, loss=0.25, scale=scales[0])
    kept.write(2, loss=0.125, scale=scales[1])
    donated(scales[0])
    with pytest.warns(UserWarning, match=r"Could not read scale: .*deleted.*pass float\(scale\)"):
        kept.flush()
    kept.write(3, loss=0.0, scale=scales[2])
    donated(scales[2])
    kept.close()
    (first, second) = kept.batches
    assert first == [
        {"step": 0, "loss": 0.5}, {"step": 1, "loss": 0.25},
        {"step": 2, "loss": 0.125, "scale": 1.0},
    ]  # fmt: skip
    assert second == [{"step": 3, "loss": 0.0}]


def test_telemetry_that_is_donated_loses_no_earlier_record(tmp_path):
    """Nor the description of the run: the records before are written, and that of the donated
    telemetry has the loss."""
    path, rule = tmp_path / "run.jsonl", gs.DynamicLossScale(2.0**4)
    state = gs.TrainState.create(jnp.ones(2), optax.sgd(0.1), loss_scale=rule, telemetry=True)
    run, info = JsonLines(path, rule=rule), state.info
    run.write(0, loss=1.0)
    run.write(1, info, loss=2.0)
    donated(*jax.tree.leaves(info))
    with pytest.warns(UserWarning, match="Could not read loss_scale, skipped_steps"):
        run.close()
    back = read_run(path)
    assert back.get("loss").tolist() == [1.0, 2.0]
    assert back.rule == rule


REFUSED_NUMBERS = {
    "complex": (1j, TypeError),
    "numpy complex": (np.complex64(1j), TypeError),
    "jax complex": (jnp.complex64(1j), TypeError),
    "string": (np.str_("nan"), TypeError),
    "bytes": (np.bytes_(b"1"), TypeError),
    "date": (np.datetime64("2020-01-01"), TypeError),
    "duration": (np.timedelta64(3, "s"), TypeError),
    "object": (np.array(1, object), TypeError),
    "key": (jax.random.key(0), TypeError),
    "shape": (jax.ShapeDtypeStruct((), jnp.float32), TypeError),
    "vector": (np.ones(1), TypeError),
    "integer of 310 digits": (10**309, ValueError),
    "integer of 5000 digits": (-(10**4999), ValueError),
}
if np.finfo(np.longdouble).bits > 64:
    REFUSED_NUMBERS["longdouble"] = (np.longdouble(1.5), TypeError)


@pytest.mark.parametrize("kind", REFUSED_NUMBERS)
def test_a_number_that_no_reader_takes_is_refused_at_once(kind, tmp_path):
    """`write` says its name and records nothing, and all other records are written and read."""
    number, error = REFUSED_NUMBERS[kind]
    with JsonLines(tmp_path / "run.jsonl") as run:
        run.write(0, loss=1.0)
        with pytest.raises(error, match="for speed"):
            run.write(1, loss=1.0, speed=number)
        run.write(2, loss=1.0)
    assert read_run(tmp_path / "run.jsonl").steps.tolist() == [0, 2]


def test_a_donated_or_traced_number_is_refused_at_once():
    """`write` says its name, and what to do."""
    kept, scale = Kept(every=10), jnp.float32(1.0)
    donated(scale)
    with pytest.raises(ValueError, match="scale was donated to a step"):
        kept.write(0, scale=scale)
    with pytest.raises(TypeError, match="loss has no value while it is traced"):
        jax.jit(lambda x: kept.write(0, loss=x))(1.0)
    kept.close()
    assert kept.batches == []


WRITTEN = [
    True, 7, 2**70, 1.5, math.inf, -math.inf, math.nan, np.bool_(True), np.uint64(2**63),
    np.float16(0.5), np.array(2), jnp.bfloat16(1.5), jnp.asarray(1.5, jnp.float8_e4m3fn),
    np.dtype(jnp.bfloat16).type(1.5), np.dtype(jnp.float8_e5m2).type(1.5), jnp.asarray(3, jnp.int4),
    jnp.float32(jnp.inf), np.float64(math.nan), jnp.array(True),
]  # fmt: skip


@pytest.mark.parametrize("number", WRITTEN, ids=repr)
def test_a_real_number_of_any_dtype_comes_back(number, tmp_path):
    """Python, numpy and JAX scalars are valid JSON, and the same numbers when they are read."""
    with JsonLines(tmp_path / "run.jsonl") as run:
        run.write(0, number=number)
    line = (tmp_path / "run.jsonl").read_text().splitlines()[-1]
    json.loads(line, parse_constant=pytest.fail)
    np.testing.assert_array_equal(read_run(tmp_path / "run.jsonl").get("number"), [float(number)])


def test_nothing_is_written_after_close(tmp_path):
    """A record after `close` is an error that says so, as it would be lost."""
    run = JsonLines(tmp_path / "run.jsonl")
    run.write(0, loss=1.0)
    run.close()
    run.close()  # as Python does at exit
    for late in (lambda: run.write(1, loss=1.0), lambda: run.write_report(1, Told())):
        with pytest.raises(ValueError, match="JsonLines is closed"):
            late()
    assert read_run(tmp_path / "run.jsonl").steps.tolist() == [0]


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
    assert ["run" in line for line in lines] == [True, False]
    assert lines[0]["loss"] == 0.5
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
    with JsonLines(path) as run:
        run.write(3, loss=3.0)
    with pytest.warns(UserWarning, match=r"Skipped 1 line .* killed process has not ended"):
        assert list(read_run(path).get("loss")) == [1.0, 2.0, 2.0, 3.0]


def test_two_writes_for_one_step_are_one_record(tmp_path):
    """Columns that are written one after the other are all read; a step that is written again, as
    after a return to a checkpoint, replaces the earlier one."""
    path = tmp_path / "run.jsonl"
    with JsonLines(path) as log:
        for step in (0, 1, 2, 1):
            log.write(step, loss=float(step))
            log.write(step, accuracy=0.5)
    run = read_run(path)
    assert run.steps.tolist() == [0, 1]
    assert (run.get("loss").tolist(), run.get("accuracy").tolist()) == ([0.0, 1.0], [0.5, 0.5])


def test_what_a_report_says_of_tensors_comes_back(tmp_path):
    """The last report of a file is read, behind the numbers that were written before it."""
    path = tmp_path / "run.jsonl"
    with JsonLines(path) as run:
        run.write(0, loss=1.0)
        run.write_report(0, Told(old=KNOWN))
        run.write(1, loss=2.0)
        run.write_report(1, Told(a=KNOWN | SHARES, b=KNOWN | {"headroom": np.float32(np.inf)}))
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert ["tensors" in line for line in lines] == [False, True, False, True]
    back = read_run(path)
    assert back.tensors == {"a": KNOWN | SHARES, "b": KNOWN | {"headroom": np.inf}}
    assert list(back.get("loss")) == [1.0, 2.0]
    with pytest.raises(ValueError, match="for step"):
        JsonLines(path).write_report(-1, Told())
    path.write_text('{"step": 0}\n')
    assert read_run(path).tensors == {}


def test_a_report_from_behind_where_a_run_went_back_to_is_forgotten(tmp_path):
    """After a return to step 1 the report of step 2 counts no more; that of step 0 does."""
    path = tmp_path / "run.jsonl"
    with JsonLines(path) as run:
        for step in (0, 1, 2):
            run.write(step, loss=1.0)
            run.write_report(step, Told(**{f"of {step}": KNOWN}))
        run.write(1, loss=2.0)
    assert list(read_run(path).tensors) == ["of 0"]
    with JsonLines(path) as run:
        run.write_report(2, Told(ahead=KNOWN))
        run.write(2, loss=3.0)  # the first time that this step is there since
    back = read_run(path)
    assert (list(back.tensors), list(back.get("loss"))) == (["ahead"], [1.0, 2.0, 3.0])


@contextlib.contextmanager
def full_disk(bytes_left=0):
    """No file can grow beyond this size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_loses_no_record_and_stops_no_run(tmp_path, recwarn):
    """Failed writes warn once, are repeated at the next flush, and leave a file that is read."""
    path = tmp_path / "run.jsonl"
    run = JsonLines(path, every=2)
    for step in range(3):
        run.write(step, loss=1.0)
    with full_disk(path.stat().st_size + 30):
        for step in range(3, 8):
            run.write(step, loss=2.0)
        run.write_report(7, Told(a=KNOWN))
    assert not path.read_text().endswith("\n")
    assert [str(w.message)[:25] for w in recwarn] == ["JsonLines could not write"]
    run.write(8, loss=3.0)
    run.close()
    back = read_run(path)
    assert list(back.get("loss")) == [1.0] * 3 + [2.0] * 5 + [3.0]
    assert back.tensors == {"a": KNOWN}


def test_a_torn_line_hides_only_itself(tmp_path):
    """A line that a failed write has left is skipped, with a warning, as is one that is glued to
    it; an empty line is no record."""
    path = tmp_path / "run.jsonl"
    lines = ['{"st', '{"step": 0, "a": 1}', '{"ste{"step": 2, "a": 1}', "", '{"step": 3}', '{"st']
    path.write_text("\n".join(lines))
    with pytest.warns(UserWarning, match=r"Skipped 2 lines of .*, the first of them line 1\."):
        assert list(read_run(path).steps) == [0, 3]


def test_a_line_that_another_process_has_not_finished_yet_is_kept(tmp_path):
    """A writer that opens the file meanwhile removes nothing, and neither loses a record."""
    path = tmp_path / "run.jsonl"
    with path.open("ab", buffering=0) as other:
        other.write(b'{"step": 0, "loss": 1.0}\n{"step": 1, "lo')
        run = JsonLines(path)
        other.write(b'ss": 2.0}\n')
        run.write(2, loss=3.0)
        run.close()
        other.write(b'{"step": 3, "loss": 4.0}\n')
    assert read_run(path).get("loss").tolist() == [1.0, 2.0, 3.0, 4.0]


def test_two_writers_of_one_file_lose_no_line(tmp_path):
    """While one process appends, others open the file and append to it too: each line is whole."""
    path = tmp_path / "run.jsonl"
    code = """
import sys
from gainstage.diagnostics import JsonLines
with JsonLines(sys.argv[1], every=3) as run:
    print("ready", flush=True)
    for step in range(5000):
        run.write(step, loss=1.0)
"""
    words = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        opened = 0
        while other.poll() is None:
            with JsonLines(path) as run:
                run.write(10_000 + opened, loss=2.0)
            opened += 1
    assert other.returncode == 0
    losses = [json.loads(line)["loss"] for line in path.read_text().splitlines()]
    assert (losses.count(1.0), losses.count(2.0)) == (5000, opened)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has it")
def test_records_go_to_a_file_that_cannot_be_read_back():
    """A device, such as /dev/null, takes all records."""
    with JsonLines("/dev/null", every=1) as run:
        run.write(0, loss=1.0)
    with JsonLines("/dev/full") as run:  # reading it would never end
        run.write(0, loss=1.0)
        with pytest.warns(UserWarning, match="could not write .*No space left"):
            run.flush()
        with pytest.warns(UserWarning, match="1 record could not be written"):
            run.close()


def test_a_writer_that_fails_for_long_keeps_the_last_records(monkeypatch):
    """While writes fail, a bounded number of records is kept; closing says how many are lost."""
    monkeypatch.setattr("gainstage.runs.writers.KEPT", 3)

    class Failing(Kept):
        full = True

        def put(self, records):
            if self.full:
                raise OSError(28, "No space left on device")
            super().put(records)

    run = Failing(every=6)
    for step in range(5):
        run.write(step)
    with pytest.warns(UserWarning, match=r"Failing could not write \(.*No space left on device"):
        run.write(5)
    run.full = False
    run.write(6)
    run.flush()
    assert [record["step"] for record in run.batches[0]] == [3, 4, 5, 6]
    run.full = True
    run.write(7)
    with pytest.warns(UserWarning, match="could not write"):
        run.flush()
    with pytest.warns(UserWarning, match="Failing is closed; 1 record could not be written"):
        run.close()


def test_a_program_that_ends_without_close_loses_no_record(tmp_path):
    """Python writes what waits when it exits, also after an exception."""
    path = tmp_path / "run.jsonl"
    code = """
import sys
from gainstage.diagnostics import JsonLines
run = JsonLines(sys.argv[1])
run.write(0, loss=0.5)
run.write(1, loss=0.25)
raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
    np.testing.assert_array_equal(read_run(path).get("loss"), [0.5, 0.25])


def test_a_variable_is_written_as_it_is_then():
    """What a variable holds is taken when it is written, not when it is read."""
    rate = gs.optimizers.Variable(0.5)
    with Kept(every=10) as kept:
        kept.write(0, rate=rate)
        rate.assign(0.25)
        kept.write(1, rate=rate)
    assert [record["rate"] for record in kept.batches[0]] == [0.5, 0.25]


@pytest.mark.parametrize(
    "text", ["", "\n", "[]\n", "7\n", "{}\n", '{"step": 1.5}\n', '{"step": true}\n',
             '{"step": -1}\n', '{"step": 0, "loss": "high"}\n', '{"step": 0, "loss": null}\n',
             '{"step": 1e999}\n', '{"step": "1"}\n', 'to do\n{"step": 0}\n', "[" * 9000 + "\n",
             '{"step": 0, "tensors": {}}\n', '{"step": 0, "tensors": 3}\n',
             '{"step": 0, "tensors": {"a": []}}\n', '{"step": 0, "tensors": {"a": {}}}\n',
             *(json.dumps({"step": 0, "tensors": {"a": KNOWN | wrong}}) + "\n" for wrong in
               ({"inf": "inf"}, {"nan": 0.5}, {"first": None}, {"last": "1"}, {"zero": "much"}))],
)  # fmt: skip
def test_a_file_that_is_no_run_is_told(text, tmp_path):
    """A clear error that names the file, and the line if there is one."""
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"Expected .* got .*\."):
        read_run(path)


values = st.none() | st.floats() | st.integers() | st.text()
values |= st.dictionaries(st.text(), st.just(KNOWN) | st.dictionaries(st.just("inf"), values))


texts = st.text() | st.lists(
    st.dictionaries(st.sampled_from(["step", "a", "tensors"]), values)
).map(lambda records: "\n".join(map(json.dumps, records)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(texts)
def test_any_file_is_read_or_refused(tmp_path_factory, text):
    """Whatever a file holds, it is read, or a ValueError says what is wrong."""
    check_file(tmp_path_factory, text)


@pytest.mark.thorough
@settings(max_examples=200, deadline=None, derandomize=True)
@given(texts)
def test_many_files_are_read_or_refused(tmp_path_factory, text):
    """The same, five times as often."""
    check_file(tmp_path_factory, text)


def check_file(tmp_path_factory, text):
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


def hostile_run(path, name):
    """A run with skips of every cause, of which everything that has a name bears this one."""
    scale = 2.0**20
    with JsonLines(path) as run:
        for step in range(60):
            spoiled, cold = step in (30, 31), step >= 50
            finite = scale <= 2.0**15 and not spoiled and not cold
            norm = 1.5 if finite else math.nan if spoiled or cold else math.inf
            loss = math.nan if spoiled else 1 / (step + 1)
            told = info(finite, scale, norm=norm)._asdict() | {"loss": loss, name: step}
            del told["max_abs"]  # as a writer of one's own may not know it
            run.write(step, **told)
            scale = scale if finite else scale / 2
        names = {f"{name}{i}": KNOWN | SHARES | {"inf": i} for i in range(30)}
        run.write_report(59, Told(**names, well=KNOWN | {"inf": 0, "first": -1, "last": -1}))


def test_report_prints_tables_and_writes_a_page(tmp_path, capsys):
    """`gainstage report` fits 80 columns without colours: numbers, causes, tensors, advice; and
    writes a page beside the run."""
    pytest.importorskip("rich")
    path = tmp_path / "run.jsonl"
    hostile_run(path, "layer/kernel")
    assert main(["report", str(path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"Skipped, of those recorded\s+│\s+17 \(28\.3%\)", said)
    assert re.search(r"Causes\s+│\s+5 overflow, 10 NaN, 2 bad loss", said)
    assert re.search(r"layer/kernel29\s+29 +0 +5 +9 +4\.5", said)
    assert re.search(r"layer/kernel0\s+2\.00% +30\.00% +10\.00%", said)
    assert "well" not in said
    assert "\x1b" not in said
    assert max(map(len, said.splitlines()[:-1])) <= 80
    advice = " ".join(said[said.index("Advice") :].split())
    assert "NaN, at scales from 2^13 to 2^4, and that did not end: a formula" in advice
    drawn = (tmp_path / "run.html").read_text()
    for word in (*said.splitlines()[0].split(), "Loss scale", "5 by an overflow", "layer/kernel29",
                 "10 by gradients", "2 by a loss"):  # fmt: skip
        assert word in drawn


@pytest.mark.parametrize("kind", ["png", "svg", "pdf", "html"])
def test_report_draws_what_the_ending_says(kind, tmp_path, capsys):
    """`--output` takes pages and pictures; the run itself is never written over."""
    pytest.importorskip("matplotlib")
    path, output = tmp_path / "run.jsonl", tmp_path / f"drawn.{kind}"
    hostile_run(path, "a$b$")
    assert main(["report", str(path), "--output", str(output)]) == 0
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF", "html": b"<!DOCTYPE html>"}[kind]
    assert output.read_bytes().startswith(start)
    assert capsys.readouterr().out.rstrip().endswith(str(output))
    before = path.read_bytes()
    (tmp_path / "same.html").symlink_to(path)
    assert main(["report", str(path), "--output", str(tmp_path / "same.html")]) == 1
    assert "Expected another file than the run" in capsys.readouterr().err
    assert path.read_bytes() == before
    with pytest.raises(SystemExit):
        main(["report", str(path), "--output", str(tmp_path / "a.txt")])
    assert "Expected a .html, .png, .pdf or .svg file" in capsys.readouterr().err


class Tags(HTMLParser):
    """What a browser would make of a page."""

    void = ("meta", "br")

    def __init__(self, text):
        super().__init__()
        self.found, self.open, self.text = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.open += [] if tag in self.void else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


HOSTILE = ["<script>alert(1)</script>", "\"><img src=x onerror=alert(1)>", "\x1b[31mred", "$title",
           "&lt;b&gt;", "a'b\"c", "\ud800", "x" * 100_000, "\n", "]]>", "[bold]x[/]"]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, id=str(i), marks=[] if i in (0, 1, 2, 6, 7) else pytest.mark.thorough)
        for i, name in enumerate(HOSTILE)
    ],
)
def test_names_from_a_file_are_only_names(name, tmp_path, capsys):
    """Whatever a tensor is called, it makes no tag and no attribute in the page, which asks for
    nothing from outside, and no escape sequence in the terminal."""
    pytest.importorskip("rich")
    path = tmp_path / "run.jsonl"
    hostile_run(path, name)
    assert main(["report", str(path)]) == 0
    said, text = capsys.readouterr().out, (tmp_path / "run.html").read_text(encoding="utf-8")
    read = Tags(text)
    tags = {tag for tag, _ in read.found}
    assert not read.open
    assert tags.isdisjoint({"script", "img", "b", "link", "iframe"})
    attributes = {key for _, attributes in read.found for key in attributes}
    assert not {key for key in attributes if key.startswith("on")} | attributes & {"src", "href"}
    assert "url(" not in text
    assert "http" not in text
    if name.isprintable() and len(name) < 100:
        assert any(f"{name}29" in data for data in read.text)
    assert "\x1b" not in said
    assert max(len(line) for line in said.splitlines()[:-1]) <= 80


finite_or_not = st.floats() | st.sampled_from([1.0, 2.0**15, 1.7e308, -1.7e308, 5e-324, 0.0])


known = {k: st.integers() for k in KNOWN} | {k: finite_or_not for k in SHARES}


numbers_of_a_run = given(
    st.lists(st.tuples(*[finite_or_not] * 4), min_size=1, max_size=12),
    st.lists(st.integers(0, 2**63 - 1), min_size=12, max_size=12, unique=True),
    st.dictionaries(st.text(), st.fixed_dictionaries(known), max_size=3),
)


@settings(max_examples=8, deadline=None, derandomize=True)
@numbers_of_a_run
def test_a_page_of_any_numbers(rows, steps, tensors):
    """Whatever numbers a run has, its page is whole, and no coordinate is NaN or infinite."""
    check_page(rows, steps, tensors)


@pytest.mark.thorough
@settings(max_examples=40, deadline=None, derandomize=True)
@numbers_of_a_run
def test_pages_of_many_numbers(rows, steps, tensors):
    """The same, five times as often."""
    check_page(rows, steps, tensors)


def check_page(rows, steps, tensors):
    names = ("loss_scale", "finite", "loss", "grad_norm")
    columns = dict(zip(names, np.array(rows).T, strict=True))
    run = Run(np.sort(np.array(steps[: len(rows)], np.int64)), columns, tensors)
    text = page(run, summary(run), "a run")
    tags = Tags(text)
    assert not tags.open
    drawn = [attributes["d"] for tag, attributes in tags.found if tag == "path"]
    drawn += [attributes["style"] for _, attributes in tags.found if "style" in attributes]
    words = r"min-width|var\(--nan\)"  # the color of a mark, not a number
    assert not re.search("nan|inf", re.sub(words, "", " ".join(drawn)))


@pytest.mark.parametrize("steps", [20_000, pytest.param(100_000, marks=pytest.mark.thorough)])
def test_a_long_run_makes_a_small_page(steps, tmp_path, capsys):
    """Up to 100,000 steps are reported on in a page of less than 300 kB that has the extremes."""
    pytest.importorskip("rich")
    path, rng = tmp_path / "run.jsonl", np.random.default_rng(0)
    loss, skips = rng.random(steps) + 1, rng.random(steps) < 0.3
    loss[int(0.77777 * steps)] = 10.0
    with path.open("w") as file:
        for step, (x, skip) in enumerate(zip(loss, skips, strict=True)):
            file.write(f'{{"step": {step}, "finite": {int(not skip)}, "loss_scale": 32768, '
                       f'"loss": {x}, "max_abs": 0.5, "grad_norm": 1}}\n')  # fmt: skip
    assert main(["report", str(path)]) == 0
    assert f"{steps} (0 to {steps - 1})" in capsys.readouterr().out
    text = (tmp_path / "run.html").read_text()
    assert len(text) < 300_000
    points = re.findall(r"[ML] ([\d.]+) ([\d.]+)", curve(text, "Loss"))
    across, down = np.array(points, float).T
    assert (across[down.argmin()] - across[0]) / (across[-1] - across[0]) == pytest.approx(
        0.77777, abs=1e-3
    )
    assert len(across) > 1000


def skipping(bad, steps=1000, **more):
    """A run in which the loss of some steps is NaN, and the scale falls with each."""
    spoiled = np.isin(np.arange(steps), bad)
    scale = np.maximum(2.0 ** (15 - np.cumsum(spoiled) + spoiled), 1)
    loss = np.where(spoiled, np.nan, 1)
    numbers = {"finite": ~spoiled, "loss_scale": scale, "grad_norm": loss, "loss": loss, **more}
    return Run(np.arange(steps), {name: np.asarray(x, float) for name, x in numbers.items()})


def test_skipped_steps_are_a_table():
    """Each row of skipped steps has its count, its scales and its cause; of many rows the first and
    the last are shown, and the others counted. Vetoed steps are there too."""
    bad = [*range(100, 108), *range(500, 530), *range(600, 980, 10)]
    run = skipping(bad, applied=np.arange(1000) != 3)
    table = summary(run).skips
    assert table.rows[:3] == [
        ("3", "1", "2^15", "vetoed"),
        ("100 to 107", "8", "2^15 to 2^8", "bad loss"),
        ("500 to 529", "30", "2^7 to 2^0", "bad loss"),
    ]
    assert (len(table.rows), table.rows[6][:2]) == (13, ("and 29 more", "29"))
    assert table.rows[-1][0] == "970"
    triples = [first + n for first in range(0, 1000, 50) for n in range(3)]
    assert summary(skipping(triples)).skips.rows[6][:2] == ("and 8 more", "24")
    text = page(run, summary(run), "a run")
    for word in ("bad loss 76", "vetoed 1", "500 to 529", "2^7 to 2^0"):
        assert word in text


def test_a_report_says_a_thing_once():
    """The longest of many rows is described and all are counted; equal tensors are one row."""
    bad = [*range(100, 108), *range(500, 530), *range(600, 980, 10)]
    tensors = {f"block{n}/kernel": {**KNOWN, "inf": 0, "nan": 76} for n in range(41)}
    found = summary(skipping(bad)._replace(tensors=tensors))
    (advice, _) = found.advice  # and how to keep a step
    assert advice.startswith("30 steps in a row were skipped because their loss was not finite")
    assert advice.endswith("This happened 40 times: 76 steps in all.")
    assert [row[:3] for row in found.overflows.rows] == [("all 41 tensors", "0", "76")]
    some = {"head/bias": KNOWN | {"inf": 0, "first": -1}, "model/norm/scale": KNOWN}
    found = summary(skipping(bad)._replace(tensors=tensors | some))
    assert [row[0] for row in found.overflows.rows] == [
        "41 tensors: block0, block1, block2 and 38 more",
        "model/norm/scale",
    ]


def test_names_of_tensors_are_broken_between_words(tmp_path, capsys):
    """A row of many tensors in a terminal is broken at its spaces, and counts those of a layer."""
    pytest.importorskip("rich")

    class Told:
        def tensors(self):
            one = {f"encoder/layer{n}/kernel": KNOWN | {"inf": 0, "nan": 7} for n in range(4)}
            return one | {"encoder/layer0/bias": one["encoder/layer0/kernel"], "head": KNOWN}

    with JsonLines(tmp_path / "run.jsonl") as run:
        run.write(0, info())
        run.write_report(0, Told())
    assert main(["report", str(tmp_path / "run.jsonl")]) == 0
    said = " ".join(re.sub(r"[0-9]+  .*", "", line) for line in capsys.readouterr().out.split("\n"))
    assert "5 tensors: encoder/layer0 (2 of them)" in " ".join(said.split())


def test_a_loss_that_is_not_finite_is_no_proof_of_bad_data():
    """Where each third loss is not finite and the scale falls, the advice names all three causes
    and the X-ray before the rule that holds the scale."""
    run = skipping(range(2, 100, 3), 100, max_abs=np.full(100, 2.0**-5))
    advice, recorder = summary(run).advice
    causes = "bad data, too high a learning rate, or an overflow in the forward pass."
    assert advice.startswith("Steps that no scale makes finite lowered it to 2^0.")
    assert advice.index(causes) < advice.index("xray(") < advice.index("AdaptiveLossScale()")
    assert "If it is the data, loss_scale=gs.AdaptiveLossScale()" in advice
    assert advice.endswith("it skips the same steps.")
    assert "StepRecorder" in recorder


@pytest.mark.parametrize(
    ("scale", "remedy"),
    [(1.0, "leave out the rule, and with_loss_scale takes gs.DynamicLossScale()"),
     (16.0, "Take a higher scale than 2^4.")],
)  # fmt: skip
def test_gradients_that_are_all_zero_have_advice(scale, remedy):
    """The report of a run without any gradient says what to change, and which step to keep."""
    numbers = {"finite": 1.0, "loss": 2.0, "grad_norm": 0.0, "loss_scale": scale}
    run = Run(np.arange(40), {name: np.full(40, x) for name, x in numbers.items()})
    advice = summary(run).advice[0]
    assert advice.startswith("All gradients are 0: the loss does not depend on the parameters, or")
    assert remedy in advice
    assert "recorder.save(n, info, params, batch)" in advice
    norms = {**run.numbers, "grad_norm": np.arange(40.0)}
    assert summary(run._replace(numbers=norms)).advice == []
    counted = {"w": {**KNOWN, "inf": 0, "first": -1, "last": -1, "zero": 1.0, "error": 0.0}}
    assert remedy in summary(run._replace(numbers=norms, tensors=counted)).advice[0]


def test_no_advice_contradicts_the_scale():
    """A run whose scale has fallen to 1 is not told that it needs scaling."""
    shares = {"zero": 0.0, "flushed": 0.1, "subnormal": 0.1, "error": 0.2, "unscaled_error": 0.2}
    run = skipping(range(100, 200))._replace(tensors={"w": KNOWN | shares})
    assert summary(run).underflow.lead == [
        "Underflow: float16 is 20% off in w, and by more than 1% in 1 of 1 tensors. "
        "gs.advise(loss_fn, params, batches) says what each precision costs."
    ]


def test_other_numbers_are_drawn_and_summarised():
    """A number of any name has a curve and a row; a constant or missing one is no problem."""
    rate, gaps = np.linspace(1e-3, 0, 1000), np.full(1000, np.nan)
    found = summary(skipping([7], lr=rate, nothing=gaps, constant=np.full(1000, 2.0)))
    assert found.numbers.rows == [
        ("lr", "0.001", "0", "0", "0.001"),
        ("constant", "2", "2", "2", "2"),
    ]
    assert list(found.curves) == ["loss_scale", "loss", "grad_norm", "lr", "constant"]


def test_a_recording_has_its_duration_and_device(tmp_path, monkeypatch):
    """The headline says how long the run took and on what; numbers of that name are kept."""
    times = iter([100.0, 130.0, 3761.0])
    with monkeypatch.context() as patch:
        patch.setattr("gainstage.runs.writers.time.time", lambda: next(times))
        with JsonLines(tmp_path / "run.jsonl", every=2) as run:
            for step in range(4):
                run.write(step, info())
    headline = summary(read_run(tmp_path / "run.jsonl")).headline
    assert headline["Duration"] == "1 h 1 min 1 s"
    assert headline["Device"] == f"{len(jax.devices())} cpu"


def test_a_step_file_beside_the_recording_is_offered(tmp_path, capsys):
    """The report has the command for the step file of a step that the run has skipped."""
    pytest.importorskip("rich")
    path, bad = (
        tmp_path / "run.jsonl",
        gs.diagnostics.StepRecorder(tmp_path / "bad step.safetensors"),
    )
    (tmp_path / "other.npz").write_bytes(b"something else")
    with JsonLines(path) as run:
        for step in range(3):
            run.write(step, info(finite=step != 1))
            bad.write(step, info(finite=step != 1), np.ones(2))
    assert main(["report", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Step 1 is kept in a step file. Find its cause: gainstage xray" in said
    assert "bad step.safetensors' --loss MODULE:LOSS_FN" in said
    assert "--like" not in said
    assert "other.npz" not in said


def test_a_step_file_of_an_applied_step_has_no_cause():
    """The report offers a look into a saved step that was applied, and still says how to keep a
    bad one."""
    run = skipping(range(50, 80), 100)
    file = StepFile(99, float(run.get("loss_scale")[99]), time.time())
    advice = summary(run, {"gainstage xray last.safetensors": file}).advice
    assert "Step 99 is kept in a step file. Look into it: gainstage xray last.safetensors" in advice
    assert any("StepRecorder" in sentence for sentence in advice)


def test_the_command_for_the_step_file_of_a_model_has_like(tmp_path):
    """The command for a step file that needs `--like` has this option."""
    for name, params in {"tuple": (np.ones(2),), "model": info()}.items():
        recorder = gs.diagnostics.StepRecorder(tmp_path / f"{name}.safetensors")
        assert recorder.write(3, info(finite=False), params, np.ones(2))
    (of_model, of_tuple) = commands(tmp_path)
    assert of_model.endswith("model.safetensors --loss MODULE:LOSS_FN --like MODULE:MAKE_MODEL")
    assert of_tuple.endswith("tuple.safetensors --loss MODULE:LOSS_FN")
    gs.save(tmp_path / "state.safetensors", {"w": np.ones(2)})
    assert len(commands(tmp_path)) == 2


def test_a_report_without_a_step_file_says_how_to_keep_one(tmp_path, capsys):
    """If the advice is an X-ray of a bad step that was not kept, the recorder is named."""
    pytest.importorskip("rich")
    path = tmp_path / "run.jsonl"
    hostile_run(path, "w")
    assert main(["report", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "To keep the next one, create recorder = gs.diagnostics.StepRecorder" in said
    run = read_run(path)
    (step, *_), (scale, *_) = run.steps[run.skipped], run.get("loss_scale")[run.skipped]
    now = time.time()
    kept = summary(run, {"gainstage xray bad.safetensors": StepFile(int(step), scale, now)}).advice
    assert not any("StepRecorder" in sentence for sentence in kept)
    of_other_runs = (StepFile(int(step), 2 * scale, now), StepFile(int(step), scale, now - 3600))
    for other in of_other_runs:  # of another scale, or older than the run
        said = summary(run, {"gainstage xray old.safetensors": other}).advice
        assert not any("old.safetensors" in sentence for sentence in said)
    with JsonLines(tmp_path / "calm.jsonl") as calm:
        for step in range(50):
            calm.write(step, info(finite=step != 20), loss=1.0)
    assert summary(read_run(tmp_path / "calm.jsonl")).advice == []


def curve(text, title):
    """The path of a curve in a page."""
    after = text[text.index(f"<h2>{title}</h2>") :]
    (path, *_) = re.findall(r'<path d="([^"]*)" style="fill: none; stroke: var\(--curve\)', after)
    return path


def gapped(steps, skipped):
    """A run some steps of which were skipped, whose norm there is a number all the same."""
    finite = ~np.isin(np.arange(steps), skipped)
    numbers = {"finite": finite, "grad_norm": 1.0 + np.arange(steps) % 3, "loss_scale": 0 * finite}
    return Run(np.arange(steps), {name: x.astype(float) for name, x in numbers.items()})


def test_skipped_steps_are_gaps_in_the_curve_of_the_norm():
    """A curve of few steps is broken where one was skipped, and a step between two gaps is a dot;
    of many, only gaps that can be seen are drawn. The picture has the same gaps."""
    few = gapped(20, [0, 5, 7, 8, 19])
    from gainstage.runs.curves import draw

    title, found = "Norm of all gradients", summary(few)
    assert curve(page(few, found, "few"), title).count("M") == 3
    many = gapped(10_000, [*range(0, 10_000, 7), *range(5000, 5100)])
    assert curve(page(many, summary(many), "many"), title).count("M") == 2
    picture = draw(few, found.curves, found.causes, "few")
    (axes,) = [axes for axes in picture.axes if "Norm" in axes.get_title("left")]
    drawn, dot = (line.get_ydata() for line in axes.lines)
    assert list(np.flatnonzero(np.isnan(drawn))) == [0, 5, 7, 8, 19]
    assert list(dot) == [few.get("grad_norm")[6]]


def test_a_page_says_that_nothing_underflows():
    """A run whose report has no small elements says so, in the page and in the terminal."""
    healthy = {"zero": 0.0, "flushed": 0.0, "subnormal": 0.0, "headroom": 4.5,
               "error": 2e-4, "unscaled_error": 0.3}  # fmt: skip
    run = gapped(20, [])._replace(tensors={"w": KNOWN | healthy})
    found = summary(run)
    assert found.underflow.lead == [
        "In gradients of parameters nothing underflows: float16 is at most 0.02% off.",
        "Without scaling float16 would be 30% off in w, and by more than 1% in 1 of 1 tensors: "
        "you need it.",
        "Numbers inside of the network are smaller, and are not measured: see gs.xray.",
    ]
    text = page(run, found, "healthy")
    assert "<h2>Underflow</h2><p>In gradients of parameters nothing" in text
    assert text.count("you need it.") == 1
    old = summary(run._replace(tensors={"w": KNOWN | SHARES}))
    assert old.underflow.lead == []  # recorded before rounding errors were


WRONG_RUNS = {
    "none.jsonl": "got none.jsonl (No such file or directory). Pass the path that JsonLines",
    "folder": "got folder (Is a directory). Pass the path that JsonLines was given.",
    "empty.jsonl": "recorded step in empty.jsonl; got none. Call JsonLines.write after each step.",
    "table.csv": "in line 1 of table.csv; got 'step,loss'. Pass a file that JsonLines wrote.",
    "picture.png": "Expected text in picture.png; got",
    "a run.jsonl": "got a run.html (Is a directory). Pass another path to --output.",
    "bad step.safetensors": "If it is a step file, write: gainstage xray 'bad step.safetensors' --",
}


@pytest.mark.parametrize(("name", "message"), WRONG_RUNS.items())
def test_report_says_what_is_wrong(name, message, tmp_path, monkeypatch, capsys):
    """A missing or wrong file: one line on standard error with the remedy, status 1, no page."""
    pytest.importorskip("rich")
    (tmp_path / "folder").mkdir()
    (tmp_path / "a run.html").mkdir()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "table.csv").write_text("step,loss\n1,2\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    gs.save(tmp_path / "bad step.safetensors", np.ones(3))
    with JsonLines(tmp_path / "a run.jsonl") as run:
        run.write(0, loss=1.0)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main(["report", name]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert message in said.err
    assert sorted(tmp_path.iterdir()) == before


def test_a_report_of_a_run_with_a_torn_line_says_so_in_a_line(tmp_path, capsys):
    """The line of a failed write is named on standard error, without a line of the library."""
    pytest.importorskip("rich")
    lines = [f'{{"step": {step}, "loss": 1.0}}' for step in range(4)]
    (tmp_path / "run.jsonl").write_text("\n".join([*lines[:2], lines[2][:9], *lines[3:], ""]))
    assert main(["report", str(tmp_path / "run.jsonl")]) == 0
    said = capsys.readouterr().err
    assert said.startswith("Skipped 1 line of ")
    assert said.count("\n") == 1
    assert "line 3" in said


def events(folder):
    """What the event files of a folder hold: a number for each step and tag."""
    from tensorboardX.proto.event_pb2 import Event

    values = {}
    for path in folder.glob("events*"):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            if len(data) < length + 16:  # TensorBoard stops reading this file here
                break
            event = Event.FromString(data[12 : 12 + length])
            values |= {(event.step, v.tag): v.simple_value for v in event.summary.value}
            data = data[16 + length :]
    return values


def test_tensorboard_has_every_number(tmp_path):
    """The event file holds each number of each step under its name."""
    pytest.importorskip("tensorboardX")
    from gainstage.interop.tensorboard import TensorBoard

    with TensorBoard(tmp_path) as board:
        board.write(3, info(False, 4.0, 1, 2.5), loss=0.5)
    values = events(tmp_path)
    wanted = {"finite": 0.0, "loss_scale": 4.0, "skipped_steps": 1.0, "grad_norm": 2.5, "loss": 0.5}
    wanted |= {"applied_steps": 7.0, "max_abs": 1.25, "applied": 0.0, "retried_steps": 0.0}
    assert values == {(3, f"train/{name}"): value for name, value in wanted.items()}


def test_tensorboard_writes_every_50_steps(tmp_path):
    """Unless it is told otherwise, so the host reads numbers of the device once in 50 steps."""
    pytest.importorskip("tensorboardX")
    from gainstage.interop.tensorboard import TensorBoard

    board, written = TensorBoard(tmp_path), []
    for step in range(100):
        board.write(step, loss=float(step))
        written.append(len(events(tmp_path)) if any(tmp_path.iterdir()) else 0)
    assert [written[step] for step in (0, 48, 49, 98, 99)] == [0, 0, 50, 50, 100]
    board.close()


def test_tensorboard_loses_no_number_to_a_full_disk(tmp_path):
    """After failed writes a second event file has what the first could not take."""
    pytest.importorskip("tensorboardX")
    from gainstage.interop.tensorboard import TensorBoard

    board = TensorBoard(tmp_path, every=30)
    board.write(0, loss=1.0)
    board.flush()
    size = next(tmp_path.glob("events*")).stat().st_size
    with full_disk(size + 10):
        for step in range(1, 30):
            board.write(step, loss=float(step))
        with pytest.warns(UserWarning, match="TensorBoard could not write"):
            board.write(30, loss=30.0)
        for step in range(31, 300):
            board.write(step, loss=float(step))
    board.write(300, loss=300.0)
    board.close()
    wanted = {(step, "train/loss"): float(step) for step in range(1, 301)}
    assert events(tmp_path) == wanted | {(0, "train/loss"): 1.0}
    assert len(list(tmp_path.iterdir())) == 2


def test_an_interrupt_loses_no_step(monkeypatch, tmp_path):
    """Who waits for the steps may be interrupted; the end of the `with` writes what was waiting."""
    path, real = tmp_path / "run.jsonl", jax.device_get

    def once(tree):
        monkeypatch.setattr(jax, "device_get", real)
        raise KeyboardInterrupt

    with JsonLines(path, every=2) as run:
        run.write(0, loss=1.0)
        monkeypatch.setattr(jax, "device_get", once)
        with pytest.raises(KeyboardInterrupt):
            run.write(1, loss=2.0)
    assert read_run(path).numbers["loss"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "text",
    [
        "to do",
        "to do\n",
        '{"lr": 0.1}',
        '{"lr": 0.1}\n',
        "<p>\n{% endblock %}",
        '{"step": 0}\n\n',
        "[]",
    ],
)
def test_files_of_something_else_are_left_as_they_are(text, tmp_path):
    """A file that ends in anything but a step is no recording."""
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ValueError, match="Expected a file of JSON objects"):
        JsonLines(path)
    assert path.read_text() == text


@pytest.mark.parametrize("rest", ["", '{"step": 1, "loss": 2.0}'])
def test_recordings_are_gone_on_with(rest, tmp_path):
    """Records are appended, also after a line that a killed process has written but not ended."""
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 0, "loss": 1.0}\n' + rest)
    with JsonLines(path) as run:
        run.write(2, loss=3.0)
    back = read_run(path)
    assert back.steps.tolist() == ([0, 1, 2] if rest else [0, 2])
    assert back.get("loss").tolist() == ([1.0, 2.0, 3.0] if rest else [1.0, 3.0])


@pytest.mark.parametrize("before", ["", '{"step": 0, "loss": 1.0}\n'])
@pytest.mark.parametrize("rest", ["{", '{"st', '{"step": 1, "lo'])
def test_a_line_that_a_killed_process_left_is_skipped(rest, before, tmp_path):
    """Nothing is removed from the file; the part of a line is ended, and reading says so. A third
    start goes on too."""
    path = tmp_path / "run.jsonl"
    path.write_text(before + rest)
    for step in (2, 3):
        with JsonLines(path) as run:
            run.write(step, loss=3.0)
    assert path.read_text().startswith(f"{before}{rest}\n")
    with pytest.warns(UserWarning, match=f"Skipped 1 line .* line {len(before.splitlines()) + 1}"):
        assert read_run(path).steps.tolist() == [0, 2, 3][not before :]


@pytest.mark.parametrize("name", ["tensors", "run"])
def test_a_number_called_as_another_part_of_a_file_is_refused(name, tmp_path):
    """A number called `tensors` or `run` would make the file unreadable: it is refused before."""
    with JsonLines(tmp_path / "run.jsonl") as run:
        run.write(0, loss=1.0)
        with pytest.raises(ValueError, match=f"name '{name}' is reserved for .*; got {name}=5"):
            run.write(1, **{name: 5})
    assert read_run(tmp_path / "run.jsonl").steps.tolist() == [0]


@pytest.mark.parametrize("suffix", [".png", ".html"])
def test_an_output_that_is_there_is_not_touched_before_the_work(suffix, capsys):
    """Looking whether a file can be written removes neither links nor empty files."""
    from gainstage.__main__ import main

    folder = Path(tempfile.mkdtemp())
    (folder / "empty").touch()
    link = folder / f"link{suffix}"
    link.symlink_to(folder / "empty")
    with pytest.raises(SystemExit):
        main(["report", "", "--output", str(link)])
    assert "Expected the file of a run" in capsys.readouterr().err
    assert link.is_symlink()
    assert link.read_bytes() == b""


def test_a_number_is_recorded_as_it_is_at_its_step(tmp_path):
    """An array that the loop adds to in place changes no earlier record."""
    total = np.zeros(())
    with JsonLines(tmp_path / "run.jsonl") as run:
        for n in range(4):
            total += 1
            run.write(n, total=total)
    assert read_run(tmp_path / "run.jsonl").get("total").tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("info", [0.5, {"loss": 1.0}])
def test_numbers_without_a_name_are_refused(info, tmp_path):
    """In the place of the telemetry they are named, with the line to write."""
    run = JsonLines(tmp_path / "run.jsonl")
    with pytest.raises(TypeError, match=r"for info; got .*write\(3, loss=loss\)"):
        run.write(3, info)
    run.close()
    assert (tmp_path / "run.jsonl").read_text() == ""
