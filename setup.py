"""Builds the C library with the package; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.errors import ExecError

ROOT = Path(__file__).resolve().parent
FOLDER = Path("paceline", "native")


def load_build_module() -> Any:
    """Load paceline/native/build.py by its path: paceline itself can't be imported yet."""
    spec = importlib.util.spec_from_file_location("native_build", ROOT / FOLDER / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


native = load_build_module()


class BuildCore(Command):
    """Compile the C library into the wheel, or beside its sources for an editable install."""

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def library_path(self) -> Path:
        assert self.build_lib is not None
        return Path(self.build_lib) / FOLDER / native.LIBRARY.name

    def run(self) -> None:
        # A wheel for "manylinux_2_17_aarch64" is compiled for aarch64 and glibc 2.17.
        platform = self.get_finalized_command("bdist_wheel").plat_name
        many = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", platform)
        triple = f"{many[3]}-linux-gnu.{many[1]}.{many[2]}" if many else None
        target = native.LIBRARY if self.editable_mode else self.library_path()
        try:
            native.build_library(target, target_triple=triple)
        except native.BuildError as error:
            raise ExecError(str(error)) from None  # setuptools prints it without a traceback

    def get_outputs(self) -> list[str]:
        return [str(self.library_path())]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BuildWithCore(build):
    """Build the package, then the C library."""

    sub_commands = [*build.sub_commands, ("build_core", None)]  # noqa: RUF012


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and every Python: the library knows nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    """A distribution whose files depend on the platform."""

    def has_ext_modules(self) -> bool:
        return True


if native.SUPPORTED:
    setup(
        distclass=PlatformDistribution,
        cmdclass={"build": BuildWithCore, "build_core": BuildCore, "bdist_wheel": PlatformWheel},
        # pip installs it for the time of the build.
        setup_requires=[] if native.find_system_compiler() else ["ziglang"],
    )
else:
    setup()
