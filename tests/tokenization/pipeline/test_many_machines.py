"""One dataset from many machines: Slurm's array as plain processes, and a Ray cluster that loses a
node in the middle.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from peers import peer

from megapack import IndexedDataset
from megapack.errors import DataError
from megapack.executors import Counted

from ..helpers import Build, Silence, WriteJsonl, files_of

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "launch" / "tokenize_slurm.sh"


@pytest.fixture
def alone(tmp_path: Path, corpus: Path, run_build: Build) -> tuple[bytes, bytes]:
    """What one machine makes of the corpus."""
    run_build(corpus, append_eod=True, output_prefix=str(tmp_path / "alone"))
    return files_of(tmp_path / "alone")


def environment(**more: str) -> dict[str, str]:
    build = f"{sys.executable} -m megapack.cli.main"
    return {**os.environ, "PYTHONPATH": str(ROOT), "MEGAPACK_BUILD": build, **more}


def arguments(corpus: Path, prefix: Path) -> list[str]:
    common = ["--input", str(corpus), "--tokenizer", "bytes", "--append-eod"]
    return [*common, "--output-prefix", str(prefix), "--shard-bytes", "30K"]


def test_array_makes_the_dataset(tmp_path: Path, corpus: Path, alone: tuple[bytes, bytes]) -> None:
    prefix = tmp_path / "out"
    tasks = [
        subprocess.Popen(
            [str(SCRIPT), *arguments(corpus, prefix)],
            env=environment(
                SLURM_ARRAY_TASK_ID=str(5 + i),
                SLURM_ARRAY_TASK_MIN="5",
                SLURM_ARRAY_TASK_COUNT="3",
                SLURM_CPUS_PER_TASK="1",
            ),
            stdout=subprocess.DEVNULL,
        )
        for i in range(3)
    ]
    assert [task.wait(timeout=PATIENCE) for task in tasks] == [0, 0, 0]
    assert not IndexedDataset.exists(prefix)
    finish = [str(SCRIPT), "--finish", *arguments(corpus, prefix)]
    subprocess.run(finish, check=True, env=environment(), stdout=subprocess.DEVNULL)
    assert files_of(prefix) == alone


SBATCH = """#!/bin/bash
# Runs what it is given at once, as Slurm would on free machines; prints a job number.
tasks=
while [[ $1 == --* ]]; do
    case $1 in --array=0-*) tasks=${1#--array=0-} ;; esac
    echo "$1" >> "$SBATCH_LOG"
    shift
done
if [[ -n $tasks ]]; then
    for i in $(seq 0 "$tasks"); do
        SLURM_ARRAY_TASK_ID=$i SLURM_ARRAY_TASK_MIN=0 SLURM_ARRAY_TASK_COUNT=$((tasks + 1)) \\
            "$@" > /dev/null
    done
else
    "$@" > /dev/null
fi
echo $RANDOM
"""


def test_script_submits_an_array(tmp_path: Path, corpus: Path, alone: tuple[bytes, bytes]) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "sbatch").write_text(SBATCH)
    (tools / "sbatch").chmod(0o755)
    log = tmp_path / "sbatch.log"
    done = subprocess.run(
        [str(SCRIPT), "2", *arguments(corpus, tmp_path / "out")],
        check=False,
        capture_output=True,
        text=True,
        env=environment(
            PATH=f"{tools}:{os.environ['PATH']}", SBATCH_LOG=str(log), TASK_OPTIONS="--mem=1G"
        ),
    )
    assert done.returncode == 0, done.stderr
    assert "2 tasks" in done.stdout
    said = log.read_text().split()
    assert {"--array=0-1", "--mem=1G"} <= set(said)
    assert any(option.startswith("--dependency=afterok:") for option in said)
    assert files_of(tmp_path / "out") == alone
    usage = subprocess.run([str(SCRIPT)], check=False, capture_output=True, env=environment())
    assert usage.returncode == 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one CPU each, beside a head that does no work."""
    ray, cluster_utils = peer("ray"), peer("ray.cluster_utils")
    # Workers must find megapack, and need no authentication between processes of one machine.
    settings = {
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_raylet_start_wait_time_s": "300",  # a busy machine takes longer than 60
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


class KillsANode(Silence):
    """Takes a node away as soon as two shards are done."""

    def __init__(self, cluster: Any, node: Any) -> None:
        super().__init__()
        self.cluster, self.node = cluster, node

    def advance(self, more: Counted) -> None:
        super().advance(more)
        if len(self.counted) == 2:
            self.cluster.remove_node(self.node, allow_graceful=False)


def test_a_ray_cluster_that_loses_a_node_makes_the_same_dataset(
    tmp_path: Path,
    cluster: Any,
    corpus: Path,
    alone: tuple[bytes, bytes],
    run_build: Build,
) -> None:
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    progress = KillsANode(cluster, node)
    result = run_build(
        corpus, append_eod=True, executor="ray", shard_bytes=30_000, progress=progress
    )
    assert result.num_shards > 10
    assert len(progress.counted) == result.num_shards
    assert files_of(tmp_path / "out") == alone
    nodes = peer("ray").nodes
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and sum(n["Alive"] for n in nodes()) > 2:
        time.sleep(0.2)
    assert sum(n["Alive"] for n in nodes()) == 2, "the node was really gone"


def test_an_error_in_a_ray_task_is_the_error_itself(
    tmp_path: Path, cluster: Any, write_jsonl: WriteJsonl, run_build: Build
) -> None:
    corpus = write_jsonl(tmp_path / "x.jsonl", [{"text": "good"}] * 50 + [{"no": "text"}])
    with pytest.raises(DataError, match=r"x\.jsonl:51: missing key") as caught:
        run_build(corpus, executor="ray", shard_bytes=200)
    assert "Traceback" not in str(caught.value)
