"""Namespaces without names: what is done inside stays there, and they end when they are let go."""

from __future__ import annotations

import os
import socket

import pytest

from paceline.errors import ResourceError
from paceline.lab import spaces
from paceline.lab.spaces import NamespaceSet


def test_what_is_done_inside_is_done_there_only(able):
    here = os.readlink("/proc/self/ns/net")
    space = NamespaceSet.make_namespaces(["net"])
    try:
        assert space.network != here
        assert space.call_inside(lambda: os.readlink("/proc/thread-self/ns/net")) == space.network
        assert [name for _, name in space.call_inside(socket.if_nameindex)] == ["lo"]
        assert os.readlink("/proc/thread-self/ns/net") == here
        with pytest.raises(ZeroDivisionError):
            space.call_inside(lambda: 1 // 0)
    finally:
        for _ in range(2):
            space.close()
    assert space.fds == {}


def test_nothing_is_held_when_preparing_fails(able):
    opened = len(os.listdir("/proc/self/fd"))

    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        NamespaceSet.make_namespaces(["net", "uts"], fail)
    assert len(os.listdir("/proc/self/fd")) == opened


def test_what_the_kernel_refuses_is_named():
    with pytest.raises(
        ResourceError, match=r"the kernel refused setns \(.*\): run `paceline lab check`"
    ):
        spaces._call_libc("setns", os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), 0)
