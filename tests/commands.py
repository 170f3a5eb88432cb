"""megapack-build in this process: starting an interpreter takes longer than most commands do."""

from __future__ import annotations

import contextlib
import io
import subprocess

from megapack.cli.main import main


def build(*words: object) -> subprocess.CompletedProcess[str]:
    """Exit status, stdout and stderr of a command; tests/cli/test_main.py runs the program."""
    arguments = [str(word) for word in words]
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            status = main(arguments)
        except SystemExit as leaving:  # argparse's
            status = int(leaving.code or 0)
    return subprocess.CompletedProcess(arguments, status, stdout.getvalue(), stderr.getvalue())


def printed(*words: object, status: int = 0) -> str:
    """What a command that ends with a status prints: its stdout, or its stderr where it fails."""
    done = build(*words)
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout
