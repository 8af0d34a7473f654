"""The URL of a store: what is for libpq, what is for us, and what may be shown of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, quote, urlencode

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from agent_checkpoint import InvalidInputError

if TYPE_CHECKING:
    from typing import NoReturn

SCHEMA = "agent_checkpoint"
POOL_SIZE = 10
# PostgreSQL's own limit, NAMEDATALEN - 1.
MAX_SCHEMA_BYTES = 63
MAX_POOL_SIZE = 1_000
FORM = "must be postgresql://USER:PASSWORD@HOST:PORT/DATABASE?OPTIONS, percent-encoded where a part has : / @ ?"
SWITCH = {"on": True, "off": False}
# A peer that vanished without a word is noticed after some 10 seconds, not after hours.
KEEPALIVE = {
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}


class Address(NamedTuple):
    """Where a store is.

    ``parameters`` are libpq's. ``shown`` names the place without any secret.
    """

    url: str
    shown: str
    parameters: dict[str, Any]
    schema: str
    pool_size: int
    prepared: bool
    listening: bool


def parse(url: str, busy_seconds: float) -> Address:
    """Take a URL apart.

    Raises:
        InvalidInputError: it is none, or an option of ours has a wrong value. What
            it says never has a part of the URL in it that could be a secret.
    """
    place, mark, query = url.partition("?")
    own: dict[str, str] = {}
    others: list[tuple[str, str]] = []
    for name, value in parse_qsl(query.replace("+", "%2B"), keep_blank_values=True):  # to libpq a plus is a plus
        if name in OPTIONS:
            own[name] = value
        else:
            others.append((name, value))
    parameters = _parameters(place + (mark and "?" + urlencode(others, quote_via=quote)))
    if parameters is None or _is_torn(place, parameters):
        refuse(FORM)
    schema = own.get("schema", SCHEMA)
    _check_schema(schema)
    parameters = {**KEEPALIVE, "connect_timeout": str(max(2, math.ceil(busy_seconds))), **parameters}
    parameters.setdefault("application_name", "agent-checkpoint")
    parameters["client_encoding"] = "UTF8"  # every name is sent as such, whatever the role or the environment says
    return Address(
        url,
        _shown(parameters, schema),
        parameters,
        schema,
        _size(own.get("pool_size", str(POOL_SIZE))),
        _switch("prepared_statements", own.get("prepared_statements", "off")),
        _switch("listen", own.get("listen", "on")),
    )


def _parameters(url: str) -> dict[str, Any] | None:
    """What libpq makes of it; None for nothing. What it says then has a part of the URL in it."""
    try:
        return conninfo_to_dict(url)
    except ProgrammingError:
        return None


def _is_torn(place: str, parameters: dict[str, Any]) -> bool:
    """Whether a password that is not percent-encoded was taken for a host, port or database: they are shown."""
    ports = str(parameters.get("port", "")).split(",")
    if not all(port.isascii() and (port.isdigit() or not port) for port in ports):
        return True
    return "@" in str(parameters.get("host", "")) or "@" in place.partition("://")[2].partition("/")[2]


OPTIONS = ("schema", "pool_size", "prepared_statements", "listen")


def refuse(rule: str) -> NoReturn:
    """Refuse the URL."""
    raise InvalidInputError(f"database: the URL {rule}", field="database", hint="docs/postgres.md has examples")


def _check_schema(schema: str) -> None:
    if not 0 < len(schema.encode(errors="surrogatepass")) <= MAX_SCHEMA_BYTES or not schema.isprintable():
        refuse(f"has a schema that is not 1 to {MAX_SCHEMA_BYTES} bytes of printable characters")
    if schema.startswith("pg_"):
        refuse("names a schema that begins with pg_, which PostgreSQL keeps for itself")


def _size(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 5 and 1 <= int(text) <= MAX_POOL_SIZE):
        refuse(f"has a pool_size that is not a number from 1 to {MAX_POOL_SIZE}")
    return int(text)


def _switch(name: str, text: str) -> bool:
    if text not in SWITCH:
        refuse(f"has a {name} that is neither on nor off")
    return SWITCH[text]


def _shown(parameters: dict[str, Any], schema: str) -> str:
    """The URL without its password, and without options that may hold another secret."""
    user = quote(str(parameters.get("user", "")), safe="")
    hosts = str(parameters.get("host", "")).split(",")
    ports = str(parameters.get("port", "")).split(",")
    if len(ports) == 1:
        ports *= len(hosts)
    in_query = any("/" in host for host in hosts)
    named = [] if in_query else [_at(host, port) for host, port in zip(hosts, ports)]  # noqa: B905
    options = {"schema": schema}
    if in_query:
        options = {"host": ",".join(hosts), "port": ",".join(filter(None, ports)), **options}
    at = "@" if user else ""
    database = quote(str(parameters.get("dbname", "")), safe="")
    query = urlencode({name: value for name, value in options.items() if value}, safe="/,")
    return f"postgresql://{user}{at}{','.join(named)}/{database}?{query}"


def _at(host: str, port: str) -> str:
    bracketed = f"[{host}]" if ":" in host else host
    return f"{bracketed}:{port}" if port else bracketed
