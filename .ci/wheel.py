"""Builds the wheel, installs it with some extras in a fresh environment, and tests it there.

    python .ci/wheel.py                 the wheel alone: tests of what is missing skip
    python .ci/wheel.py keras           with an extra, or several
    python .ci/wheel.py --jax 0.10.2    with this jax
    python .ci/wheel.py --wheel dist    the wheel in this folder, which is built already

What follows `--` goes to pytest.
"""

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNNER = ["pytest", "pytest-xdist", "hypothesis"]


def main() -> int:
    """Returns the status of pytest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("extras", nargs="*", metavar="EXTRA")
    parser.add_argument("--jax", metavar="VERSION")
    parser.add_argument("--wheel", metavar="FOLDER", type=Path)
    own, rest = sys.argv[1:], []
    if "--" in own:
        own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    words = parser.parse_args(own)
    with tempfile.TemporaryDirectory() as folder:
        built = words.wheel or Path(folder)
        if not words.wheel:
            build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder]
            subprocess.run([*build, str(ROOT)], check=True)
        (wheel,) = built.resolve().glob("gainstage-*.whl")
        venv.create(Path(folder, "env"), with_pip=True)
        python = str(Path(folder, "env", "bin", "python"))
        extras = f"[{','.join(words.extras)}]" if words.extras else ""
        wanted = [f"gainstage{extras} @ {wheel.as_uri()}", *RUNNER]
        wanted += [f"jax=={words.jax}", f"jaxlib=={words.jax}"] if words.jax else []
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
        where = "import gainstage; print(gainstage.__file__)"
        found = subprocess.run(
            [python, "-P", "-c", where], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout
        if "site-packages" not in found:
            raise RuntimeError(f"Expected the wheel to be tested; got {found}.")
        named = any(word.startswith("tests") for word in rest)
        tests = [python, "-P", "-m", "pytest", *([] if named else ["tests"]), *rest]
        return subprocess.run(tests, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
