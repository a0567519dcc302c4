"""Write tests/slow.txt, the tests of several cases that take long: `python -m scripts.slow_tests JUNIT.xml`.

The file is what `make test PYTEST=--junitxml=JUNIT.xml` writes. One case of each test in the list runs by default, the
others belong to the marked set `whole`.
"""

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

LIST = Path(__file__).parents[1] / "tests" / "slow.txt"
SECONDS = 0.15
"""What a case takes at least, on average."""
WHOLE = ("test_families", "test_battery", "test_methods", "test_docs", "test_notebooks", "test_readme")
"""Files of which every case remains: all families and methods, and the pages."""


def main(junit: str) -> None:
    """Write the list, in the order of files and names."""
    seconds = defaultdict(list)
    for case in ElementTree.parse(junit).iter("testcase"):
        file, name = case.attrib["classname"].split(".")[-1], case.attrib["name"].split("[")[0]
        seconds[f"{file}::{name}"].append(float(case.attrib["time"]))
    several = {test: each for test, each in seconds.items() if len(each) > 1 and test.split("::")[0] not in WHOLE}
    slow = [test for test, each in several.items() if sum(each) > SECONDS * len(each)]
    LIST.write_text("\n".join(sorted(slow)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
