"""While a command imports a user's module, nothing of a run may be written."""

import contextlib
from collections.abc import Iterator

_commands: list[str] = []  # those that import a module now


@contextlib.contextmanager
def importing(command: str) -> Iterator[None]:
    """Lets `check_not_importing` raise inside of it, in the name of a command."""
    _commands.append(command)
    try:
        yield
    finally:
        _commands.remove(command)


def check_not_importing() -> None:
    """Raises a RuntimeError where a module trains while a command imports it.

    The run would replace the files that the command reads.
    """
    if _commands:
        raise RuntimeError(
            f"`{_commands[-1]}` imports this module, which trains, and would replace the files of "
            f'its run. Train only under `if __name__ == "__main__":`.'
        )
