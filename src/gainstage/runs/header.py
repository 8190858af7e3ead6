"""The description of a run in its recording: rule, dtypes of the parameters, versions, devices."""

import ast
import dataclasses
import math
from collections import Counter
from typing import Any

import jax

from gainstage import __version__
from gainstage.rules.adaptive import AdaptiveLossScale
from gainstage.rules.loss_scale import DynamicLossScale, FixedLossScale, LossScale

RULES = {rule.__name__: rule for rule in (AdaptiveLossScale, DynamicLossScale, FixedLossScale)}
LONGEST_RULE = 1000  # characters of a rule in a file


def header(rule: LossScale | None, params: Any) -> dict[str, Any]:
    """Returns the description of a run for the first record of its recording.

    Args:
        rule: the rule of the run, if it is known.
        params: a pytree of its parameters, arrays or `Variable`s, if they are known.
    """
    said: dict[str, Any] = {} if rule is None else {"rule": code_of(rule)}
    dtypes = Counter(str(x.dtype) for x in jax.tree.leaves(params) if hasattr(x, "dtype"))
    if dtypes:
        said["dtypes"] = dict(dtypes)
    kinds = Counter(device.device_kind for device in jax.devices())
    device = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return said | {"versions": {"gainstage": __version__, "jax": jax.__version__, "device": device}}


def checked_header(said: dict[str, Any]) -> dict[str, Any]:
    """The entries of a header that have the right types; others are dropped, not refused."""
    known = {"rule": said["rule"]} if isinstance(said.get("rule"), str) else {}
    for name, kind in (("dtypes", int), ("versions", str)):
        found = said.get(name)
        if isinstance(found, dict) and all(isinstance(value, kind) for value in found.values()):
            known[name] = found
    return known


def code_of(rule: LossScale) -> str:
    """The code that creates a rule: only arguments other than the defaults, the first unnamed."""
    if not dataclasses.is_dataclass(rule):
        return f"{type(rule).__name__}()"
    arguments = []
    for place, field in enumerate(dataclasses.fields(rule)):
        value = getattr(rule, field.name)
        known = field.default is None and rule == dataclasses.replace(rule, **{field.name: None})
        if value != field.default and not known:
            power = isinstance(value, float) and value != 1 and math.frexp(value)[0] == 0.5
            text = f"2.0**{math.frexp(value)[1] - 1}" if power else repr(value)
            arguments.append(text if place == 0 else f"{field.name}={text}")
    return f"{type(rule).__name__}({', '.join(arguments)})"


def rule_of(code: str) -> LossScale | None:
    """The rule from the code of `code_of`; None if it is not one of Gainstage's own.

    Only numbers are evaluated, because a file may contain anything.
    """
    try:
        call: Any = ast.parse(code[:LONGEST_RULE], mode="eval").body
        keywords = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
        return RULES[call.func.id](*map(_literal, call.args), **keywords)
    except (SyntaxError, AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None
    except (MemoryError, RecursionError):  # the code is nested too deeply
        return None


def _literal(node: Any) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, power = ast.literal_eval(node.left), ast.literal_eval(node.right)
        if not isinstance(base, float) or not isinstance(power, int):
            raise ValueError(node)
        return base**power
    return ast.literal_eval(node)
