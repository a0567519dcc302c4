"""What happens on models that were changed: writes docs/_static/changed-*.csv (`make changed`).

The changes, the questions and what they are compared with are those of the tests (`tests/changed`). With an
argument, the changes whose name has it are run and failing cells are printed; nothing is written.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from changed import table

if __name__ == "__main__":
    sys.exit(table.main(*sys.argv[1:2]))  # pyright: ignore[reportAttributeAccessIssue]
