"""Each promise of docs/guarantees.md names the tests that show it, and they exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/guarantees.md"
TEXT = PAGE.read_text()
PROMISE = re.compile(r"^(\d+)\. \*\*", re.MULTILINE)
ROW = re.compile(r"^\| (\d+) \| (.+) \|$", re.MULTILINE)
SHOWN_BY = re.compile(r"\[`(test_\w+)`\]\(([^)#]+)\)")
TEST_FILE = re.compile(r"\]\((\.\./tests/[^)#]+\.py)\)")


@cache
def defined_in(path: Path) -> frozenset[str]:
    """The test functions that a file defines."""
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")
    )


def section(title: str) -> str:
    """A chapter of the page."""
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def parts(title: str) -> dict[str, str]:
    """The parts of a chapter, by their headings."""
    found = re.split(r"^### (.+)$", section(title), flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


def test_each_promise_has_a_row_of_tests_that_show_it() -> None:
    promises = PROMISE.findall(section("The promises"))
    rows = dict(ROW.findall(section("The promises")))
    assert promises == [str(number) for number in range(1, len(promises) + 1)]
    assert list(rows) == promises
    assert all(SHOWN_BY.search(shown) for shown in rows.values())


@pytest.mark.parametrize(("name", "file"), sorted(set(SHOWN_BY.findall(TEXT))))
def test_a_test_that_is_named_exists(name: str, file: str) -> None:
    assert name in defined_in((PAGE.parent / file).resolve())


@pytest.mark.parametrize("chapter", ["Holding and waiting", "Faults"])
def test_each_part_of_a_chapter_says_what_shows_it_or_that_nothing_does(chapter: str) -> None:
    silent = [
        title
        for title, text in parts(chapter).items()
        if not (SHOWN_BY.search(text) or TEST_FILE.search(text) or "Not tried" in text)
    ]
    assert silent == []


@pytest.mark.parametrize("file", sorted(set(TEST_FILE.findall(TEXT))))
def test_a_test_file_that_is_named_exists_and_has_tests(file: str) -> None:
    assert defined_in((PAGE.parent / file).resolve())
