"""The map of the rooms (`docs/design.md`) is true: what there is, and what imports what."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pmvit"
ROW = re.compile(r"^\| `([a-z_./]+)` \| (.+) \| (.+) \|$")


def rooms_of_map() -> dict[str, set[str]]:
    """Each room of the map, in its order, and what it may import."""
    lines = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").splitlines()
    found = [match for line in lines if (match := ROW.match(line))]
    return {row[1].removesuffix(".py").removesuffix("/"): set(re.findall(r"`([a-z_]+)`", row[3])) for row in found}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path, rooms: set[str]) -> set[str]:
    """The rooms that a file imports from, wherever in the file; the front door counts as a room of its own."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "pmvit":
                room = rest.partition(".")[0]
                found.add(room if room in rooms else "__init__")
    return found - {room_of(path)}


def test_the_map_names_every_room_and_its_imports() -> None:
    allowed = rooms_of_map()
    files = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__main__.py"]
    real: dict[str, set[str]] = {room_of(path): set() for path in files}
    for path in files:
        real[room_of(path)] |= imported_rooms(path, set(real))
    assert real == allowed


def test_a_room_imports_only_from_rooms_above_it() -> None:
    above: set[str] = set()
    for room, imported in rooms_of_map().items():
        assert imported <= above, f"{room} imports from below: {imported - above}"
        above.add(room)
