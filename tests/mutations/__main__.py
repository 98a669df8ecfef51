"""`python -m tests.mutations` (make mutation): every fault, a table, exit 1 unless all are caught as expected."""

from __future__ import annotations

import sys

from tests.mutations.catalogue import ALL, LEFT_OUT
from tests.mutations.runner import run_all


def main() -> int:
    passed = run_all(ALL, lambda line: print(line, flush=True))
    for name, why in LEFT_OUT.items():
        print(f"left out: {name} ({why})")
    return 0 if passed and not LEFT_OUT else 1


if __name__ == "__main__":
    sys.exit(main())
