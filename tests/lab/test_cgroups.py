"""Control groups of both versions: found in what the kernel says, written as it wants them (on
folders that stand for its own).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ResourceError
from paceline.lab import cgroups
from paceline.lab.cgroups import Cgroup, CgroupBase, KernelMounts, find_base


def mounts(folder: Path, cgroup: str, *lines: str) -> KernelMounts:
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text("".join(f"{line}\n" for line in lines))
    return KernelMounts(folder / "cgroup", folder / "mountinfo")


def mount(point: Path, kind: str, options: str = "rw", root: str = "/") -> str:
    return f"30 20 0:1 {root} {point} rw,relatime shared:9 - {kind} none {options}"


def unified(folder: Path, own: str, handing: dict[str, tuple[str, str]]) -> KernelMounts:
    """A tree of version 2: for each group what it has, and what it hands down."""
    for path, (has, hands) in handing.items():
        (folder / "v2" / path).mkdir(parents=True, exist_ok=True)
        (folder / "v2" / path / "cgroup.controllers").write_text(has)
        (folder / "v2" / path / "cgroup.subtree_control").write_text(hands)
    return mounts(folder, f"0::{own}\n", mount(folder / "v2", "cgroup2"))


class TestFind:
    def test_version_1_below_the_group_of_this_process(self, tmp_path):
        (tmp_path / "cpu" / "box").mkdir(parents=True)
        told = mounts(
            tmp_path,
            "4:memory:/\n3:cpu,cpuacct:/box\n0::/\n",
            mount(tmp_path / "cpu", "cgroup", "rw,cpu,cpuacct"),
        )
        assert find_base("cpu", told) == CgroupBase("cpu", 1, tmp_path / "cpu" / "box")

    def test_version_1_in_a_container_that_sees_a_part(self, tmp_path):
        (tmp_path / "cpu" / "in").mkdir(parents=True)
        told = mounts(
            tmp_path,
            "3:cpu:/docker/7/in\n",
            mount(tmp_path / "cpu", "cgroup", "rw,cpu", "/docker/7"),
        )
        assert find_base("cpu", told).folder == tmp_path / "cpu" / "in"
        told = mounts(
            tmp_path, "3:cpu:/other\n", mount(tmp_path / "cpu", "cgroup", "rw,cpu", "/docker/7")
        )
        assert find_base("cpu", told).folder == tmp_path / "cpu"

    def test_version_2_where_it_is_handed_down(self, tmp_path):
        told = unified(
            tmp_path,
            "/user/me",
            {
                "": ("cpu memory", "cpu"),
                "user": ("cpu memory", "cpu memory"),
                "user/me": ("cpu memory", ""),
            },
        )
        # this process is inside, so nothing can be handed on
        (tmp_path / "v2/user/me/cgroup.controllers").write_text("")
        assert find_base("cpu", told) == CgroupBase("cpu", 2, tmp_path / "v2" / "user")

    def test_version_2_asks_for_it(self, tmp_path):
        told = unified(tmp_path, "/", {"": ("cpu memory", "")})
        assert find_base("memory", told) == CgroupBase("memory", 2, tmp_path / "v2")
        assert (tmp_path / "v2/cgroup.subtree_control").read_text() == "+memory"

    def test_mixed_versions(self, tmp_path):
        (tmp_path / "cpu").mkdir()
        (tmp_path / "v2").mkdir()
        lines = mount(tmp_path / "cpu", "cgroup", "rw,cpu"), mount(tmp_path / "v2", "cgroup2")
        assert find_base("cpu", mounts(tmp_path, "1:cpu:/\n0::/\n", *lines)).version == 1

    def test_nowhere(self, tmp_path):
        with pytest.raises(ResourceError, match="offers no control group with the cpu controller"):
            find_base("cpu", mounts(tmp_path, "0::/\n"))
        told = unified(tmp_path, "/me", {"": ("cpu", ""), "me": ("", "")})
        (tmp_path / "v2/cgroup.controllers").write_text("cpu")
        (tmp_path / "v2/cgroup.subtree_control").unlink()
        (tmp_path / "v2/cgroup.subtree_control").mkdir()  # can't be written, not even by root
        with pytest.raises((ResourceError, OSError)):
            find_base("cpu", told)

    def test_no_proc(self, tmp_path):
        with pytest.raises(ResourceError, match="control groups can't be looked up"):
            find_base("cpu", KernelMounts(tmp_path / "a", tmp_path / "b"))


class TestGroup:
    def test_version_1(self, tmp_path):
        (tmp_path / "cpu").mkdir()
        (tmp_path / "memory").mkdir()
        group = Cgroup(
            "g",
            [CgroupBase("cpu", 1, tmp_path / "cpu"), CgroupBase("memory", 1, tmp_path / "memory")],
        )
        group.make_folders()
        group.limit_processors(0.5)
        assert (tmp_path / "cpu/g/cpu.cfs_quota_us").read_text() == "10000"
        assert (tmp_path / "cpu/g/cpu.cfs_period_us").read_text() == "20000"
        group.limit_processors(None)
        assert (tmp_path / "cpu/g/cpu.cfs_quota_us").read_text() == "-1"
        group.limit_memory(2**30)
        assert (tmp_path / "memory/g/memory.limit_in_bytes").read_text() == str(2**30)
        assert group.list_entry_files() == (
            tmp_path / "cpu/g/cgroup.procs",
            tmp_path / "memory/g/cgroup.procs",
        )

    def test_version_2(self, tmp_path):
        group = Cgroup("g", [CgroupBase("cpu", 2, tmp_path), CgroupBase("memory", 2, tmp_path)])
        group.make_folders()
        (tmp_path / "g/memory.swap.max").write_text("max")
        group.limit_processors(1.5)
        group.limit_memory(2**20)
        assert (tmp_path / "g/cpu.max").read_text() == "30000 20000"
        assert (tmp_path / "g/memory.max").read_text() == str(2**20) and (
            tmp_path / "g/memory.swap.max"
        ).read_text() == "0"
        group.limit_processors(None)
        assert (tmp_path / "g/cpu.max").read_text() == "max 20000"
        assert group.folders == (tmp_path / "g",) and group.list_entry_files() == (
            tmp_path / "g/cgroup.procs",
        )

    def test_entrances_for_some_controllers(self, tmp_path):
        apart = Cgroup(
            "g",
            [CgroupBase("cpu", 1, tmp_path / "cpu"), CgroupBase("memory", 1, tmp_path / "memory")],
        )
        assert (
            apart.list_entry_files(("memory",)) == (tmp_path / "memory/g/cgroup.procs",)
            and apart.list_entry_files(()) == ()
        )
        one = Cgroup("g", [CgroupBase("cpu", 2, tmp_path), CgroupBase("memory", 2, tmp_path)])
        assert (
            one.list_entry_files(("memory",))
            == one.list_entry_files()
            == (tmp_path / "g/cgroup.procs",)
        )
        assert Cgroup("g", [CgroupBase("cpu", 1, tmp_path)]).list_entry_files(("memory",)) == ()

    def test_processes_that_run_are_admitted_unless_there_are_ever_more(self, tmp_path):
        group = Cgroup("g", [CgroupBase("cpu", 1, tmp_path)])
        group.make_folders()
        entrance = tmp_path / "g/cgroup.procs"  # a plain file here: it keeps the last number alone
        entrance.write_text("")
        group.admit_processes("cpu", lambda: [10])
        assert entrance.read_text() == "10"
        with pytest.raises(ResourceError, match="started faster than they can be moved"):
            group.admit_processes("cpu", lambda: [10, 11])

    def test_a_process_that_may_not_be_moved_is_named(self, tmp_path, monkeypatch):
        group = Cgroup("g", [CgroupBase("cpu", 1, tmp_path)])
        group.make_folders()
        (tmp_path / "g/cgroup.procs").write_text("")
        errors = {
            10: ProcessLookupError(3, "No such process"),
            11: PermissionError(13, "Permission denied"),
        }

        def refuse(path, text):
            raise errors[int(text)]

        monkeypatch.setattr(cgroups.Path, "write_text", refuse)
        living = iter([[10], []])
        group.admit_processes("cpu", lambda: next(living))  # one that has ended is none
        with pytest.raises(
            ResourceError, match=r"process 11 can't be moved to .*Permission denied"
        ):
            group.admit_processes("cpu", lambda: [11])

    def test_small_quotas_are_as_small_as_can_be(self, tmp_path):
        group = Cgroup("g", [CgroupBase("cpu", 2, tmp_path)])
        group.make_folders()
        group.limit_processors(0.01)
        assert (tmp_path / "g/cpu.max").read_text() == "1000 20000"

    def test_what_the_kernel_refuses_is_said(self, tmp_path):
        group = Cgroup("g", [CgroupBase("cpu", 2, tmp_path / "missing")])
        with pytest.raises(ResourceError, match="can't be made"):
            group.make_folders()
        with pytest.raises(ResourceError, match="can't be written to"):
            group.limit_processors(1)
        group.remove_folders()

    def test_orphans(self, tmp_path):
        (tmp_path / "paceline-lab-1-0").mkdir()
        (tmp_path / "other").mkdir()
        assert cgroups.list_orphans(
            [CgroupBase("cpu", 1, tmp_path), CgroupBase("memory", 1, tmp_path)]
        ) == [tmp_path / "paceline-lab-1-0"]
