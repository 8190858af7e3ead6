"""How strong the suite is: small changes to the source, one at a time, that a test must notice.

    python -m tests.mutants cover          which test runs which line, once, with coverage
    python -m tests.mutants try [--again]  300 mutants, or --count, on two cores, or --workers
    python -m tests.mutants page           writes tests/mutants.md; fails if too many live

Each worker changes a copy of the tree, and runs the tests that pass the changed line, the most
special ones first. A mutant that no test notices is killed by a new test, or said to be equivalent
in `mutants.json`, with the reason. Results are kept after each mutant, so `try` goes on where it
was stopped. It needs the group `mutants`.
"""

import argparse
import ast
import concurrent.futures
import itertools
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "gainstage"
COVERAGE, RESULTS, PAGE = (
    ROOT / n for n in (".coverage", "tests/mutants.json", "tests/mutants.md")
)
SEED = 20
# The share of each part of the source in a sample, and the part of the mutants that must be killed.
CORE, ELSEWHERE = 0.95, 0.85
PARTS = {
    "rules": (("rules/",), 0.1, CORE),
    "scaling": (("_scaling/",), 0.2, CORE),
    "transforms": (("transforms/",), 0.2, CORE),
    "step": (("optimizers/_step/",), 0.15, CORE),
    "optimizers": (("optimizers/", "compat/"), 0.15, ELSEWHERE),
    "interop": (("interop/", "_variables/"), 0.1, ELSEWHERE),
    "precision, runs, xray": (("precision/", "runs/", "_xray/", "_programs/"), 0.1, ELSEWHERE),
}
SECONDS = 300  # for the tests of one mutant
FIRST, MOST = 40, 300  # tests that are run before the others, and in all
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATIONS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Pow: "*",
    ast.BitAnd: "|", ast.BitOr: "&", ast.Mod: "+",
}  # fmt: skip


class Mutant(NamedTuple):
    """A change of one place."""

    path: str
    line: int
    start: int  # in the file, in bytes
    end: int
    new: str

    @property
    def key(self) -> str:
        """The place and the change, for the file of results."""
        text = (SRC / self.path).read_bytes()
        old = " ".join(text[self.start : self.end].decode().split())
        lines = text.decode().splitlines()
        return f"{self.path} | {lines[self.line - 1].strip()} | {old[:80]} -> {self.new[:80]}"


def mutants_of(path: str) -> Iterator[Mutant]:
    """All mutants of a file. Messages, annotations and docstrings have none."""
    text = (SRC / path).read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        return begin, starts[node.end_lineno - 1] + node.end_col_offset

    def source(node: ast.expr) -> str:
        begin, end = place(node)
        return text[begin:end].decode()

    def whole(node: ast.expr | ast.stmt, new: str) -> Mutant:
        return Mutant(path, node.lineno, *place(node), new)

    def visit(node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.JoinedStr() | ast.Raise() | ast.Import() | ast.ImportFrom():
                return
            case ast.Call(func=ast.Name(id="warn" | "cast" | "TypeVar")):
                return
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                for part in node.orelse:
                    yield from visit(part)
                return
            case ast.Expr(value=ast.Constant()) | ast.keyword(arg="strict"):
                return
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                yield whole(node, f"({source(left)}) {COMPARISONS[type(op)]} ({source(right)})")
            case ast.BoolOp(op=op, values=values):
                other = " or " if isinstance(op, ast.And) else " and "
                yield whole(node, "(" + other.join(f"({source(v)})" for v in values) + ")")
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
                yield whole(node, f"({source(left)} {OPERATIONS[type(op)]} {source(right)})")
            case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub(), operand=operand):
                yield whole(node, f"({source(operand)})")
            case ast.IfExp(test=test, body=body, orelse=other):
                yield whole(node, f"({source(other)} if {source(test)} else {source(body)})")
            case ast.Constant(value=bool() as value):
                yield whole(node, str(not value))
            case ast.Constant(value=int() | float() as value):
                yield whole(node, repr(value + 1))
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                yield whole(node, "pass")
            case _:
                pass
        if isinstance(node, ast.If | ast.While):
            yield Mutant(path, node.test.lineno, *place(node.test), f"not ({source(node.test)})")
        for name, field in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
                continue
            for part in field if isinstance(field, list) else [field]:
                if isinstance(part, ast.AST):
                    yield from visit(part)

    tree = ast.parse(text)
    for node in tree.body:
        yield from visit(node)


def sample(count: int) -> dict[str, list[Mutant]]:
    """A fixed choice of mutants for each part of the source."""
    chosen, chance, taken = {}, random.Random(SEED), set[str]()
    for part, (rooms, share, _) in PARTS.items():
        paths = sorted(p.relative_to(SRC).as_posix() for p in SRC.rglob("*.py"))
        own = [p for p in paths if p.startswith(rooms) and p not in taken]
        taken |= set(own)
        every = [m for p in own for m in mutants_of(p)]
        chosen[part] = chance.sample(every, min(len(every), round(share * count)))
    return chosen


