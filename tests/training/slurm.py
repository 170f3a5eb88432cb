"""A Slurm of one node on this machine: munged, slurmctld and slurmd with their files in a folder.

Needs Debian's slurmctld, slurmd, slurm-client and munge, and root. The node claims more cores and
GPUs than the machine has (null devices), so that launch/slurm.sh runs unchanged. A plugin with the
options of pyxis replaces it (``container_options.c``, compiled here).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from patience import PATIENCE
from ports import free_port

from .processes import ROOT, environment, wait_for

SCRIPT = ROOT / "launch" / "slurm.sh"
TOOLS = ("cc", "munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
DAEMONS = {"munged": ["--foreground", "--force"], "slurmctld": ["-D"], "slurmd": ["-D"]}
GPUS = 8
CONFIGURATION = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
JobRequeue=0
MinJobAge=3600
KillWait={kill_wait}
PlugStackConfig={folder}/plugstack.conf
NodeName={host} NodeAddr=127.0.0.1 CPUs=64 Gres=gpu:{gpus}
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return why Slurm cannot run here; None: it can."""
    if not os.environ.get("CLUSTER"):
        return "make test-cluster starts one"
    if os.geteuid() != 0:
        return "this is not root"
    absent = [tool for tool in TOOLS if shutil.which(tool, path=_path()) is None]
    return f"{', '.join(absent)} not installed" if absent else None


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/usr/bin"


@dataclass(frozen=True)
class Slurm:
    """Commands of a running Slurm."""

    folder: Path

    def call(self, *command: str, cwd: Path | None = None, **env: str) -> str:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            cwd=cwd,
            env=environment(PATH=_path(), SLURM_CONF=str(self.folder / "slurm.conf"), **env),
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *options: str, cwd: Path, **env: str) -> str:
        """Submit launch/slurm.sh with ``options`` of sbatch; return the job id."""
        answer = self.call("sbatch", "--parsable", *options, str(SCRIPT), cwd=cwd, **env)
        return answer.strip()

    def facts(self, job: str) -> dict[str, str]:
        """Return the facts of ``scontrol show job``."""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", maxsplit=1) for word in words if "=" in word)

    def wait_until_over(self, job: str) -> dict[str, str]:
        """Wait until a job neither runs nor will run; return its facts."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_for(lambda: self.facts(job)["JobState"] in over, f"job {job}", pause=0.5)
        return self.facts(job)

    def use_containers(self, there: bool) -> None:
        """Enable or disable the plugin, which every srun loads."""
        line = f"required {self.folder}/container.so\n" if there else ""
        (self.folder / "plugstack.conf").write_text(line)


@contextmanager
def one_node(folder: Path, *, kill_wait: int = 30) -> Iterator[Slurm]:
    """Start Slurm with its files in a folder; stop its daemons at the end.

    ``kill_wait``: seconds between SIGTERM and SIGKILL of a cancelled or requeued job.
    """
    host = socket.gethostname().split(".", maxsplit=1)[0]
    for name in ("spool", "state"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)  # munge requires it
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    for gpu in range(GPUS):
        os.mknod(folder / f"gpu{gpu}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"NodeName={host} Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
    ports = {"controller_port": free_port(), "node_port": free_port()}
    given = {"host": host, "folder": folder, "kill_wait": kill_wait, "gpus": GPUS, **ports}
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**given))
    slurm = Slurm(folder)
    _compile_plugin(slurm)
    munge = [f"--socket={folder}/munge.socket"]
    munge += [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for name, options in DAEMONS.items():
            given = [*options, *(munge if name == "munged" else ())]
            daemons.append(_daemon([name, *given], folder))
            time.sleep(1)
        _wait_for_node(slurm, daemons)
        yield slurm
    finally:
        if len(daemons) == len(DAEMONS):  # processes of a failed test
            slurm.call("scancel", "--me")
            time.sleep(kill_wait if slurm.call("squeue", "--noheader") else 0)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(timeout=PATIENCE)


def _compile_plugin(slurm: Slurm) -> None:
    version = slurm.call("sinfo", "--version").split()[-1].split(".")
    number = sum(int(part) << shift for part, shift in zip(version, (16, 8, 0), strict=True))
    source = str(Path(__file__).with_name("container_options.c"))
    out = str(slurm.folder / "container.so")
    slurm.call("cc", "-shared", "-fPIC", "-Wall", f"-DSLURM={number}", "-o", out, source)
    slurm.use_containers(True)


def _daemon(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    env = environment(PATH=_path(), SLURM_CONF=str(folder / "slurm.conf"))
    with (folder / f"{command[0]}.out").open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)


def _wait_for_node(slurm: Slurm, daemons: list[subprocess.Popen[bytes]]) -> None:
    def is_idle() -> bool:
        assert all(daemon.poll() is None for daemon in daemons), "a daemon of Slurm ended"
        with suppress(AssertionError):  # the controller may not answer yet
            return "idle" in slurm.call("sinfo", "--noheader", "--format=%T")
        return False

    wait_for(is_idle, "the node", pause=0.5)
