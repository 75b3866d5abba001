"""Two thousand damaged files of every kind: each is refused in one line, or read as it was written."""

from pathlib import Path

from scripts.fuzz import fuzz, show


def test_damage_is_noticed_whatever_it_is(tmp_path: Path) -> None:
    table = fuzz(2000, 0, tmp_path)
    assert not [failure for result in table.values() for failure in result.failures], show(table)
    assert sum(result.counts.total() for result in table.values()) == 2000
    assert all(result.counts.total() >= 50 for result in table.values())
    checked = {name: result.counts for name, result in table.items() if not name.endswith(", edited")}
    assert all(counts["refused"] for name, counts in checked.items() if name != "metrics.jsonl"), show(table)
    assert not any(counts["edited"] for counts in checked.values())
