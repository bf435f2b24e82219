"""PARITY.md lists every row of the contract once, and the tests that it names exist."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
STATES = {"done", "partial", "absent", "process", "blocked"}
SECTIONS = {"Capabilities": "capabilities", "Release": "release"}
NUM_ROWS = {"capabilities": 170, "release": 81}
HEADER = ["id", "area", "tier", "wave", "state", "shown by / missing"]
# In backticks, but not a test: a call, a route, an option, a variable.
NOT_A_PATH = re.compile(r".*\(\)|[/$-].*")


@dataclass(frozen=True, slots=True)
class Row:
    section: str
    id: str
    wave: int
    state: str
    remark: str

    def named_tests(self) -> list[str]:
        return [name for name in re.findall(r"`([^`]+)`", self.remark) if not NOT_A_PATH.fullmatch(name)]


def read_rows(page: str) -> list[Row]:
    """Every table line of the page but the two lines of a table's head."""
    rows, section = [], ""
    for line in page.splitlines():
        if line.startswith("## "):
            section = SECTIONS[line[3:].strip()]
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
        assert len(cells) == len(HEADER), f"{len(HEADER)} cells expected: {line}"
        if cells != HEADER and not set(cells[0]) <= {"-"}:
            rows.append(Row(section, cells[0], int(cells[3]), cells[4], cells[5]))
    return rows


def complaints(row: Row) -> list[str]:
    """What is wrong with the state of one row."""
    found = []
    if row.state not in STATES:
        found.append(f"{row.id}: state {row.state!r}, expected one of {sorted(STATES)}")
    if row.state in {"done", "partial"}:
        found += [f"{row.id}: tests/{name} does not exist" for name in row.named_tests() if not exists(name)]
    if row.state == "done" and not row.named_tests():
        found.append(f"{row.id}: done, but no test is named")
    if row.state in {"partial", "blocked"} and not row.remark:
        found.append(f"{row.id}: {row.state}, but what is missing is not said")
    return found


def exists(name: str) -> bool:
    """`folder`, `folder/test_file.py` or `folder/test_file.py::test_name`, below tests/."""
    path, _, function = name.partition("::")
    if not (TESTS / path).exists():
        return False
    return (
        not function
        or re.search(rf"^(async )?def {re.escape(function)}\(", (TESTS / path).read_text(), re.M) is not None
    )


ROWS = read_rows((ROOT / "PARITY.md").read_text())


@pytest.mark.parametrize("section", NUM_ROWS)
def test_every_row_of_the_contract_is_there_once(section: str) -> None:
    expected: dict[str, int] = json.loads((TESTS / "data" / "parity_ids.json").read_text())[section]
    assert len(expected) == NUM_ROWS[section]
    rows = [row for row in ROWS if row.section == section]
    ids = [row.id for row in rows]
    assert sorted(ids) == sorted(set(ids)), "an id stands twice"
    assert {row.id: row.wave for row in rows} == expected


def test_states_are_known_and_named_tests_exist() -> None:
    found = [complaint for row in ROWS for complaint in complaints(row)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("state", "remark", "complaint"),
    [
        ("done", "`architecture/test_parity_page.py::test_every_row_of_the_contract_is_there_once`, `/metrics`", ""),
        ("finished", "", "expected one of"),
        ("done", "all of it", "no test is named"),
        ("done", "`get_stats()`", "no test is named"),
        ("done", "`unit/test_nothing.py`", "tests/unit/test_nothing.py does not exist"),
        ("partial", "`architecture/test_parity_page.py::test_gone`", "test_gone does not exist"),
        ("partial", "", "what is missing is not said"),
    ],
)
def test_the_check_sees(state: str, remark: str, complaint: str) -> None:
    found = "\n".join(complaints(Row("capabilities", "ENG-X", 1, state, remark)))
    assert complaint in found and bool(complaint) == bool(found)
