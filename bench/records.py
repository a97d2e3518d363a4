"""Records: one JSON file for each kind of measurement, date and commit, rewritten after every row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import environment

HERE = Path(__file__).parent
FOLDER = HERE / "records"
Row = dict[str, Any]


class Record:
    """An environment and named lists of rows; a file of the same day and commit is gone on with."""

    def __init__(self, kind: str, folder: Path = FOLDER) -> None:
        where = environment.describe()
        commit = where["commit"][:9] + "+" * where["commit"].endswith("+")
        self.path = folder / f"{kind}-{where['date'][:10]}-{commit}.json"
        self.content: dict[str, Any] = {"environment": where}
        if self.path.exists():
            self.content = json.loads(self.path.read_text(encoding="utf-8"))
            there = self.content["environment"]["device"]
            if there != where["device"]:
                raise RuntimeError(f"{self.path} is of another device, {there['name']}: figures of two do not mix")

    def rows(self, section: str) -> list[Row]:
        """Of that name, so far."""
        return self.content.get(section, [])

    def done(self, section: str, **key: Any) -> bool:
        """Whether there is a row with these values that did not fail."""
        return any(key.items() <= row.items() and "failed" not in row for row in self.rows(section))

    def add(self, section: str, row: Row, *key: str) -> None:
        """Adds a row in place of one that has the same values at ``key``."""
        others = [there for there in self.rows(section) if any(there[name] != row[name] for name in key)]
        self.put(section, [*others, row])

    def put(self, section: str, value: Any) -> None:
        """Sets a section, and writes the file."""
        self.content[section] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")


def stored(kind: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    """All records of that kind, the newest first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(f"{kind}-*.json")]
    return sorted(found, key=lambda record: record["environment"]["date"], reverse=True)
