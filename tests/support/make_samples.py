"""Write the samples of the current format: only for a format version that is not out yet. Files there stay."""

from __future__ import annotations

from cutline.base import records
from tests.support.stored_records import EXAMPLES, KINDS, SAMPLES


def main() -> None:
    SAMPLES.mkdir(parents=True, exist_ok=True)
    for name, (kind, _) in KINDS.items():
        path = SAMPLES / f"{name}.json"
        if not path.exists():
            path.write_bytes(records.encode(kind, EXAMPLES[name]))


if __name__ == "__main__":
    main()
