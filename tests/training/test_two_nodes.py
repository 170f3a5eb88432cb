"""Two nodes with separate networks, host names and sshd; one is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from ports import free_port

from .conftest import NewRun
from .processes import PRETRAIN, ROOT, environment

SCRIPT = Path(__file__).with_name("two_nodes.sh")
BIN = Path(sys.executable).parent
SECTIONS: dict[str, object] = {
    "learning_rate": {"kind": "constant", "warmup_steps": 2},
    "checkpoint": {"every": 3, "keep": 2, "export": False},
    "engine": {"heartbeat_timeout_seconds": 15},
}


def _command(command: list[str], **env: str) -> tuple[int, str]:
    """Run in a new session, which is killed as a whole after a timeout."""
    path = f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(PATH=path, PYTHON_BIN=str(BIN), **env),
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE)
        pytest.fail(f"{command[0]} did not end\n{output[-4000:]}")
    return process.returncode, output


def test_lost_node_is_named(new_run: NewRun, tmp_path: Path) -> None:
    if not os.environ.get("CLUSTER"):
        pytest.skip("make test-cluster starts two nodes")
    code, output = _command(["bash", str(SCRIPT), "--probe"])
    if code == 3:
        pytest.skip(output.strip())
    assert code == 0, output

    run = new_run(num_steps=100000, **SECTIONS)
    kill = {"KILL_NODE": "1", "KILL_WHEN": str(run.checkpoints / "step_00000003_tokens_3072")}
    command = ["bash", str(SCRIPT), str(PRETRAIN), "--config", str(run.config)]
    code, output = _command(command, PORT=str(free_port()), **kill)
    assert code != 0
    assert "lost contact with rank 1 on node1" in output, output[-4000:]
    done, start = int(run.latest.split("_")[1]), run.lines("starts")[0]
    assert start["world_size"] == 2 and start["host"] == "node0"

    # The other node alone, without ssh.
    num_steps = done + 4
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=1\n")
    launcher = ["deepspeed", "--hostfile", str(hosts), "--no_ssh", "--node_rank", "0"]
    launcher += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    launcher += [str(PRETRAIN), "--config", str(run.config), "--set", f"num_steps={num_steps}"]
    code, output = _command(launcher)
    assert code == 0, output[-4000:]
    assert f"continuing at step {done}" in output and "written by 2 ranks" in output

    whole = new_run("whole", num_steps=num_steps, **SECTIONS)
    whole.succeed()
    assert [line["samples"] for line in run.log] == [line["samples"] for line in whole.log]
    losses = [line["loss"] for line in whole.log]
    assert [line["loss"] for line in run.log] == pytest.approx(losses, rel=2e-3)
