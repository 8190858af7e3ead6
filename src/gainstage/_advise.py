"""`gainstage advise`: what each precision costs on a user's loss, parameters and batches."""

import importlib
import sys
from pathlib import Path
from typing import Any

from gainstage.precision import advise
from gainstage.xray.from_file import imported_from


def main(words: str, count: int | None, card: str, output: Path | None) -> int:
    """Prints the advice, and writes its page.

    Args:
        words: "module:function", of a function that returns (loss_fn, params, batches).
        count: how many batches to use, None for all.
        card: the name of the card of the times.
        output: where to write the page; None for nowhere.

    Returns:
        The exit status: 0, or 1 after an error.
    """
    page: Any = None
    if output is not None:  # needs an extra: a missing one is found before the work
        page = importlib.import_module("gainstage.runs.advice_page").page
    try:
        given = imported_from("MODULE:FUNCTION", words, _called, "gainstage advise")
        if not isinstance(given, tuple) or len(given) != 3:
            raise ValueError(
                f"Expected (loss_fn, params, batches) from {words}; got {type(given).__name__}."
            )
        loss_fn, params, batches = given
        advice = advise(loss_fn, params, batches if count is None else batches[:count], card=card)
    except (TypeError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(advice)
    if output is not None:
        output.write_text(page(advice), encoding="utf-8")
        print(f"Page: {output}")
    return 0


def _called(function: Any) -> Any:
    return function()
