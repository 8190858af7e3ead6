"""A damaged or hostile file is read as it says, or refused: it never crashes what reads it.

Good files of each kind that Gainstage reads are changed, a hundred thousand times in all, and read
in processes of their own. Half of the changes are what a disk or a copy does: other bytes, missing
ones, a second time the same ones. The other half are what a hostile writer does: another
description, other places of the arrays, with checksums that hold.
"""

import argparse
import collections
import copy
import json
import multiprocessing
import random
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gainstage as gs
from benchmarks.harness import between_marks, environment, file_to_write
from gainstage.diagnostics import JsonLines, StepRecorder, read_run, read_step
from gainstage.precision import Plan

from . import DOCS, RESULTS

COUNT, BATCH = 100_000, 500  # files in all, and in a process
SECONDS = 1.0  # the longest that a reading may take
TIMES, FREE = 10, 8 * 2**20  # the memory of a reading: so many times the file, and what is free
SILENT = 60  # seconds after which a process is taken as dead
VALUES = [
    None,
    True,
    0,
    -1,
    2**70,
    1e999,
    -0.0,
    "",
    "a",
    "../../x",
    "O",
    "<U9",
    [],
    {},
    [[]],
    "é\0",
]
TOKENS = [b"null", b"1e999", b"-1", b"[" * 3000, b"{", b'"', b"\xff", b"9" * 400, b"\n", b"NaN"]
KINDS = "state", "step file", "recording", "plan"


class Kind(NamedTuple):
    """A kind of file: a good one, what reads it, and whether its checksums find every change."""

    good: Path
    read: Callable[[Path], Any]
    is_checked: bool


def _state() -> gs.TrainState:
    """A state of some dtypes."""
    extra = [jnp.ones(3, "bfloat16"), jnp.int8(3)]
    return gs.TrainState.create({"w": jnp.ones((3, 4))}, optax.adam(0.1), extra=extra)


def kinds(folder: Path) -> dict[str, Kind]:
    """The kinds of files, of which a good one of each name is in the folder."""
    like = jax.eval_shape(_state)
    reads: dict[str, Callable[[Path], Any]] = {
        "state": lambda path: gs.load(path, like),
        "step file": lambda path: read_step(path).args,
        "recording": read_run,
        "plan": Plan.load,
    }
    checked = "state", "step file"
    return {name: Kind(folder / name, read, name in checked) for name, read in reads.items()}


def write_good_files(folder: Path) -> None:
    """Writes a file of each kind."""
    gs.save(folder / "state", _state())
    zero = jnp.float32(0)
    info = gs.typing.StepInfo(jnp.array(False), jnp.float32(8), zero, zero, zero, zero)
    args = {"w": jnp.ones((3, 4)), "b": [1]}, (np.arange(5), "mode", None, 1.5), jax.random.key(0)
    assert StepRecorder(folder / "step file").write(0, info, *args)
    with JsonLines(folder / "recording", rule=gs.DynamicLossScale()) as run:
        for step in range(30):
            run.write(step, info, loss=float("nan") if step == 7 else step / 8)
    loss = lambda w, x: ((x @ w) ** 2).mean()  # noqa: E731
    batches = [(jnp.ones((32, 16)),), (jnp.full((32, 16), 2.0),)]
    gs.precision.find_plan(loss, jnp.ones((16, 16)), batches).save(folder / "plan")


# ── what is changed ──────────────────────────────────────────────────────────────────────────────


