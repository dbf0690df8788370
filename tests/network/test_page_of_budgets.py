"""The page of budgets in docs/security.md says what the constants say."""

import re
from pathlib import Path

from swarmcli.network.budgets import BUDGETS, Budget

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
ROWS = {
    "payloads that nobody": BUDGETS.payloads,
    "messages above 64 KiB": BUDGETS.heads,
    "requests that are not": BUDGETS.requests,
    "answers that are not": BUDGETS.replies,
    "calls that wait for their": BUDGETS.calls,
    "control connections": BUDGETS.connections,
    "bulk connections": BUDGETS.bulk,
}


def numbers(row: str) -> Budget:
    cells = row.strip("|").split("|")[1:]
    found = [int(each.replace(",", "")) for cell in cells for each in re.findall(r"[\d,]+", cell)]
    return Budget(*(each << 20 if "MiB" in row.split("|", 2)[2] else each for each in found))


def test_the_table_has_the_constants() -> None:
    for beginning, budget in ROWS.items():
        [row] = [line for line in PAGE.splitlines() if line.startswith(f"| {beginning}")]
        assert numbers(row) == budget, row
