"""The prose: one word for one thing, and sentences that are read once."""

import ast
import functools
import importlib.util
import re
from pathlib import Path

import pytest
from docs.test_docs import DOCS, ROOT
from docs.test_site import prose

pytestmark = pytest.mark.repo

LIMIT = 35  # words of a sentence; most have at most 20
FENCED = r"^( *)```.*?^\1```"
CODE = r"(`+)(?!`).+?(?<!`)\1(?!`)"

# What is refused, as a pattern; what to write; a sentence that is refused.
REFUSED = [
    (r"layouts?(?!:)", "sharding", "The layout of an array."),  # not the argument `layout:`
    (r"widen(s|ed|ing)?", "upcast, or `float32_or_wider`", "The gradients are widened."),
    (r"spread (over|across) (the|a|all|several)", "sharded over", "Spread over the mesh."),
    (r"lends?|lent|lending", "bind", "Lends the values to variables."),
    (r"verdicts?", "skip decision", "A shared verdict."),
    (r"vouch(es|ed|ing)?", "proves that every element is finite", "The sums vouch for a step."),
    (r"bears|hears?", "the fact itself", "A rule hears of the loss."),
    (
        r"hand(s|ed|ing)? (\w+ )?over",
        "pass; dispatch overhead",
        "What it costs to hand arrays over.",
    ),
    (r"held against", "the step does not change the scale", "Not held against the scale."),
    (
        r"what(ever)? (is|was|were|has been) (told|seen|asked|known|wanted)",
        "a noun: statistics, norms, request",
        "It returns what was asked.",
    ),
    (r"tall(y|ies)", "window count", "The tally of the window."),
    (r"peers?", "other libraries; `importers`", "State of the peers."),
    (r"largest element is looked for", "is measured", "The largest element is looked for."),
    (r"scales? (may |can |to |will )?moves?d?", "the scale is updated", "How the scale moves."),
    (
        r"(that|which) (is|are|was|were) not finite(?! in)",
        "non-finite",
        "A norm that is not finite.",
    ),
    (r"evidence for the rule", "benchmark of `AdaptiveLossScale`", "Evidence for the rule."),
    (r"the rule that measures", "`AdaptiveLossScale`", "The rule that measures."),
    (r"on the way back", "in the backward pass", "Multiplies on the way back."),
]


@functools.cache
def texts():
    """The prose of each page and docstring, and of the errors of each module, by file."""
    return tuple(read())


def read():
    """The same, file by file."""
    for path, text in prose():
        yield path, re.sub(FENCED, "", text, flags=re.S | re.M)
    for path in (ROOT / "src").glob("**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                yield path, message(node.exc)


def message(error):
    """The text of a raised error, its values left out."""
    parts = [node.value for node in ast.walk(error) if isinstance(node, ast.Constant)]
    return " ".join(part for part in parts if isinstance(part, str))


def name_of(path: Path) -> str:
    """The path of a file inside the repository."""
    return path.relative_to(ROOT).as_posix()


def refused_in(text, pattern):
    """What a pattern finds outside of code, as the text has it."""
    text = re.sub(CODE, "`code`", text, flags=re.S)
    text = re.sub(r"\]\([^)]*\)", "]", text)  # where links point to
    return [m[0] for m in re.finditer(rf"\b(?:{pattern})\b", " ".join(text.split()), re.I)]


def sentences(text):
    """The sentences of a text, without its code, tables and headings."""
    text = re.sub(CODE, "code", text, flags=re.S)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^\s*(\||<!--).*$", "", text, flags=re.M)
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*] |\n#+ .*|\n\s*\d+\. ", "\n" + text):
        yield from re.split(r"(?<=[.!?])[*_]*\s+", " ".join(paragraph.split()))


def too_long(text):
    """The sentences of a text that are over the limit."""
    return [sentence for sentence in sentences(text) if len(sentence.split()) > LIMIT]


@pytest.mark.parametrize(("pattern", "write", "example"), REFUSED, ids=[row[0] for row in REFUSED])
def test_one_word_for_one_thing(pattern, write, example):
    """Pages, docstrings and errors use the field's word, and not the one of the left column."""
    assert refused_in(example, pattern)
    found = {
        f"{name_of(path)}: {word!r}; write: {write}"
        for path, text in texts()
        for word in refused_in(text, pattern)
    }
    assert not found, "\n".join(sorted(found))


def test_code_and_addresses_may_have_any_name():
    """A refused word is right in code and in the address of a link."""
    assert refused_in("`describe_layout` and [this](layout.md).", "layout") == []
    assert refused_in("The layout", "layouts?") == ["layout"]


def test_sentences_are_short():
    """A sentence of a page, docstring or error has at most 35 words; only . ! and ? end one."""
    found = [
        f"{name_of(path)}: {sentence}" for path, text in texts() for sentence in too_long(text)
    ]
    assert not found, "\n".join(found)


def test_a_sentence_ends_at_a_full_stop_only():
    """The count sees through lists and tables, and is not deceived by a semicolon."""
    half = "word " * 20
    assert too_long(f"{half}; {half}.")
    assert not too_long(f"{half}. {half}.\n\n- {half}\n- {half}\n\n| {half} | {half} |\n")
    assert not too_long(f"`{half}` [{half}]({half}).")


def test_every_page_begins_with_its_answer():
    """Before the first section of a page stands a sentence, a table, or code."""
    for page in DOCS.glob("*.md"):
        first = re.split(r"^## ", page.read_text(), flags=re.M)[0]
        assert len(first.splitlines()) > 2, page


TEXTS = {"examples", "faq", "glossary", "migrating", "stability"}  # to look something up


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_a_guide_begins_with_code_that_runs(page):
    """The first block of a guide is Python, before its first section."""
    if page.stem not in TEXTS:
        assert "```python" in re.split(r"^## ", page.read_text(), flags=re.M)[0]


LIMIT_OF_PAGES = 32_000  # words that somebody wrote


def test_the_pages_are_short(capsys):
    """All pages together have at most 32,000 words, their code and tables counted."""
    spec = importlib.util.spec_from_file_location("words", ROOT / ".ci/words.py")
    words = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(words)
    assert words.main() <= LIMIT_OF_PAGES
    assert "in all" in capsys.readouterr().out
