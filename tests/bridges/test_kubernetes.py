"""Manifests for Kubernetes with Kubeflow Trainer or JobSet, by the schemas of their APIs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml

from paceline.cli import app

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "bridges" / "kubernetes"
# The environment of `make test-bridges` has none, and none of these tests.
kubernetes_validate = pytest.importorskip("kubernetes_validate")
SCHEMA = json.loads((Path(__file__).parent / "schemas" / "jobset.json").read_text())


def load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return document


def check_job(job_set: dict[str, Any]) -> None:
    """Check the job in a JobSet: by the schema of batch/v1, with what JobSet adds."""
    for replicated in job_set["replicatedJobs"]:
        job = copy.deepcopy(replicated["template"])
        job |= {"apiVersion": "batch/v1", "kind": "Job"}
        job["metadata"] = {"name": replicated["name"], **job.get("metadata", {})}
        kubernetes_validate.validate(job, "1.37", strict=True)


def check_job_set(document: dict[str, Any]) -> None:
    jsonschema.validate(document, SCHEMA["schema"])
    check_job(document["spec"])


def get_pod(job_set: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = job_set["replicatedJobs"]
    pod: dict[str, Any] = replicated["template"]["spec"]["template"]["spec"]
    return pod


def parse(words: list[str]) -> dict[str, Any]:
    """Let typer parse a command line of `paceline`, and give the options of `run`."""
    command: Any = typer.main.get_command(app)
    name, found, rest = command.resolve_command(command.make_context("paceline", words), words)
    assert name == "run"
    options: dict[str, Any] = found.make_context(name, rest).params
    return options


def test_job_set_takes_it() -> None:
    check_job_set(load("jobset"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda spec: spec.update(replicatedJob=[]),
        lambda spec: spec["replicatedJobs"][0].pop("name"),
        lambda spec: spec["replicatedJobs"][0].update(replicas="two"),
        lambda spec: get_pod(spec)["containers"][0].update(comand=[]),
    ],
)
def test_the_schemas_see_what_is_wrong(spoil: Any) -> None:
    document = load("jobset")
    spoil(document["spec"])
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check_job_set(document)


def test_the_job_of_the_runtime_is_one() -> None:
    """Trainer makes it an indexed job."""
    template = load("runtime")["spec"]["template"]
    check_job(template["spec"])
    jsonschema.validate(
        {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", **template}, SCHEMA["schema"]
    )


def test_parts_of_them_fit_each_other() -> None:
    runtime, train_job, job_set = load("runtime"), load("trainjob"), load("jobset")
    for spec in (runtime["spec"]["template"]["spec"], job_set["spec"]):
        pod = get_pod(spec)
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in pod["volumes"]
        }
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"/dev/shm", f"{container['workingDir']}/runs"}
        # There is time to save before the pod is killed.
        assert pod["terminationGracePeriodSeconds"] >= 30 + 15
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    # The name of the replicated job and its label are by what Trainer finds the pods of training.
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert (
        replicated["name"]
        == "node"
        == get_pod(runtime["spec"]["template"]["spec"])["containers"][0]["name"]
    )
    labels = replicated["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    options = parse(train_job["spec"]["trainer"]["command"][1:])
    assert (options["resume"], options["name"], options["hosts"], options["workers"]) == (
        *(True, "train"),
        *(None, None),
    )


def test_the_command_of_the_job_set_fits_its_pods() -> None:
    job_set = load("jobset")
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job, name = replicated["template"]["spec"], job_set["metadata"]["name"]
    (container,) = get_pod(job_set["spec"])["containers"]
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["command"]]
    options = parse(words[1:])
    assert options["hosts"] == job["completions"] == job["parallelism"]
    assert options["join"] == f"{name}-{replicated['name']}-0-0.{name}:29400"
    assert options["host_rank"] == 1 and options["workers"] == 4 and options["resume"]
