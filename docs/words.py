"""Count the words of the documentation by part: python docs/words.py [COMMIT]. Tables count, code blocks do not."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter


def listing(*arguments: str) -> str:
    """The output of git."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def words(text: str) -> int:
    """The words outside of code blocks."""
    return len(re.findall(r"\w[^\s|]*", re.sub(r"^(`{3,}).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)))


if __name__ == "__main__":
    commit = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    counted: Counter[str] = Counter()
    for file in listing("ls-tree", "-r", "--name-only", commit, "docs", "README.md", "README.ko.md").split():
        if file.endswith(".md"):
            part = "/".join(file.split("/")[:2]) if file.count("/") > 1 else file
            counted[part] += words(listing("show", f"{commit}:{file}"))
    for part, number in sorted(counted.items()):
        print(f"{number:7,}  {part}")
    print(f"{counted.total():7,}  all")
