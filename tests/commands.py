"""Run megapack-build in this process, since starting an interpreter takes longer."""

from __future__ import annotations

import contextlib
import io
import subprocess

from megapack.cli.main import main


def build(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a command; return exit status, stdout and stderr."""
    arguments = [str(word) for word in words]
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            status = main(arguments)
        except SystemExit as leaving:  # argparse's
            status = int(leaving.code or 0)
    return subprocess.CompletedProcess(arguments, status, stdout.getvalue(), stderr.getvalue())


def printed(*words: object, status: int = 0) -> str:
    """Run a command, check its status, and return stdout, or stderr if it fails."""
    done = build(*words)
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout
