"""The files for clusters, as far as they can be checked without one."""

import pathlib

import pytest
import yaml

JOBSET = pathlib.Path(__file__).parents[2] / "deploy" / "jobset.yaml"


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
