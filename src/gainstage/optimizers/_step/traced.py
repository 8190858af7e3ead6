"""Python numbers that an optimizer's class changes while its step is traced."""

from gainstage._base.warn import warn


class Traced:
    """Notes the numbers that a trace of the step has changed, and tells of them once.

    Args:
        owner: the optimizer's name.
    """

    def __init__(self, owner: str):
        self._owner, self._told = owner, False
        self.changed: dict[str, tuple[object, object]] = {}  # the values before and after

    def note(self, name: str, old: object, new: object) -> None:
        """Notes that an attribute is set while the step is traced."""
        if type(old) in (int, float) and type(new) in (int, float) and not self._told:
            first, _ = self.changed.get(name, (old, new))
            self.changed[name] = first, new
            if first == new:  # set back at the end of the step
                del self.changed[name]

    def tell(self) -> None:
        """Warns of the numbers that change only when the step is compiled."""
        self._told = True
        for name, (first, new) in self.changed.items():
            warn(
                f"update_step of {self._owner!r} has set {name} from {first!r} to {new!r}. The "
                f"compiled step has this number, and does not set it again. Write self.{name} = "
                f"self.add_variable((), name={name.strip('_')!r}) in build and "
                f"self.assign_add(self.{name}, 1) in update_step, or pass jit_compile=False."
            )
        self.changed = {}
