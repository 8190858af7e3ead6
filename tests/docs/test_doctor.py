"""`gainstage doctor`: what it prints, and what its exit status says."""

from importlib.metadata import PackageNotFoundError, version

import pytest

from gainstage import _doctor as doctor
from gainstage.__main__ import main


def test_all_is_well_here(capsys):
    """Versions, devices, how products are computed, and four checks; status 0."""
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in ("gainstage 0.", "jax 0.", "0: cpu (cpu, process 0 of 1)", "float8_e5m2"):
        assert word in said
    for package in ("keras", "flax", "equinox"):
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "is not installed"
        assert f"\n  {package} {found}\n" in said
    assert said.count(": yes\n") == len(doctor.CHECKS) == 4
    assert "NO" not in said
    assert said.endswith("gainstage advise MODULE:FUNCTION\n")


def test_what_fails_is_told(capsys, monkeypatch):
    """A check that does not hold is named with its reason, and the status is 1."""

    def broken():
        """numbers are numbers:"""
        raise ValueError("Expected 1; got 2.\nand more")

    monkeypatch.setattr(doctor, "CHECKS", [broken])
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert "numbers are numbers: NO: ValueError: Expected 1; got 2.\n" in captured.out
    assert "please report it" in captured.err


@pytest.mark.parametrize(("text", "said"), [("", ""), ("\nNot equal\nat all", "Not equal")])
def test_errors_with_little_or_much_to_say_are_told(text, said, capsys, monkeypatch):
    """The first line with something in it is shown, if there is one."""

    def broken():
        """numbers are numbers:"""
        raise NotImplementedError(text)

    monkeypatch.setattr(doctor, "CHECKS", [broken])
    assert main(["doctor"]) == 1
    assert f"NO: NotImplementedError: {said}\n" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_products(dtype):
    """XLA for CPU widens half precision, and says so in its program; float32 it computes as is."""
    wanted = {"float16": "is computed in f32", "float32": "is computed as such"}[dtype]
    assert doctor.how_multiplied(dtype) == wanted