def damaged(data: bytes, draw: random.Random) -> bytes:
    """The bytes of a file after one to four accidents."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        if not data:
            break
        at = draw.randrange(len(data))
        end = min(len(data), at + draw.choice((1, 1, 4, 8, 100)))
        change = draw.randrange(6)
        if change == 0:
            data = data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
        elif change == 1:
            data = data[:at] + draw.randbytes(end - at) + data[end:]
        elif change == 2:
            data = data[:at] + data[end:]
        elif change == 3:
            data = data[:end] + data[at:]
        elif change == 4:
            data = data[:at] + draw.choice(TOKENS) + data[at:]
        else:
            data = data[:at]
    return data


def changed(node: Any, draw: random.Random) -> Any:
    """A description with another value somewhere."""
    node, places = copy.deepcopy(node), list(_places(node))
    for _ in range(draw.choice((1, 1, 2, 3))):
        path = draw.choice(places)
        parent = node
        try:
            for key in path[:-1]:
                parent = parent[key]
            old = parent[path[-1]]
            if draw.random() < 0.2 and isinstance(parent, dict):
                parent[draw.choice(["", "0/w", "__metadata__", f"{path[-1]}x"])] = old
            elif draw.random() < 0.2:
                del parent[path[-1]]
            else:
                small = isinstance(old, int) and draw.random() < 0.5
                parent[path[-1]] = old + draw.choice((-1, 1, 4)) if small else draw.choice(VALUES)
        except (LookupError, TypeError):  # a change before has removed it
            continue
    return node


def _places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in pairs:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from _places(value, (*path, key))


def hostile(data: bytes, draw: random.Random) -> bytes:
    """The bytes of a file that says something else, with checksums that hold."""
    if data[:1] == b"{":  # text
        lines = data.decode().splitlines()
        at = draw.randrange(len(lines)) if data.count(b'{"step"') > 1 else None
        if at is None:
            return json.dumps(changed(json.loads(data), draw)).encode()
        lines[at] = json.dumps(changed(json.loads(lines[at]), draw))
        return "\n".join(lines).encode() + b"\n"
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    facts = json.loads(header["__metadata__"]["gainstage"])
    if draw.random() < 0.7:
        facts = changed(facts, draw)
    else:
        header = changed(header, draw)
    text = json.dumps(facts)
    crc = str(zlib.crc32(text.encode()))
    header["__metadata__"] = {"gainstage": text, "gainstage crc32": crc}
    new = json.dumps(header).encode()
    return len(new).to_bytes(8, "little") + new + data[end:]


# ── what comes of it ─────────────────────────────────────────────────────────────────────────────


def outcome(kind: Kind, path: Path, right: list[bytes], is_damage: bool) -> str:
    """What the reading of a file comes to, in a word or two."""
    size = path.stat().st_size
    before, began = _peak(), time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a run with a torn line says so
            found = _content(kind.read(path))
        result = "read as it says"
        if found == right:
            result = "right"
        elif kind.is_checked and is_damage:
            result = "WRONG CONTENT"
    except ValueError as error:
        is_ours = str(error).startswith("Expected")
        result = "refused" if is_ours else f"ANOTHER ERROR: {type(error).__name__} {error}"[:200]
    except Exception as error:
        result = f"ANOTHER ERROR: {type(error).__name__} {error}"[:200]
    if time.perf_counter() - began > SECONDS:
        result = f"SLOW: {result}"
    if _peak() - before > TIMES * size + FREE:
        result = f"MEMORY: {result}"
    return result


def _content(found: Any) -> list[bytes]:
    """What was read, as bytes that can be compared."""
    if isinstance(found, Plan):
        return [str(found).encode()]
    leaves, structure = jax.tree.flatten(found)
    plain = [jax.random.key_data(x) if _is_key(x) else x for x in leaves]
    return [str(structure).encode(), *(np.asarray(x).tobytes() for x in plain)]


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _peak() -> int:
    """The largest memory of this process since the last call, in bytes; 0 where none is told."""
    try:
        text = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return 1024 * int(text.split("VmHWM:")[1].split()[0])


def batch(good: str, name: str, seed: int, count: int, note: str) -> dict[str, int]:
    """Reads files of a kind, made of the one in the folder `good`; the number of each outcome.
    `note` has the number of the one that is read, for whoever finds this process dead."""
    found: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        kind = kinds(Path(good))[name]
        data, path = kind.good.read_bytes(), Path(folder) / "changed"
        right = _content(kind.read(kind.good))
        for number in range(count):
            draw = random.Random(f"{name} {seed} {number}")
            is_damage = draw.random() < 0.5
            path.write_bytes((damaged if is_damage else hostile)(data, draw))
            Path(note).write_text(f"{name}, seed {seed}, file {number}")
            found[outcome(kind, path, right, is_damage)] += 1
    return dict(found)


def examined(count: int, workers: int) -> dict[str, dict[str, int]]:
    """The outcomes of each kind of file; a process that dies or hangs is one of them."""
    jobs = [
        (name, seed, min(BATCH, count // len(KINDS) - seed * BATCH))
        for name in KINDS
        for seed in range(-(-count // len(KINDS) // BATCH))
    ]
    found = {name: collections.Counter[str]() for name in KINDS}
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as good,
        tempfile.TemporaryDirectory() as notes,
        ProcessPoolExecutor(workers, context) as pool,
    ):
        write_good_files(Path(good))
        running = {}
        for number, job in enumerate(jobs):
            note = f"{notes}/{number}"
            running[pool.submit(batch, good, *job, note)] = (job[0], note)
        for done, future in enumerate(as_completed(running, timeout=SILENT * len(jobs)), 1):
            name, note = running[future]
            try:
                found[name].update(future.result())
            except Exception as error:  # the process is dead
                at = Path(note).read_text() if Path(note).exists() else "not started"
                found[name][f"CRASH: {type(error).__name__} at {at}"] += 1
            print(f"\r{done} of {len(jobs)} batches", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {name: dict(sorted(counts.items())) for name, counts in found.items()}


def failures(results: dict[str, dict[str, int]]) -> list[str]:
    """What must not be: outcomes in capitals."""
    return [
        f"{name}: {count} x {result}"
        for name, counts in results.items()
        for result, count in counts.items()
        if result[:4].isupper()
    ]


def markdown(results: dict[str, Any]) -> str:
    """The table of the page."""
    rows = [
        "| file | files | refused | right all the same | read as it says | "
        "crashes, hangs, too much memory, wrong content, other errors |",
        "|---|---|---|---|---|---|",
    ]
    for name, counts in results["kinds"].items():
        good = [counts.get(word, 0) for word in ("refused", "right", "read as it says")]
        bad = sum(counts.values()) - sum(good)
        cells = [f"{n:,}" for n in (sum(counts.values()), *good, bad)]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Reads all files, prints the table, and writes the results and the page."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=file_to_write, default=RESULTS / "faults" / "files.json")
    parser.add_argument("--page", type=Path, default=DOCS / "faults.md")
    options = parser.parse_args(argv)
    began = time.perf_counter()
    found = examined(options.count, options.workers)
    results = {"environment": environment(), "count": options.count, "kinds": found}
    print(markdown(results), f"\n{time.perf_counter() - began:.0f} s")
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    if options.page.exists():
        text = options.page.read_text()
        options.page.write_text(between_marks(text, markdown(results), "files"))
    if said := failures(found):
        sys.exit("\n".join(said))


if __name__ == "__main__":
    main()
