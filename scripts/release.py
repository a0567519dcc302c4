"""The checks before a release (`make release`), and the repository's address, once there is one.

    python -m scripts.release check PYTHON      after `make package`; PYTHON is that of the environment with the wheel
    python -m scripts.release address URL       writes links that work outside the repository, and the project's URLs

A release is then: `make release`, a tag `v<version>` on the commit, `twine upload dist/*`.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
MOST_BYTES = 8_000_000
"""Of the wheel, of which the compressed weights of the bundled models are 6.7 million (`scripts/rounding.py`), and code
1.1: to be lowered as the code shrinks."""
MOST_SECONDS = 2.0
"""Of a processor, that importing takes beyond TransformerLens, and `--help` at all: what else runs does not count."""
MOST_WORDS, MOST_WORDS_WITH_CODE = 600, 850
"""Of README.md."""
RELATIVE = re.compile(r"(!?\[[^\]]*\])\((?!https?://|#|mailto:)([^)\s]+)\)")
TIMES = """
import time, transformer_lens
start = time.process_time()
import tensorlens_tl
tensorlens_tl.freeze, tensorlens_tl.attribute  # names are imported when they are used
print(time.process_time() - start)
"""


def words(readme: str) -> tuple[int, int]:
    """How many words README has, without code and with it."""
    prose = re.sub(r"```.*?```", "", readme, flags=re.S)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    return len(prose.split()), len(re.sub(r"\]\([^)]*\)", "]", readme).split())


def absolute(text: str, repository: str, ref: str = "main") -> str:
    """A text whose relative links lead to the repository: pictures to the file itself, others to its page."""

    def linked(match: re.Match[str]) -> str:
        label, target = match.groups()
        view = "raw" if label.startswith("!") else "tree" if (ROOT / target).is_dir() else "blob"
        return f"{label}({repository}/{view}/{ref}/{target})"

    return RELATIVE.sub(linked, text)


def with_urls(pyproject: str, repository: str) -> str:
    """The project's file with its URLs in place of those that it had."""
    urls = (
        "[project.urls]\n"
        f'Repository = "{repository}"\n'
        f'Issues = "{repository}/issues"\n'
        f'Changelog = "{repository}/blob/main/CHANGELOG.md"\n\n'
    )
    rest = re.sub(r"^\[project\.urls\]\n(?:.+\n)*\n?", "", pyproject, flags=re.M)
    return rest.replace("[project.scripts]\n", urls + "[project.scripts]\n")


def texts_agree(version: str) -> Iterator[str]:
    """What is wrong with README, the changelog and the citation."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    prose, every = words(readme)
    if prose > MOST_WORDS or every > MOST_WORDS_WITH_CODE:
        yield f"README.md has {prose} words, with code {every}; at most {MOST_WORDS} and {MOST_WORDS_WITH_CODE}."
    if f"\n## {version}" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        yield f"CHANGELOG.md has no entry for {version}."
    if f"\nversion: {version}\n" not in (ROOT / "CITATION.cff").read_text(encoding="utf-8"):
        yield f"CITATION.cff is of another version than {version}."
    addressed = "[project.urls]" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    if addressed and RELATIVE.search(readme):
        yield "README.md has relative links, which break on the index: run `python -m scripts.release address URL`."
    if not addressed:
        print("note: no address of a repository is known, so README's links are relative (`address URL` changes both)")


def archives_fit() -> Iterator[str]:
    """What is wrong with wheel and sdist."""
    files = sorted([*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")])
    if len(files) != 2:
        yield f"dist/ has {len(files)} archives; run `make package`."
        return
    checked = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, files)], check=False)
    if checked.returncode:
        yield "twine check found a fault in the archives."
    size = next(DIST.glob("*.whl")).stat().st_size
    print(f"wheel: {size / 1e6:.2f} MB")
    if size > MOST_BYTES:
        yield f"the wheel has {size / 1e6:.2f} MB; at most {MOST_BYTES / 1e6:.1f}."


def installed_works(python: str) -> Iterator[str]:
    """What is wrong with the installed wheel, away from the checkout."""
    seconds = float(output([python, "-c", TIMES]).split()[-1])
    command = str(Path(python).with_name("tensorlens-tl"))
    help_seconds = float(output(["bash", "-c", f"TIMEFORMAT=%U; time {command} --help > /dev/null"]).split()[-1])
    print(f"import: {seconds:.2f} s beyond TransformerLens; --help: {help_seconds:.2f} s")
    if max(seconds, help_seconds) > MOST_SECONDS:
        yield f"importing takes {seconds:.2f} s and --help {help_seconds:.2f} s; at most {MOST_SECONDS}."
    print(output([command, "demo"]).strip().split("\n")[-1])


def output(command: list[str]) -> str:
    """What a command prints, run in dist/, so that nothing comes from the checkout.

    Raises:
        CalledProcessError: it fails.
    """
    run = subprocess.run(command, cwd=DIST, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return run.stdout


def check(python: str) -> int:
    """Every check; how many failed."""
    version = re.findall(r'__version__ = "(.+)"', (ROOT / "tensorlens_tl/__init__.py").read_text(encoding="utf-8"))[0]
    faults = [*texts_agree(version), *archives_fit(), *installed_works(str(Path(python).absolute()))]
    print("\n".join(faults) or f"{version} can be released.")
    return len(faults)


def main() -> int:
    match sys.argv[1:]:
        case ["check", python]:
            return check(python)
        case ["address", repository]:
            for name, changed in (("README.md", absolute), ("pyproject.toml", with_urls)):
                path = ROOT / name
                path.write_text(changed(path.read_text(encoding="utf-8"), repository.rstrip("/")), encoding="utf-8")
            return 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
