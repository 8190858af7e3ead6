"""What to install where a package of an extra is missing."""


def missing_package(package: str, extra: str, name: str | None = None) -> ModuleNotFoundError:
    """The error for a package that is missing: `name`, where it is imported by another one."""
    # Gainstage is in no index of packages, so its extras are installed from a clone.
    wanted = (
        f'Expected {package} to be installed; run in a clone of gainstage: pip install ".[{extra}]"'
    )
    return ModuleNotFoundError(wanted, name=name or package)
