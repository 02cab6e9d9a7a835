"""Manifests for Kubeflow Trainer, by the models of its API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.bridges
FOLDER = Path(__file__).parents[2] / "examples" / "bridges" / "kubernetes"


def load(name: str) -> dict[str, Any]:
    import yaml

    document: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return document


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("runtime", "TrainerV1alpha1ClusterTrainingRuntime"),
        ("trainjob", "TrainerV1alpha1TrainJob"),
    ],
)
def test_trainer_takes_it(name: str, kind: str) -> None:
    """Its models leave out what they don't know, so all of it has to come back."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    document, model = load(name), getattr(models, kind)
    assert model.from_dict(document).to_dict() == document
    document["spec"]["trainr"] = {}
    assert model.from_dict(document).to_dict() != document
