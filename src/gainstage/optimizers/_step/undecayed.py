"""Which variables weight decay leaves out."""

import re
from collections.abc import Iterable, Sequence

from gainstage._base.checks import brief
from gainstage._base.warn import warn
from gainstage._variables.arguments import variables_in
from gainstage._variables.variable import Variable


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
        self._names = names = list(var_names or ())
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

    def __bool__(self) -> bool:
        return bool(self._names or self.variables)

    def check(self, owner: str, variables: Sequence[Variable]) -> None:
        """Warns if it can leave out none of the variables that an optimizer trains. Patterns may
        match nothing in a model without a bias, but not where variables have no names."""
        unnamed = all(variable.name == "variable" for variable in variables)
        if not (self.variables or (self._names and unnamed)):
            return
        if any(variable in self or variable._is_planned for variable in variables):
            return
        given = f"var_names={brief(self._names)}" if self._names else ""
        others = brief(sorted(variable.name for variable in self.variables))
        given += (" and " if given else "") + f"var_list={others}" if self.variables else ""
        warn(
            f"exclude_from_weight_decay with {given} leaves out none of the variables of "
            f"{owner!r}, {brief([variable.name for variable in variables])}: all of them decay. "
            f'Name them as in gainstage.optimizers.Variable(value, name="bias"), or pass them as '
            f"var_list."
        )

    def names(self, name: str) -> bool:
        """Whether the name of a variable is one of those that are left out."""
        return any(pattern.search(name) for pattern in self._patterns)
