"""Signs values for a store that any program may write to.

The signature proves that the writer knows the job's secret, and that the value belongs to this key
and this start of the job.

    "1" MAC(secret; start of the job, key, JSON) JSON        "0" JSON if the job has no secret
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

    Args:
        secret: The job's secret. None: values aren't signed.
        path: Prefix of the keys, without its last slash.
        start: Id of one start of the job. Values of other starts are refused. Empty: none are.
    """

    secret: bytes | None = None
    path: str = ""
    start: str = ""

    def extend_path(self, prefix: str) -> Signer:
        """Make a signer for keys that have one more prefix."""
        return replace(self, path=f"{self.path}/{prefix}" if self.path else prefix)

    def copy_for_start(self, start: str) -> Signer:
        """Make a signer for one start of the job. It refuses values of other starts."""
        return replace(self, start=start)

    def sign_value(self, key: str, value: Any) -> str:
        """Sign a JSON value for a key. Returns the text to store."""
        body = json.dumps(value)
        return (
            _PLAIN
            if self.secret is None
            else _SIGNED
            + secrets.sign_parts(self.secret, *self._signed_names(key), body.encode()).hex()
        ) + body

    def verify_value(self, key: str, raw: bytes) -> Any:
        """Verify a stored value of a key, and decode it.

        Raises `SecretError` if it wasn't signed with the secret, for this key and this start of the
        job.
        """
        try:
            text = raw.decode()
            return json.loads(self._verify_text(key, text))
        except (ValueError, RecursionError) as error:
            # A `SecretError` is a `ValueError` too.
            if isinstance(error, SecretError):
                raise
            raise SecretError(
                f"{key} in the store has a value that no worker has put there: "
                f"another program writes to the store. {_ADVICE}"
            ) from error

    def _verify_text(self, key: str, text: str) -> str:
        """Check the signature, and cut it off. Returns the JSON text."""
        # A plain value is refused if there is a secret: any program could have written it.
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
        if not secrets.verify_parts(
            self.secret, bytes.fromhex(mac), *self._signed_names(key), body.encode()
        ):
            raise SecretError(
                f"{key} in the store was signed with another secret, "
                f"or in another start of a job. {_ADVICE}"
            )
        return body

    def _signed_names(self, key: str) -> tuple[bytes, bytes]:
        """Names that are signed together with a value: the start of the job, and the whole key."""
        return self.start.encode(), f"{self.path}/{key}".encode()
