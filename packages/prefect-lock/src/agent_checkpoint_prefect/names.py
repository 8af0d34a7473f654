"""The scopes that locks stand for.

A name and the key of a result record never share a scope, and neither do two
namespaces, whatever characters are in them.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

MAX_SCOPE_BYTES = 512
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
NAMESPACE = re.compile(r"[^/\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,64}")


def scope_of_name(namespace: str, name: str) -> str:
    """The scope of a lock that is asked for by name."""
    return _scope(f"prefect/{namespace}/", name)


def scope_of_record(namespace: str, key: str) -> str:
    """The scope of a result record, which Prefect locks by its key."""
    return _scope(f"prefect-record/{namespace}/", key)


def prefixes(namespace: str) -> tuple[str, str]:
    """What the scopes of a namespace begin with."""
    return f"prefect/{namespace}/", f"prefect-record/{namespace}/"


# The same few locks are taken again and again.
@lru_cache(maxsize=1_024)
def _scope(prefix: str, name: str) -> str:
    scope = prefix + name
    if not name or name.startswith("sha256:") or CONTROL.search(name) or len(scope.encode()) > MAX_SCOPE_BYTES:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
        scope = f"{prefix}sha256:{digest}"
    return scope
