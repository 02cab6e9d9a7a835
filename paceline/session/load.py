"""Loads trained models for inference: weights of a run's folder, in the layout of this job.

runs/NAME/checkpoints/step-00000800     trained by any number of workers, cut in any way
          |
pl.load("runs/NAME", model, mesh="tensor=2", cut=...)     each worker reads its part of the weights
          |
loaded(x)                               the whole output, on both workers

paceline's own programs write a description of their model beside their checkpoints, so their
models need not be given.
"""

from __future__ import annotations

import importlib
import json
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, Self, TypedDict, TypeVar, Unpack, overload

from torch import nn

from paceline.checkpoint.files import disk
from paceline.cluster.discover import copy_environment
from paceline.cluster.launcher.janitor import get_answer_prefix
from paceline.errors import UsageError
from paceline.parallel.cut import ModelCut
from paceline.parallel.meta import meta
from paceline.prepare.cuts import WantedCuts
from paceline.prepare.stored import StoredModel
from paceline.session.run import Run, parts_of_run
from paceline.session.start import start

# file in a run's folder: the program that trained its model, and the fields to build the model
DESCRIPTION: Final = "model.json"
# the only modules that a description can have imported
PROGRAMS: Final = {"gpt": "paceline.apps.gpt"}

M = TypeVar("M", bound=nn.Module)


class LoadedModel(Generic[M]):
    """A model with the weights of a run.

    A call with inputs gives the whole output of the model on every worker.

    `run` ends with `close` or at the end of a `with` block. `model` is prepared by `run.prepare`,
    and in eval mode.
    """

    def __init__(self, run: Run, model: M) -> None:
        self.run, self.model = run, model

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run the model, as `run.forward` does."""
        return self.run.forward(self.model, *inputs, **options)

    def close(self) -> None:
        """Leave together with all workers. A second call does nothing."""
        self.run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.run.__exit__(kind, error, trace)


class LoadKeywords(TypedDict, total=False):
    """Options of `load`, for its overloads."""

    mesh: str | None
    cut: WantedCuts | None
    part: str | None
    best: bool
    device: str | None


@overload
def load(folder: str | Path, model: M, **options: Unpack[LoadKeywords]) -> LoadedModel[M]: ...
@overload
def load(
    folder: str | Path, model: Callable[[], M], **options: Unpack[LoadKeywords]
) -> LoadedModel[M]: ...
@overload
def load(
    folder: str | Path, model: None = None, **options: Unpack[LoadKeywords]
) -> LoadedModel[nn.Module]: ...
def load(
    folder: str | Path,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    *,
    mesh: str | None = None,
    cut: WantedCuts | None = None,
    part: str | None = None,
    best: bool = False,
    device: str | None = None,
) -> LoadedModel[Any]:
    """Join the workers of this job, and load a model with the weights of a checkpoint.

    >>> with pl.load("runs/circle", model) as circle:
    ...     print(circle(x))

    The run that begins leaves no folder behind. In a run that exists already, `run.prepare(model,
    init="runs/NAME")` does the same.

    Args:
        folder: Folder of a run, its checkpoints, or one checkpoint, written in any layout.
        model: The model; or a function that makes it, which is called under `pl.meta()`, so that no
            worker ever holds the whole model. Leave it out for runs of `paceline demo`.
        mesh: Layout of the workers, as for `start`.
        cut: Cuts of the model, as for `run.prepare`. Models of the demo bring their own.
        part: Name of one of several models, as for `state_dict`.
        best: Whether to take the best checkpoint. Default: False, the newest one.
        device: Device of this worker, as for `start`.

    Raises:
        UsageError: There is no usable checkpoint, or it belongs to another model.
    """
    source = Path(folder)
    if not source.is_dir():
        raise UsageError(
            f"there is no folder {source}; give that of a run, such as runs/NAME, "
            "or of one of its checkpoints"
        )
    program = _read_program(source) if model is None else None
    make = model if program is None else program.make
    if make is None or not callable(make):
        raise UsageError(
            f"load got the model {model!r}; give an nn.Module, or a function that makes one"
        )
    # the launcher's janitor removes folders with this prefix, too
    prefix = get_answer_prefix(copy_environment().get("PACELINE_JOB", ""))
    temporary = Path(tempfile.gettempdir()) / f"{prefix}{secrets.token_hex(8)}"
    run = start(mesh=mesh, folder=str(temporary), device=device, trace="off", compare=None)
    # after a restart the run is in the folder of an earlier start of the same job
    if run.is_first and run.folder.path.parent.name.startswith(prefix):
        parts_of_run(run).ending.on_close(
            lambda: shutil.rmtree(run.folder.path.parent, ignore_errors=True)
        )
    try:
        cuts = program.cuts(run.mesh.cut_axes) if cut is None and program is not None else cut
        ready = run.prepare(_build_model(make), init=StoredModel(source, part, best), cut=cuts)
        ready.eval()
    # the script has no run yet that could end after the error
    except BaseException as error:
        parts_of_run(run).ending.end_after_error(type(error), error)
        raise
    return LoadedModel(run, ready)


def describe_model(program: str, fields: Mapping[str, Any]) -> str:
    """Describe a model of one of our programs, as the text of the file `DESCRIPTION`."""
    return json.dumps({"program": program, "fields": dict(fields)}, indent=2) + "\n"


class _KnownProgram(NamedTuple):
    """A program of paceline: `make` makes its model, `cuts` gives its cuts for a mesh's axes."""

    make: Callable[[], nn.Module]
    cuts: Callable[[Collection[str]], Sequence[ModelCut]]


def _read_program(folder: Path) -> _KnownProgram:
    """Find the program of paceline that trained the model of a run.

    Raises `UsageError` if a script of the user trained it.
    """
    # `folder` may be the run's, its checkpoints, or one checkpoint
    candidates = [each / DESCRIPTION for each in (folder, folder.parent, folder.parent.parent)]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        raise UsageError(
            f"{folder} doesn't say which model it has: give load(folder, model), the model or a "
            "function that makes it"
        )
    try:
        description = json.loads(disk.read_file(path, 1 << 16))
        module: Any = importlib.import_module(PROGRAMS[description["program"]])
        return _KnownProgram(module.make_builder(description["fields"]), module.make_cuts)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{path} is not what a program of this paceline writes; give load(folder, model)"
        ) from error


def _build_model(make: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    if isinstance(make, nn.Module):
        return make
    with meta():
        model = make()
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"load got a function that makes a {type(model).__qualname__}; "
            "give one that makes the model"
        )
    return model
