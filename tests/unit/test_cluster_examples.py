"""Examples for clusters: what they hand to Slurm, to Kubernetes and to Ray, as far as it can be seen without these."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import python

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "cluster"
SLURM = sorted(EXAMPLES.glob("*.sbatch"))
JOB = "4217"


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """A folder for PATH: `srun` runs its task as the second node would, and `scontrol` names the nodes."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def program(name: str, text: str) -> None:
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)

    program("srun", '[ "$1" = --kill-on-bad-exit=1 ] || exit 9\nshift\nexec "$@"')
    program("scontrol", '[ "$*" = "show hostnames node[1-2]" ] || exit 9\nprintf "node1\\nnode2\\n"')
    program("osdp", 'printf "%s\\n" "$@"')
    return folder


def submit(script: Path, bin_folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script as Slurm runs a batch script, from a copy in a folder of its own."""
    of_job = {"SLURM_JOB_ID": JOB, "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_NODEID": "1"}
    environment = os.environ | of_job | {"SLURM_SUBMIT_DIR": str(bin_folder.parent)}
    environment["PATH"] = f"{bin_folder}:{os.environ['PATH']}"
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, cwd=bin_folder.parent, env=environment, capture_output=True, text=True, timeout=180)


@pytest.mark.parametrize("script", SLURM, ids=lambda script: script.stem)
def test_slurm_scripts_start_osdp_on_every_node(script: Path, bin_folder: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    asked = [line.split()[1] for line in script.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert {"--ntasks-per-node=1", "--gpus-per-node=8"} <= set(asked)
    done = submit(script, bin_folder, "my run.yaml", "--steps", "20")
    assert (done.returncode, done.stderr) == (0, "")
    told = done.stdout.splitlines()
    checkpoint = ["--checkpoint", f"{bin_folder.parent}/checkpoints-{JOB}"]
    assert told[:6] == ["train", "my run.yaml", "--steps", "20", *checkpoint]
    meeting = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", f"node1:{20000 + int(JOB)}"]
    assert told[6:] == (meeting if "several" in script.stem else [])


def test_the_slurm_script_of_one_node_trains(bin_folder: Path) -> None:
    (bin_folder / "osdp").write_text(f'#!/bin/sh\nexec "{python()}" -m osdp "$@"\n')
    script = EXAMPLES / "slurm_one_node.sbatch"
    done = submit(script, bin_folder, "--steps", "1", "--global-batch", "8", "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert "done: 1 steps in this run" in done.stdout
    assert (bin_folder.parent / f"checkpoints-{JOB}" / "step-000001").is_dir()


def test_kubernetes_manifests_have_what_their_definitions_need() -> None:
    job, older = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert (older["apiVersion"], older["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["metadata"]["name"] == older["metadata"]["name"] == "osdp"
    trainer = job["spec"]["trainer"]
    assert job["spec"]["runtimeRef"]["name"] == "torch-distributed"
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 8}
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    check_volumes(replicated["template"]["spec"]["template"]["spec"])
    worker = older["spec"]["pytorchReplicaSpecs"]["Worker"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert (worker["replicas"], older["spec"]["nprocPerNode"], container["name"]) == (2, "8", "pytorch")
    assert older["spec"]["elasticPolicy"] == {"rdzvBackend": "c10d", "minReplicas": 2, "maxReplicas": 2}
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    check_volumes(pod)
    for each in (trainer, container):
        assert each["command"] == ["torchrun"]
        assert each["args"][:3] == ["-m", "osdp", "train"]


def test_a_train_job_is_read_whole_by_the_models_of_its_own_project() -> None:
    """Which are made from the definition that a cluster checks it by, and drop what that does not have."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api (the extra `test`)")
    job, _ = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    (patch,) = job["spec"].pop("runtimePatches")
    job["spec"]["podTemplateOverrides"] = [patch]  # as before Kubeflow Trainer 2.2
    assert "podTemplateOverrides" not in models.TrainerV1alpha1TrainJob.from_dict(job).to_dict()["spec"]


def check_volumes(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_ray_is_asked_for_workers() -> None:
    """Without Ray: it parses, and its workers call OSDP."""
    tree = ast.parse((EXAMPLES / "ray_train.py").read_text())
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert {"prepare_model", "report", "resume", "TorchTrainer", "ScalingConfig", "TorchConfig"} <= called


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install -e '.[ray]'")
def test_two_workers_of_ray_train(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "ray_train.py", "--workers", "2", "--steps", "2", "--storage", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "step 2: loss " in done.stdout
