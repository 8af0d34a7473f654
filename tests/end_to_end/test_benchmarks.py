"""The benchmarks run, and what they find is written down as the documents say. How fast anything is, is no test."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from benchmarks import __main__ as program
from benchmarks import document, effects, harness, report, results
from benchmarks import postgres as benchmark_of_postgres
from benchmarks.document import Document
from benchmarks.harness import Curve, Note, Plan, Row, Target
from tests.postgres import server

from agent_checkpoint import StateStore

ROOT = Path(__file__).parents[2]
PERFORMANCE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "RESULTS.md"

REACHED = Row("lease", "FULL, disk", "operations/s", "floor", (800.0, 900.0), (1000.0, 1000.0), Target("≥", 0.75))
MISSED = Row("writers", "longest wait, disk", "s", "busy_timeout", (0.7, 0.2), (6.0, 5.0), Target("≤", 0.5), "ours")
UNJUDGED = Row("failover", "disk", "s", "ttl of 1 s", (0.03, 0.04, 0.05), (0.8, 0.9, 1.0))
CURVE = Curve("growth", "growth", "A call", "disk", "get", "events", "ms", ((1.0, 0.02), (1_000_000.0, 0.021)))
NOTE = Note("lease", "nothing is synced")


def run(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def made(*rows: Row, quick: bool = False) -> Document:
    machine = {**document.machine(Plan({"disk": ROOT}, quick)), "benchmarks": {"lease": {"seconds": 61.0, "load": 0.5}}}
    return document.gathered(machine, [*rows, CURVE, NOTE])


def written(path: Path, found: Document) -> Path:
    path.write_text(json.dumps(document.to_json(found)), encoding="utf-8")
    return path


def block(text: str, name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
    assert found is not None, name
    return found[1].strip()


def test_the_cheap_ones_run_and_their_json_has_the_documented_shape(tmp_path: Path) -> None:
    ran = run("import", "lease", "--quick", "--json", "found.json", "--results", "RESULTS.md", folder=tmp_path)

    assert (ran.returncode, ran.stderr) == (0, "")
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert found.keys() == {"machine", "rows", "curves", "notes"}
    assert {"python", "sqlite", "processor", "load", "filesystems", "synchronous", "peers"} <= found["machine"].keys()
    assert found["machine"]["benchmarks"].keys() == {"import", "lease"}
    assert {row["benchmark"] for row in found["rows"]} == {"import", "lease"}
    for row in found["rows"]:
        assert {"case", "unit", "peer", "target", "judged", "figure", "spread", "reached"} <= row.keys()
        assert len(row["ours"]) == len(row["theirs"]) >= harness.FEWEST_ROUNDS
    assert "A quick run" in (tmp_path / "RESULTS.md").read_text("utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["RESULTS.md", "found.json"]


def test_the_floor_of_effects_writes_the_columns_of_today(tmp_path: Path) -> None:
    with StateStore(tmp_path / "agents.db") as store:
        store.initialize()
        lease = store.acquire(effects.SCOPE, effects.OWNER, 60)
        with closing(effects.Floor(tmp_path / "agents.db", "full")) as floor:
            floor.act("charge-1", lease.token)
        with store.read() as reader:
            assert reader.rows("SELECT key, token, state FROM effects") == [("charge-1", lease.token, "done")]


def test_the_floor_of_postgres_writes_the_columns_of_today() -> None:
    url = server().url("floor_of_the_benchmark")
    with StateStore(url) as store, closing(benchmark_of_postgres.Bare(url)) as bare:
        store.initialize()
        bare.acquire()
        bare.release()
        with store.read() as reader:
            assert reader.rows("SELECT scope, token, state FROM leases") == [("release", 1, "released")]
            kinds = [kind for (kind,) in reader.rows("SELECT kind FROM events ORDER BY id")]
            assert kinds[-2:] == ["lease.acquired", "lease.released"]


def test_the_command_is_measured_too(tmp_path: Path) -> None:
    ran = run("cli", "--quick", folder=tmp_path)

    assert ran.returncode == 0, ran.stderr
    assert len(re.findall(r"^cli ", ran.stdout, re.MULTILINE)) == 4


@pytest.mark.parametrize(("rows", "status"), [((REACHED, UNJUDGED), 0), ((REACHED, MISSED), 1)])
def test_a_check_fails_when_a_figure_is_missed(tmp_path: Path, rows: tuple[Row, ...], status: int) -> None:
    earlier = written(tmp_path / "earlier.json", made(*rows))

    assert program.main(["--from", str(earlier), "--check"]) == status
    assert program.main(["--from", str(earlier)]) == 0


def test_what_was_written_reads_as_it_was(tmp_path: Path) -> None:
    found = made(REACHED, MISSED, UNJUDGED)

    assert document.from_json(json.loads(written(tmp_path / "run.json", found).read_text("utf-8"))) == found


def test_what_is_measured_again_takes_the_place_of_what_was() -> None:
    again = made(replace(REACHED, ours=(500.0,), theirs=(1000.0,)))

    both = document.merged(made(REACHED, MISSED), again)

    assert [row.benchmark for row in both.rows] == ["writers", "lease"]
    assert both.rows[1].reached is False
    with pytest.raises(ValueError, match="quick"):
        document.merged(made(REACHED, quick=True), again)


def test_the_results_say_first_what_was_not_reached() -> None:
    text = results.results(made(REACHED, MISSED, UNJUDGED))

    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == ["Not reached", "The machine", "`lease`", "`writers`", "`failover`"]
    assert "1 of 2 figures" in text
    assert "- `writers`, longest wait, disk, beside busy_timeout: 700 ms (200 ms to 700 ms), to reach ≤ 500 ms" in text
    assert "| FULL, disk | 850/s | floor | 1,000/s | 0.85 × | 0.80 × to 0.90 × | ≥ 0.75 × | reached |" in text
    assert "- nothing is synced" in text
    assert "Nothing: all 1 figures" in results.results(made(REACHED))


def test_a_limit_must_hold_in_every_round_and_a_ratio_in_the_median() -> None:
    assert (MISSED.figure, MISSED.reached) == (0.7, False)
    assert (REACHED.figure, REACHED.reached) == (pytest.approx(0.85), True)
    assert UNJUDGED.reached is None
    assert report.line(MISSED).endswith("to reach ≤ 500 ms: NOT REACHED")


def test_the_tables_of_a_document_are_filled_in_and_nothing_else_of_it_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures -->\nold\n<!-- /figures -->\n<!-- other -->\n<!-- /other -->\nafter\n")
    tables = results.tables(made(REACHED, MISSED, UNJUDGED))

    results.fill(page, tables)
    results.fill(page, tables)

    shown = "before\n<!-- figures -->\n\n{}\n\n<!-- /figures -->\n<!-- other -->\n<!-- /other -->\nafter\n"
    assert page.read_text() == shown.format(tables["figures"])
    assert "| **40.0 ms** | 900 ms (a lease with a ttl of 1 s) |" in tables["figures"]
    assert "| **1.2 ms** | 1.0 ms (bare sqlite3, the same rows) |" in tables["figures"]


def test_the_three_figures_of_the_readme_are_those_of_the_results() -> None:
    readme, performance = ((ROOT / name).read_text("utf-8") for name in program.DOCUMENTS)

    figures = block(readme, "figures")
    assert figures.count("| **") == len(results.FIGURES)
    assert figures in RESULTS.read_text("utf-8")
    assert figures == block(performance, "figures")
    assert block(performance, "missed") in RESULTS.read_text("utf-8")


def test_the_page_names_every_benchmark_and_option() -> None:
    page = PERFORMANCE.read_text("utf-8")
    helped = run("--help", folder=ROOT).stdout

    for name in program.BENCHMARKS:
        assert f"`{name}`" in page
    for option in re.findall(r"^  (--[a-z]+)", helped, re.MULTILINE):
        assert f"| `{option}" in page, option
    assert set(results.QUESTIONS) == set(program.BENCHMARKS)


def test_an_unknown_name_says_what_there_is(tmp_path: Path) -> None:
    ran = run("leases", folder=tmp_path)

    assert ran.returncode == 2
    assert "no benchmark is called leases; there are lease, writers, queue" in ran.stderr


def test_plots_are_small_pictures_or_the_error_says_what_to_install(tmp_path: Path, capsys: Any) -> None:
    earlier = written(tmp_path / "earlier.json", made(REACHED, MISSED, UNJUDGED))
    arguments = ["--from", str(earlier), "--plot", str(tmp_path / "plots")]

    if find_spec("matplotlib") is None:
        with pytest.raises(SystemExit):
            program.main(arguments)
        assert "uv run --group benchmarks" in capsys.readouterr().err
        return
    assert program.main(arguments) == 0
    drawn = sorted((tmp_path / "plots").iterdir())
    assert [path.name for path in drawn] == ["figures.png", "growth.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size < 60_000 for path in drawn)


def test_the_plots_of_the_documents_are_there_and_small() -> None:
    shown = set(
        re.findall(
            r"\((?:docs/)?plots/([a-z-]+\.png)\)", "".join((ROOT / n).read_text("utf-8") for n in program.DOCUMENTS)
        )
    )

    assert {path.name for path in (ROOT / "docs" / "plots").iterdir()} == shown
    assert all((ROOT / "docs" / "plots" / name).stat().st_size < 60_000 for name in shown)


def test_the_hot_path_can_be_profiled(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.profile", "lease", "--cycles", "20"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    assert re.match(r"a cycle: [\d.]+ µs; bare sqlite3: [\d.]+ µs\n\n +own µs  share  calls  function\n", ran.stdout)
    assert "sqlite3.Cursor" in ran.stdout
