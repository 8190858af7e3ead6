"""Prints the lowest versions that users may have, by `pyproject.toml`, as constraints for pip."""

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
TOOLS = ("docs", "test")  # extras of which users have nothing


def main() -> None:
    """Prints a line for each requirement that has a lower bound."""
    extras = PROJECT["optional-dependencies"]
    parts = [PROJECT["dependencies"], *(extras[name] for name in extras if name not in TOOLS)]
    bound = r"([\w-]+)(?:\[.*?\])?\s*>=\s*([\w.]+)"
    found = [re.match(bound, each) for part in parts for each in part]
    print("\n".join(f"{match[1]}=={match[2]}" for match in found if match))


if __name__ == "__main__":
    main()
