"""Which variables weight decay leaves out."""

import re
from collections.abc import Iterable

from gainstage._core.arguments import variables_in
from gainstage._core.checks import brief
from gainstage._core.variable import Variable


class Undecayed:
    """The variables that are excluded from weight decay: by identity, or by name.

    Args:
        var_list: variables.
        var_names: parts of their names, or regular expressions.
    """

    def __init__(
        self,
        var_list: Iterable[Variable] | None = None,
        var_names: Iterable[str] | None = None,
    ):
        if isinstance(var_names, str):
            raise TypeError(f"Expected a list of strings for var_names; got {var_names!r}.")
        names = list(var_names or ())
        for name in [name for name in names if not isinstance(name, str)]:
            raise TypeError(f"Expected strings in var_names; got {name!r}.")
        try:
            self._patterns = [re.compile(p) for name in names for p in (name, re.escape(name))]
        except re.error as error:
            raise ValueError(
                f"Expected regular expressions in var_names; got {brief(names)}."
            ) from error
        self.variables = set(variables_in([] if var_list is None else var_list, "var_list"))

    def __contains__(self, variable: Variable) -> bool:
        return variable in self.variables or self.names(variable.name)

    def names(self, name: str) -> bool:
        """Whether the name of a variable is one of those that are left out."""
        return any(pattern.search(name) for pattern in self._patterns)
