"""The files for clusters, as far as they can be checked without one."""

import pathlib
import subprocess

import pytest
import yaml

DEPLOY = pathlib.Path(__file__).parents[2] / "deploy"
JOBSET = DEPLOY / "jobset.yaml"


def test_jobset_has_only_fields_of_its_schema():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="has JobSet's schema")
    document = yaml.safe_load(JOBSET.read_text())
    parsed = models.JobsetV1alpha2JobSet.from_dict(document).to_dict()
    parsed["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0][
        "ports"
    ][0].pop("protocol")  # A default.
    assert parsed == document


def test_jobset_numbers_its_pods_as_the_command_expects():
    document = yaml.safe_load(JOBSET.read_text())
    (job,) = document["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    (command,) = container["args"]
    name, n = document["metadata"]["name"], spec["completions"]
    # JobSet calls a pod <set>-<job>-<number of the job>-<number of the pod>.
    assert f"--coordinator_address={name}-{job['name']}-0-0.{name}:9000 " in command
    assert f"--num_processes={n} --process_id=$JOB_COMPLETION_INDEX" in command
    assert (spec["completionMode"], spec["parallelism"], spec["backoffLimit"]) == ("Indexed", n, 0)
    assert container["ports"] == [{"containerPort": 9000}]


@pytest.mark.parametrize(
    ("by_task", "code", "state", "expected"),
    [
        ([75, 75], 75, "RUNNING", "requeued"),
        ([69, None], 137, "RUNNING", "requeued"),
        ([134], 143, "RUNNING", "requeued"),
        ([None, None], 143, "CANCELLED", 143),
        ([2, 69], 69, "RUNNING", 2),
        ([1, None], 137, "RUNNING", 1),
        ([], 0, "RUNNING", 0),
        ([], 1, "RUNNING", 1),
    ],
)
def test_an_error_of_one_process_ends_a_slurm_job(tmp_path, by_task, code, state, expected):
    """With the messages and the exit code of srun in SLURM 22.05."""
    ends = [
        f"srun: error: n{i}: task {i}: " + ("Killed" if c is None else f"Exited with exit code {c}")
        for i, c in enumerate(by_task)
    ]
    lines = "\n".join(f"echo '{line}' >&2" for line in ["a line of training", *ends])
    control = f"if [ $1 = show ]; then echo '   JobState={state} Reason=None'; else touch $1; fi\n"
    programs = {"srun": f"echo result\n{lines}\nexit {code}\n", "scontrol": control}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    with open(tmp_path / "errors", "a") as errors:
        job = subprocess.run(
            ["/bin/bash", DEPLOY / "slurm.sh", "mnist"],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=errors,
            check=False,
        )
    is_requeued = (tmp_path / "requeue").exists()
    assert ("requeued" if is_requeued else job.returncode) == expected
    assert job.stdout == b"result\n"
    assert (tmp_path / "errors").read_text().splitlines()[: 1 + len(ends)] == [
        "a line of training",
        *ends,
    ]
