"""Count phrases that docs/style.md replaces, in the docstrings, comments, messages and pages of the project.

    python .ci/english.py                # the count per 10,000 words, each phrase, the files with most of them
    python .ci/english.py --check        # only the count; lint runs this
    python .ci/english.py src/x.py ...   # every hit in these files or folders, with its line

Code is not counted: of a Python file only comments and strings with a space in them are read, and text in backticks is
left out. More than `MOST` phrases per 10,000 words fail.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST = 3.0  # phrases per 10,000 words
# The phrases in the table of docs/style.md that a regular expression can find.
PHRASES = (
    r"\bwhoever\b",
    r"\bnobody\b",
    r"\b(?:some|any)body\b",
    r"\b(?:is|are|was|were|be|been|being) told\b",
    r"\btells? (?:of|it|that|what|who|why|how|where|whether|each|which)\b",
    r"\bsays? (?:so|that|what|why|which|how|where|whether|nothing|it|otherwise|who|of)\b",
    r"\bsaid\b",
    r"\bknows?\b",
    r"\blets? go\b",
    r"\bof (?:one's|its|their|his|our|yours?|a) own\b",
    r"\bas \w+ as may be\b",
    r"\b(?:is|are|was) none\b",
    r"\bwhat (?:is|was|are|were) (?!the\b)",
    r"\ba most\b",
    r"\ba slip\b",
    r"\bof one mind\b",
    r"\bfor good\b",
    r"\bcom(?:es|e) to (?!be\b|an end\b)",
    r"\bstands?\b(?! for| in for| alone)",
    r"\blies?\b",
    r"\bgo(?:es)? on\b",
    r"\b(?:is|are|was|were) gone\b",
    r"\bmend(?:s|ed)?\b",
    r"\blast word\b",
    r"\banew\b",
    r"\bwants?\b(?! to)",
    r"\btroubles?\b",
    r"\bdoubles\b",
    r"\bstrangers?\b",
    r"\bnothing of\b",
    r"\bdone with\b",
    r"\bkeeps? to\b",
    r"\bway out\b",
    r"\bwill do\b",
    r"\bone's\b",
    r"\bby heart\b",
    r"\b(?:whose|its|their) sake\b",
    r"\bby and by\b",
    r"\bbefore long\b",
    r"\bin (?:its|their) stead\b",
    r"\bmeanwhile\b",
    r"\b(?:an)?other (?:\w+ ){1,3}than\b",
    r"\bstops no other\b",
)
_ANY = re.compile("|".join(PHRASES), re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z][\w'’-]*")
_CODE = re.compile(r"```.*?```|`[^`\n]*`|^    [^\n]*$", re.DOTALL | re.MULTILINE)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of everything in a file that people read."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        for number, line in enumerate(_CODE.sub(_blank, source).splitlines(), start=1):
            yield number, line
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for offset, line in enumerate(re.sub(r"`[^`\n]*`", "`", node.value).splitlines()):
                yield node.lineno + offset, line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], re.sub(r"`[^`\n]*`", "`", token.string)


def _blank(found: re.Match[str]) -> str:
    return "\n" * found.group().count("\n")


def files(places: list[str]) -> list[Path]:
    """The files below some places; by default what users and developers read, but for the record of changes."""
    roots = [Path(place).resolve() for place in places] or [ROOT / "src", ROOT / "docs", ROOT / "README.md"]
    below = (path for root in roots for path in ([root] if root.is_file() else sorted(root.rglob("*"))))
    return [path for path in below if path.suffix in (".py", ".md") and path.name not in ("style.md", "changelog.md")]


def main(places: list[str]) -> int:
    """Print what was found; 1 where it is too much."""
    checks = "--check" in places
    places = [place for place in places if place != "--check"]
    words, phrases, worst = 0, Counter[str](), Counter[str]()
    for path in files(places):
        name = path.relative_to(ROOT).as_posix()
        for number, text in texts(path):
            words += len(_WORD.findall(text))
            for found in _ANY.finditer(text):
                phrases[found.group().lower()] += 1
                worst[name] += 1
                if places:
                    print(f"{name}:{number}: {found.group()}: {text.strip()[:160]}")
    each = 1e4 * phrases.total() / max(words, 1)
    if not places and not checks:
        print("".join(f"{count:5d}  {phrase}\n" for phrase, count in phrases.most_common(40)), end="")
        print("".join(f"{count:5d}  {name}\n" for name, count in worst.most_common(20)), end="")
    print(f"{phrases.total()} phrases in {words} words: {each:.1f} per 10,000 (at most {MOST:g}; docs/style.md)")
    return int(not places and each > MOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
