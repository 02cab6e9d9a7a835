"""Signed values in a store that anybody may write to: each proves that its writer knows the job's
secret, and for which key of which start.

"1" MAC(secret; start of the job, key, JSON) JSON        "0" JSON where the job has no secret
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from paceline.cluster import secret as secrets
from paceline.errors import SecretError

_PLAIN, _SIGNED = "0", "1"  # the first character of each value
_ADVICE = "Give every worker the same PACELINE_SECRET"


@dataclass(frozen=True)
class Signer:
    """Signs and verifies values under keys that begin with `path`.

    `start` tells a start of a job from all others (empty: from none).
    """

    secret: bytes | None = None
    path: str = ""
    start: str = ""

    def sub(self, prefix: str) -> Signer:
        """Return the signer of keys that begin with `prefix`, too."""
        return replace(self, path=f"{self.path}/{prefix}" if self.path else prefix)

    def bound(self, start: str) -> Signer:
        """Return the signer of one start of the job: it refuses values that were signed in
        another.
        """
        return replace(self, start=start)

    def close(self, key: str, value: Any) -> str:
        """Write a JSON value as signed text for this key."""
        body = json.dumps(value)
        return (
            _PLAIN
            if self.secret is None
            else _SIGNED + secrets.sign(self.secret, *self._names(key), body.encode()).hex()
        ) + body

    def open(self, key: str, raw: bytes) -> Any:
        """Read a signed value.

        Raises `SecretError` unless its writer knows the secret, for this key and this start of the
        job.
        """
        try:
            text = raw.decode()
            return json.loads(self._verified(key, text))
        except (ValueError, RecursionError) as error:
            if isinstance(error, SecretError):
                raise
            raise SecretError(
                f"{key} in the store is no value that a worker has put there: "
                f"somebody else writes to it. {_ADVICE}"
            ) from error

    def _verified(self, key: str, text: str) -> str:
        if text[:1] == _PLAIN:
            if self.secret is not None:
                raise SecretError(
                    f"{key} in the store isn't signed: a worker has no secret. {_ADVICE}"
                )
            return text[1:]
        if text[:1] != _SIGNED:
            raise ValueError(key)
        if self.secret is None:
            raise SecretError(
                f"{key} in the store is signed, and this worker has no secret. {_ADVICE}"
            )
        mac, body = text[1 : 1 + 2 * secrets.MAC_BYTES], text[1 + 2 * secrets.MAC_BYTES :]
        if not secrets.verify(self.secret, bytes.fromhex(mac), *self._names(key), body.encode()):
            raise SecretError(
                f"{key} in the store was signed with another secret, "
                f"or in another start of a job. {_ADVICE}"
            )
        return body

    def _names(self, key: str) -> tuple[bytes, bytes]:
        return self.start.encode(), f"{self.path}/{key}".encode()
