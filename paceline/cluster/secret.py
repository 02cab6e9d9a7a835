"""The secret of a job: reads it, passes it to workers, signs with it, derives keys from it.

file (mode 0600) or PACELINE_SECRET --> launcher --> descriptor --> workers
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path

from paceline.errors import SecretError

MAC_BYTES = 32
_MIN_CHARACTERS = 16  # characters
_MAX_CHARACTERS = 4096
SECRET_COMMAND = (
    """(umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > paceline.secret)"""
)
_ADVICE = (
    f"make one with\n    {SECRET_COMMAND}\ncopy it to every host, and pass --secret-file "
    "paceline.secret "
    "(or set PACELINE_SECRET to its content)"
)


def make_secret() -> bytes:
    """Make a new secret, for a job that stays on one host."""
    return secrets.token_hex(32).encode()


def make_secret_error(why: str) -> SecretError:
    """Make the error for a secret that isn't there, with the command that creates one."""
    return SecretError(f"{why}: {_ADVICE}")


def parse_secret(text: str, source: str) -> bytes:
    """Parse the secret in a text, without blanks around it. `source` names it in errors."""
    secret = text.strip().encode()
    if not _MIN_CHARACTERS <= len(secret) <= _MAX_CHARACTERS:
        raise make_secret_error(
            f"the secret in {source} has {len(secret)} characters, "
            f"and {_MIN_CHARACTERS} to {_MAX_CHARACTERS} are needed"
        )
    return secret


def read_secret(path: str | Path) -> bytes:
    """Read the secret in a file that only its owner can read (mode 0600)."""
    try:
        with open(path, "rb") as file:
            # Of the open file: the path may name another one in a moment.
            state = os.fstat(file.fileno())
            raw = file.read(_MAX_CHARACTERS + 1)
    except OSError as error:
        raise make_secret_error(
            f"the secret file {path} can't be read ({error.strerror})"
        ) from error
    if state.st_uid not in {os.geteuid(), 0}:
        raise SecretError(
            f"the secret file {path} belongs to user {state.st_uid}, not to you ({os.geteuid()}): "
            "make a copy of your own, mode 0600"
        )
    if state.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SecretError(
            f"the secret file {path} has mode {stat.S_IMODE(state.st_mode):04o}, so other users "
            f"can use it: run `chmod 600 {path}`"
        )
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise make_secret_error(f"the secret file {path} isn't text") from None
    return parse_secret(text, str(path))


def write_secret_descriptor(secret: bytes) -> int:
    """Make a descriptor that holds the secret, for children to inherit.

    It has no name in any file system, and the secret isn't in the environment, which other
    processes may read.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("paceline-secret", os.MFD_CLOEXEC)
    else:
        descriptor, name = tempfile.mkstemp()
        os.unlink(name)
    os.write(descriptor, secret)
    return descriptor


def read_secret_descriptor(descriptor: int) -> bytes:
    """Read the secret from an inherited descriptor. It can be read any number of times."""
    try:
        # At an offset: workers share the position of the descriptor.
        return os.pread(descriptor, _MAX_CHARACTERS, 0)
    except OSError as error:
        raise SecretError(
            f"descriptor {descriptor} (PACELINE_SECRET_FD) can't be read ({error.strerror}): "
            "this process was started by a worker, "
            "not by `paceline run`; remove the variables PACELINE_* and RANK from its environment"
        ) from error


def sign_parts(secret: bytes, *parts: bytes) -> bytes:
    """Compute HMAC-SHA256 over the parts.

    Each part goes in after its length, so that two different lists never give the same input.
    """
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "big"))
        mac.update(part)
    return mac.digest()


def derive_key(secret: bytes, purpose: str, nbytes: int = 32) -> bytes:
    """Derive a key for one purpose. It reveals nothing about the secret or other keys.

    HKDF with SHA-256, without a salt (RFC 5869).
    """
    extracted = hmac.digest(bytes(hashlib.sha256().digest_size), secret, "sha256")
    derived, block = b"", b""
    for index in range(1, -(-nbytes // hashlib.sha256().digest_size) + 1):
        block = hmac.digest(extracted, block + purpose.encode() + bytes([index]), "sha256")
        derived += block
    return derived[:nbytes]


def verify_parts(secret: bytes, mac: bytes, *parts: bytes) -> bool:
    """Whether `mac` is the signature of the parts. The comparison takes constant time."""
    return hmac.compare_digest(mac, sign_parts(secret, *parts))
