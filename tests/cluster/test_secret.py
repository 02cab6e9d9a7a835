"""A job's secret is read from a file of its owner's alone, and keys and signatures follow from
it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cluster import secret
from paceline.errors import SecretError


class TestSecretFile:
    def write(self, path: Path, text: str, mode: int) -> Path:
        path.write_text(text)
        path.chmod(mode)
        return path

    def test_read(self, tmp_path):
        assert (
            secret.read_secret(self.write(tmp_path / "s", "0123456789abcdef\n", 0o600))
            == b"0123456789abcdef"
        )

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
    def test_others_may_not_read_it(self, tmp_path, mode):
        with pytest.raises(SecretError, match="chmod 600"):
            secret.read_secret(self.write(tmp_path / "s", "0123456789abcdef", mode))

    def test_missing_and_short(self, tmp_path):
        with pytest.raises(SecretError, match="can't be read"):
            secret.read_secret(tmp_path / "none")
        with pytest.raises(SecretError, match="3 characters"):
            secret.read_secret(self.write(tmp_path / "s", "abc", 0o600))

    def test_parts_can_not_be_moved(self):
        assert secret.sign_parts(b"k", b"ab", b"c") != secret.sign_parts(b"k", b"a", b"bc")
        assert secret.verify_parts(
            b"k", secret.sign_parts(b"k", b"a"), b"a"
        ) and not secret.verify_parts(b"k", secret.sign_parts(b"k", b"a"), b"b")