def tests_by_line() -> dict[tuple[str, int], list[str]]:
    """The tests that run each line, those that run the fewest lines first."""
    base = sqlite3.connect(COVERAGE)
    contexts = dict(base.execute("select id, context from context"))
    files = dict(base.execute("select id, path from file"))
    rows: dict[tuple[str, int], set[str]] = defaultdict(set)
    length: dict[str, int] = defaultdict(int)
    for file, context, bits in base.execute("select file_id, context_id, numbits from line_bits"):
        test = contexts[context].partition("|")[0]
        if not test or "/gainstage/" not in files[file]:
            continue
        path = files[file].rpartition("/gainstage/")[2]
        numbers = [8 * i + j for i, byte in enumerate(bits) for j in range(8) if byte >> j & 1]
        length[test] += len(numbers)
        for number in numbers:
            rows[path, number].add(test)
    return {line: sorted(tests, key=lambda t: length[t]) for line, tests in rows.items()}


def tests_of(mutant: Mutant, by_line: dict[tuple[str, int], list[str]]) -> list[str]:
    """The tests of a mutant: those of its line; of its file, where only the import runs it."""
    own = by_line.get((mutant.path, mutant.line))
    if own is None:
        of_file = (tests for (path, _), tests in by_line.items() if path == mutant.path)
        own = list(dict.fromkeys(itertools.chain(*of_file)))
    functions = defaultdict[str, list[str]](list)
    for test in own:
        functions[test.partition("[")[0]].append(test)
    rows = itertools.zip_longest(*functions.values())  # one of each function, then another of each
    return [test for row in rows for test in row if test]


def tried(mutant: Mutant, tests: list[str], tree: Path) -> str:
    """What becomes of a mutant in a copy of the tree: "killed", "alive" or "timed out"."""
    file = tree / "src" / "gainstage" / mutant.path
    before = file.read_bytes()
    file.write_bytes(before[: mutant.start] + mutant.new.encode() + before[mutant.end :])
    options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "-m", "not slow and not programs"]
    limit = time.monotonic() + SECONDS
    try:
        for some in (tests[:FIRST], tests[FIRST:MOST]):
            if not some:
                continue
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *some],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                timeout=max(limit - time.monotonic(), 1),
                check=False,
            )
            if done.returncode not in (0, 5):  # 5: none of them was run
                return "killed"
    except subprocess.TimeoutExpired:
        return "timed out"
    finally:
        file.write_bytes(before)
    return "alive"


def read() -> dict[str, dict[str, str]]:
    """The results so far: for each mutant its part, what became of it, and why it may live."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def try_all(count: int, workers: int, again: bool) -> None:
    """Tries the mutants of a sample that were not tried yet, or all but the equivalent `again`."""
    results, by_line = read(), tests_by_line()
    if again:
        results = {k: r for k, r in results.items() if r["verdict"] == "equivalent"}
    todo = [(part, m) for part, some in sample(count).items() for m in some if m.key not in results]
    random.Random(SEED).shuffle(todo)
    with tempfile.TemporaryDirectory() as folder:
        trees = [Path(folder) / str(n) for n in range(workers)]
        for tree in trees:
            ignored = shutil.ignore_patterns(".git", "*.pyc", "__pycache__", ".coverage*")
            shutil.copytree(ROOT, tree, ignore=ignored)
        free = list(trees)

        def one(mutant: Mutant) -> str:
            tree = free.pop()
            try:
                return tried(mutant, tests_of(mutant, by_line), tree)
            finally:
                free.append(tree)

        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            runs = {pool.submit(one, mutant): (part, mutant) for part, mutant in todo}
            for n, run in enumerate(concurrent.futures.as_completed(runs), 1):
                part, mutant = runs[run]
                results[mutant.key] = {"part": part, "verdict": run.result()}
                RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
                print(f"{n} of {len(runs)}: {run.result()}: {mutant.key}", flush=True)


def write_page() -> bool:
    """Writes what became of the mutants, and those that live; returns whether few enough do."""
    results, enough = read(), True
    rows = ["| part | mutants | killed | equivalent | alive | killed of the others |"]
    rows.append("|---|---:|---:|---:|---:|---:|")
    for part, (_, _, least) in PARTS.items():
        own = [r for r in results.values() if r["part"] == part]
        same = sum(r["verdict"] == "equivalent" for r in own)
        killed = sum(r["verdict"] == "killed" for r in own)
        share = killed / max(len(own) - same, 1)
        enough &= share >= least
        numbers = f"{len(own)} | {killed} | {same} | {len(own) - same - killed}"
        rows.append(f"| {part} | {numbers} | {share:.0%} (at least {least:.0%}) |")
    left = {k: r for k, r in results.items() if r["verdict"] != "killed"}
    lines = [f"- `{k}`: {r.get('why', r['verdict'])}" for k, r in sorted(left.items())]
    head = (__doc__ or "").partition("\n")[0]
    text = f"# Mutants\n\n{head}\nThe command is `python -m tests.mutants`.\n\n"
    PAGE.write_text(text + "\n".join(rows) + "\n\n## Not killed\n\n" + "\n".join(lines) + "\n")
    return enough


def cover() -> None:
    """Runs the suite with coverage, and notes which test runs which line."""
    words = ["-q", "-p", "no:cacheprovider", "--cov=gainstage", "--cov-context=test"]
    words += ["--cov-report=", "-m", "not slow and not programs"]
    subprocess.run([sys.executable, "-m", "pytest", *words, "tests"], cwd=ROOT, check=True)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["cover", "try", "page"])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--again", action="store_true")
    given = parser.parse_args()
    if given.what == "cover":
        cover()
    elif given.what == "try":
        try_all(given.count, given.workers, given.again)
    elif not write_page():
        sys.exit("Too many mutants live: see tests/mutants.md.")


if __name__ == "__main__":
    main()
