"""What a user's subclass does with an optimizer: the methods that it overrides, the attributes that
it sets or misses."""

import difflib
from collections.abc import Iterable, Sequence

from gainstage._base.checks import InvalidArgumentError

VERBS = ("minimize", "compute_gradients", "apply_gradients", "apply", "stateless_apply")


def overrides(optimizer: object, name: str) -> type | None:
    """The class of a user that overrides an attribute of our classes; None if there is none."""
    owner = next(cls for cls in type(optimizer).__mro__ if name in vars(cls))
    return None if is_ours(owner) else owner


def is_ours(cls: type) -> bool:
    """Whether a class is of this library, and not of a user."""
    return cls.__module__.partition(".")[0] == "gainstage"


def missing_attribute(optimizer: object, name: str) -> str:
    """What to do about an attribute that an optimizer does not have."""
    held, cls = vars(optimizer), type(optimizer)
    if name == "_store":
        return f" Call super().__init__(learning_rate) in {cls.__name__}.__init__."
    inner = held.get("_inner")
    if inner is not None and not name.startswith("_") and hasattr(inner, name):
        return " It is an attribute of `inner_optimizer`."
    if not getattr(held.get("_store"), "index", None):
        return " If `build(variables)` creates it, call that first."
    return ""


def check_attribute(optimizer: object, name: str, options: Iterable[str]) -> None:
    """Raises an error if a new attribute of one of our classes looks like a misspelled option."""
    cls = type(optimizer)
    known = name.startswith("_") or hasattr(cls, name) or name in vars(optimizer)
    if known or not is_ours(cls):
        return
    right = {each.replace("_", ""): each for each in options}
    spelled = "learningrate" if name == "lr" else name.replace("_", "").lower()
    if near := difflib.get_close_matches(spelled, right, n=1, cutoff=0.9):
        raise AttributeError(
            f"{cls.__name__!r} object has no attribute {name!r}. Set `{right[near[0]]}`."
        )


UPDATE_STEP = (
    "Override update_step, or change the gradients before they are given to the optimizer."
)


def check_verbs(
    optimizer: object, caller: str, verbs: Sequence[str] = VERBS, remedy: str = UPDATE_STEP
) -> None:
    """Raises an error if the user's class overrides one of `verbs`, which `caller` bypasses."""
    for verb in verbs:
        if owner := overrides(optimizer, verb):
            raise InvalidArgumentError(
                f"{owner.__name__} overrides {verb}, which {caller} does not call. {remedy}"
            )
