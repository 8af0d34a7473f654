"""Every SQL statement of core and of the adapters is one text that both databases take."""

from __future__ import annotations

import pkgutil
import re
from importlib import import_module
from itertools import chain, combinations
from types import ModuleType

import pytest

import agent_checkpoint.ledger
from agent_checkpoint import StateStore
from agent_checkpoint.ledger import events
from agent_checkpoint_postgres import statements

VERBS = ("SELECT", "INSERT", "UPDATE", "DELETE", "WITH")


def modules() -> list[ModuleType]:
    names = [f"agent_checkpoint.ledger.{each.name}" for each in pkgutil.iter_modules(agent_checkpoint.ledger.__path__)]
    return [import_module(name) for name in (*names, "agent_checkpoint_langgraph.tables")]


def is_statement(value: object) -> bool:
    return isinstance(value, str) and value.lstrip().startswith(VERBS)


def found_in(module: ModuleType) -> list[tuple[str, str]]:
    named = [(f"{module.__name__}.{name}", value) for name, value in vars(module).items() if name.isupper()]
    return [(name, filled(value)) for name, value in named if is_statement(value)]


def filled(sql: str) -> str:
    """A statement for a number of values that is not known before, for two."""
    columns = re.search(r"INSERT INTO \w+ \(([^)]*)\)", sql)
    row = f"({', '.join('?' for _ in columns[1].split(','))})" if columns else ""
    return sql.replace("{places}", "?, ?").replace("{rows}", f"{row}, {row}")


def read_events() -> list[tuple[str, str]]:
    """The one statement that is put together: for each choice of filters."""
    chosen = chain.from_iterable(combinations(events.FILTERS.values(), number) for number in range(4))
    return [
        (f"events{''.join(filters)} {name}", events.COLUMNS + order.format(filters="".join(filters)))
        for filters in chosen
        for name, order in (("next", events.NEXT), ("last", events.LAST))
    ]


FOUND = [*(each for module in modules() for each in found_in(module)), *read_events()]
# A text that another one begins with is a part of it: it need not be a statement.
STATEMENTS = [(name, sql) for name, sql in FOUND if not any(o != sql and o.startswith(sql.rstrip()) for _, o in FOUND)]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StateStore]:
    from tests import postgres

    from agent_checkpoint_langgraph import AgentCheckpointSaver

    urls = {
        "sqlite": str(tmp_path_factory.mktemp("statements") / "agents.db"),
        "postgresql": postgres.server().url("statements"),
    }
    for url in urls.values():
        with AgentCheckpointSaver.from_conn_string(url) as saver:
            saver.setup()
    return {dialect: StateStore(url) for dialect, url in urls.items()}


def test_there_are_statements_to_look_at() -> None:
    assert len(STATEMENTS) > 60
    for verb in VERBS[:4]:
        assert any(sql.lstrip().startswith(verb) for _, sql in STATEMENTS), verb


def test_the_statements_are_all_prepared_by_postgresql(stores: dict[str, StateStore]) -> None:
    with stores["postgresql"] as store, store.transaction(component="tests", action="test.look") as part:
        for number, (name, sql) in enumerate(STATEMENTS):
            try:
                part.run(f"PREPARE statement_{number} AS " + statements.numbered(sql).decode())
            except Exception as error:
                raise AssertionError(name) from error


def test_the_statements_are_all_understood_by_sqlite(stores: dict[str, StateStore]) -> None:
    with stores["sqlite"] as store, store.read() as reader:
        for name, sql in STATEMENTS:
            try:
                assert reader.rows("EXPLAIN " + sql, (None,) * sql.count("?"))
            except Exception as error:
                raise AssertionError(name) from error


# What one of the two does not take, or takes in another sense.
NOT_PORTABLE = (r"\? IS (NOT )?NULL", r"IS NOT DISTINCT FROM", r"FOR UPDATE", r"\bROWID\b", r"\|\|\s*\?", r"INSERT OR ")


@pytest.mark.parametrize("words", NOT_PORTABLE)
def test_no_statement_uses_words_that_are_not_portable(words: str) -> None:
    assert [name for name, sql in STATEMENTS if re.search(words, sql, re.IGNORECASE)] == []


def test_a_question_mark_stands_for_a_parameter_and_nothing_else() -> None:
    for name, sql in STATEMENTS:
        assert "'" not in sql or not re.search(r"'[^']*\?[^']*'", sql), name
        assert statements.numbered(sql).decode().count("$") == sql.count("?"), name


@pytest.mark.parametrize("encoding", ["LATIN1", "EUC_JP"])
def test_names_are_what_they_are_whatever_encoding_a_client_would_have(
    store: StateStore, url: str, encoding: str
) -> None:
    with StateStore(f"{url}&client_encoding={encoding}") as other:
        for scope in ("scöpe", "日本"):
            lease = other.acquire(scope, "ada")
            assert other.check_lease(*lease.fence).scope == scope
            assert [each.scope for each in store.list_leases() if each.scope == scope] == [scope]
