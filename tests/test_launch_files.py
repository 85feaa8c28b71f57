"""The launch files: scripts run with stand-ins for the cluster's programs, and every command in them is one of ours.

A stand-in writes its name and arguments to a log. So what is tested is which commands a script gives, in which order, and
that our own command line and recipe take them.
"""

import os
import shlex
import signal
import subprocess
import time
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from sensorium.cli import train
from sensorium.cli.main import Parser
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import Recipe

LAUNCH = Path(__file__).parents[1] / "examples" / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
HANG = '[ -z "${HANG:-}" ] || exec sleep 60'
PROGRAMS = {
    "sensorium": HANG, "ray": "", "srun": "", "openssl": "echo 0123abcd", "scontrol": "echo node1; echo node2",
}  # fmt: skip


class Cluster:
    """Stand-ins for the programs that the scripts call, first on the path."""

    def __init__(self, folder: Path) -> None:
        self.log, self.run_dir = folder / "log", folder / "runs" / "mine"
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name, does in PROGRAMS.items():
            program = self.bin / name
            said = f'echo "CUDA=${{CUDA_VISIBLE_DEVICES:-}} AUTH=${{RAY_AUTH_MODE:-}} {name} $*" >> {self.log}\n'
            program.write_text(f"#!/usr/bin/env bash\n{said}{does}\n")
            program.chmod(0o755)

    def run(self, script: str, *arguments: str, **environment: str) -> list[str]:
        """Run a script; returns what its programs were called with."""
        self.log.write_text("")
        known = {"PATH": f"{self.bin}:{os.environ['PATH']}", "RECIPE": "shapes", "RUN_DIR": str(self.run_dir)}
        done = subprocess.run(
            ["bash", str(LAUNCH / script), *arguments], env=known | environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return self.log.read_text().splitlines()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def parsed(line: str) -> tuple[Namespace, Recipe]:
    """A line of ours as the command line takes it, and the recipe it means."""
    words = shlex.split(line)
    words = words[words.index("sensorium") + 1 :]
    assert words.pop(0) == "train"
    parser = Parser(prog="sensorium train", allow_abbrev=False)
    train.configure(parser)
    arguments = parser.parse_intermixed_args(words)
    return arguments, load_recipe(arguments.recipe, arguments.overrides)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash_and_stop_at_the_first_error(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0
    assert "set -euo pipefail" in script.read_text()


def test_a_run_starts_resumes_and_starts_over_as_its_folder_says(cluster: Cluster) -> None:
    (line,) = cluster.run("train.sh", "cluster.learners=2")
    arguments, recipe = parsed(line)
    assert (arguments.resume, arguments.restart) == (False, False)
    assert recipe.directory == cluster.run_dir
    assert recipe.cluster.learners == 2
    cluster.run_dir.mkdir(parents=True)
    (cluster.run_dir / "recipe.yaml").write_text("")
    arguments, _ = parsed(cluster.run("train.sh")[0])
    assert (arguments.resume, arguments.restart) == (False, True)
    (cluster.run_dir / "checkpoints" / "step_000004").mkdir(parents=True)
    arguments, _ = parsed(cluster.run("train.sh")[0])
    assert (arguments.resume, arguments.restart) == (True, False)


def test_names_with_spaces_brackets_quotes_and_signs_of_yaml_are_taken_as_they_are(cluster: Cluster) -> None:
    run = cluster.run_dir.parent / "it's [a] run #1: $(false)"
    (run / "checkpoints" / "step_000004").mkdir(parents=True)
    (run / "recipe.yaml").write_text("")
    (line,) = cluster.run("train.sh", RUN_DIR=str(run), RECIPE="shapes")
    given = line.partition("train shapes ")[2]
    assert given.endswith(" --resume")
    assert load_recipe("shapes", [given.removesuffix(" --resume")]).directory == run


def test_without_a_recipe_it_says_what_to_set(cluster: Cluster) -> None:
    done = subprocess.run(
        ["bash", str(LAUNCH / "train.sh")], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True
    )
    assert done.returncode
    assert "set RECIPE" in done.stderr


SLURM = {"SLURM_SUBMIT_DIR": str(LAUNCH.parents[1]), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}


def test_slurm_starts_ray_on_all_nodes_and_leaves_the_driver_a_gpu(cluster: Cluster) -> None:
    lines = cluster.run("slurm.sh", "steps=3", **SLURM, SLURM_JOB_ID="7")
    (head,) = [line for line in lines if "ray start --head" in line]
    assert "CUDA=1,2,3,4,5,6,7 " in head
    assert "--num-gpus=7" in head
    (worker,) = [line for line in lines if " srun " in line]
    assert "--nodes=1 --exclude=node1 ray start --address=node1:6379 --num-gpus=8 --block" in worker
    (ours,) = [line for line in lines if " sensorium " in line]
    assert ours.startswith("CUDA=0 ")
    _, recipe = parsed(ours)
    assert (recipe.cluster.learners, recipe.cluster.placement, recipe.cluster.address) == (15, "ray", "auto")
    assert recipe.steps == 3
    assert any(line.endswith("ray stop") for line in lines)


@pytest.mark.parametrize("script", ["slurm.sh", "two_machines.sh"])
def test_engines_that_ray_places_take_gpus_from_the_ranks(cluster: Cluster, script: str) -> None:
    given = () if script == "slurm.sh" else ("train", "10.0.0.1")
    more = SLURM | {"SLURM_JOB_ID": "7"} if script == "slurm.sh" else {"RAY_AUTH_TOKEN": "secret"}
    lines = cluster.run(script, *given, "rollout.engine.name=vllm", ENGINES="4", **more)
    (ours,) = [line for line in lines if " sensorium " in line]
    _, recipe = parsed(ours)
    assert (recipe.cluster.learners, recipe.cluster.engines, recipe.cluster.placement) == (11, 4, "ray")


def test_slurm_ends_the_run_and_queues_the_job_again_when_its_time_is_nearly_up(cluster: Cluster) -> None:
    cluster.log.write_text("")
    known = {"PATH": f"{cluster.bin}:{os.environ['PATH']}", "RECIPE": "shapes", "RUN_DIR": str(cluster.run_dir)}
    job = subprocess.Popen(["bash", str(LAUNCH / "slurm.sh")], env=known | SLURM | {"SLURM_JOB_ID": "7", "HANG": "1"})
    try:
        for _ in range(3000):
            if " sensorium " in cluster.log.read_text():
                break
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) != 0
    finally:
        job.kill()
    assert "scontrol requeue 7" in cluster.log.read_text()


def test_slurm_asks_to_be_queued_again() -> None:
    asked = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in (LAUNCH / "slurm.sh").read_text().splitlines()
        if line.startswith("#SBATCH")
    )
    assert {"requeue", "open-mode", "signal"} <= set(asked)
    assert asked["signal"].startswith("B:TERM@"), "the script itself is told, and ends the run in order"


