"""Tests that load torch's compiler: it takes longer than most of them take, so one process of pytest-xdist does it for all."""

from __future__ import annotations

import pytest

COMPILES = pytest.mark.xdist_group("compiler")
