"""Writes the JSON Schema of every document into this folder."""

import json
from pathlib import Path

from partita.core.codec import FORMATS
from partita.core.schema import json_schema


def main() -> None:
    """Write a file for each format."""
    for name in FORMATS:
        path = Path(__file__).parent / f"{name}.schema.json"
        path.write_text(json.dumps(json_schema(name), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