def test_two_machines_share_a_cluster(cluster: Cluster) -> None:
    token = {"RAY_AUTH_TOKEN": "secret"}
    (head,) = cluster.run("two_machines.sh", "head", "10.0.0.1", **token)
    (worker,) = cluster.run("two_machines.sh", "worker", "10.0.0.1", **token)
    (ours,) = cluster.run("two_machines.sh", "train", "10.0.0.1", "steps=3", **token)
    assert "ray start --head --node-ip-address=10.0.0.1 --port=6379 --num-gpus=7" in head
    assert "ray start --address=10.0.0.1:6379 --num-gpus=8" in worker
    assert all("AUTH=token " in line for line in (head, worker, ours)), "without the mode Ray sends no token"
    _, recipe = parsed(ours)
    assert (recipe.cluster.learners, recipe.cluster.address, recipe.steps) == (15, "10.0.0.1:6379", 3)


def test_a_ray_job_has_what_its_definition_asks_for_and_its_entry_point_is_ours(cluster: Cluster) -> None:
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec, ray = job["spec"], job["spec"]["rayClusterSpec"]
    known = {"entrypoint", "backoffLimit", "submissionMode", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"}
    assert set(spec) == known | {"rayClusterSpec"}
    (workers,) = ray["workerGroupSpecs"]
    assert set(workers) == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    pods = [ray["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]]
    for pod, group in zip(pods, (ray["headGroupSpec"], workers), strict=True):
        (container,) = pod["containers"]
        assert {"name", "image", "env", "resources"} <= set(container)
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted["runs"] == "/runs", "all pods see the run directory"
        assert set(mounted) == {volume["name"] for volume in pod["volumes"]}
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    variables = {one["name"]: one["value"] for one in pods[0]["containers"][0]["env"]}
    assert variables["RUN_DIR"].startswith("/runs/")
    assert "sensorium-keys" in str(pods[0]["containers"][0]["envFrom"])
    program, script, *overrides = shlex.split(spec["entrypoint"])
    assert (program, script) == ("bash", "/sensorium/examples/launch/train.sh")
    _, recipe = parsed(cluster.run("train.sh", *overrides, RECIPE=variables["RECIPE"])[0])
    placed = workers["replicas"] * int(workers["rayStartParams"]["num-gpus"])
    assert (recipe.cluster.learners, recipe.cluster.placement, recipe.cluster.address) == (placed, "ray", "auto")
    assert ray["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0", "no rank is placed on the driver's GPU"
