"""launch/kubernetes.yaml is a valid Job, whose pods find each other and start one run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from patience import PATIENCE
from ports import free_port
from torch.distributed.launcher import LaunchConfig

from megapack.training.command import read_config
from megapack.training.engine.directory import read_jsonl
from megapack.training.pretrain import build_parser

from .conftest import Corpus
from .processes import ROOT, environment

SERVICE, JOB = yaml.safe_load_all((ROOT / "launch" / "kubernetes.yaml").read_text())
POD: dict[str, Any] = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
COMMAND: list[str] = CONTAINER["command"]


def options() -> dict[str, str]:
    """Return the options of torchrun by name."""
    words = COMMAND[1 : COMMAND.index("--module")]
    return {name.removeprefix("--"): value for name, _, value in (w.partition("=") for w in words)}


def test_pods_of_a_job_are_nodes_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun, job, service = options(), JOB["metadata"]["name"], SERVICE["metadata"]["name"]
    assert JOB["spec"]["completionMode"] == "Indexed"
    assert int(torchrun["nnodes"]) == JOB["spec"]["completions"] == JOB["spec"]["parallelism"] > 1
    assert int(torchrun["nproc-per-node"]) == CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    # A pod's name is JOB-INDEX.SUBDOMAIN, if a headless service of that name selects it.
    assert torchrun["master-addr"] == f"{job}-0.{service}"
    assert (POD["subdomain"], SERVICE["spec"]["clusterIP"]) == (service, "None")
    assert SERVICE["spec"]["selector"] == {"job-name": job}
    ports = {SERVICE["spec"]["ports"][0]["port"], CONTAINER["ports"][0]["containerPort"]}
    assert ports == {int(torchrun["master-port"])}
    mounted = {mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert mounted == {volume["name"] for volume in POD["volumes"]}
    env = {entry["name"]: entry.get("value") for entry in CONTAINER["env"]}
    monkeypatch.setenv(name := "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", env[name])
    patience = LaunchConfig(1, 1, 1).shutdown_timeout or 0
    assert 200 < patience < POD["terminationGracePeriodSeconds"]
    args = build_parser().parse_args(COMMAND[COMMAND.index("--module") + 2 :])
    assert read_config(args.config, args.set).run_dir.startswith("/shared/")


@pytest.mark.parametrize("version", ["1.31", "latest"])
def test_file_is_valid_for_kubernetes(version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="make test-cluster installs it")
    wanted = validator.latest_version() if version == "latest" else version
    for document in (SERVICE, JOB):
        assert validator.validate(document, wanted, strict=True)
    wrong = {**JOB, "spec": {**JOB["spec"], "completion": 2}}
    with pytest.raises(validator.ValidationError, match="'completion' was unexpected"):
        validator.validate(wrong, wanted, strict=True)


@pytest.mark.multiprocess
def test_pods_on_one_machine_train(corpus: Corpus, tmp_path: Path) -> None:
    """Run the command of each pod, with the addresses and sizes of this machine."""
    if not os.environ.get("CLUSTER"):
        pytest.skip("make test-cluster starts them")
    config = corpus.config(tmp_path / "run", num_steps=4)
    here = {
        "--nproc-per-node=": "1",
        "--master-addr=": "127.0.0.1",
        "--master-port=": str(free_port()),
        "--config=": str(config),
        "--set=run_dir=": str(tmp_path / "run"),
    }
    pods = []
    for index in range(JOB["spec"]["completions"]):
        words = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in COMMAND]
        for name, value in here.items():
            words = [name + value if word.startswith(name) else word for word in words]
        words[0] = str(Path(sys.executable).with_name("torchrun"))
        pods.append(subprocess.Popen(words, env=environment(), cwd=ROOT))
    assert [pod.wait(timeout=PATIENCE) for pod in pods] == [0, 0]
    assert next(read_jsonl(tmp_path / "run" / "starts.jsonl"))["world_size"] == 2
