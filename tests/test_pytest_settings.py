"""The settings of this test suite do what they are there for."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("module", ["megapack.data.loader", "megapack", "test_loader"])
def test_a_deprecated_call_of_ours_is_an_error(module: str) -> None:
    """Code that rebinds names of other packages must see that they are going away."""
    with pytest.raises(DeprecationWarning):
        warnings.warn_explicit("going away", DeprecationWarning, "file.py", 1, module=module)


def test_what_other_packages_do_among_themselves_is_not() -> None:
    warnings.warn_explicit("going away", DeprecationWarning, "file.py", 1, module="torch.nn")


@pytest.mark.parametrize(("wanted", "status"), [("3", 0), ("4", 1)])
def test_a_run_that_collects_too_few_tests_fails(tmp_path: Path, wanted: str, status: int) -> None:
    """make test-data says how many there are at least."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_few.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('i', range(3))\ndef test_it(i):\n    pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--at-least", wanted, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == status, done.stdout
    assert ("only 3 tests passed; at least 4 are there" in done.stdout) == bool(status)
