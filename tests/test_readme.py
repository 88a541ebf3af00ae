"""What the README shows is what happens."""

import re
from pathlib import Path

from cupyflash.runtime import env

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_examples_run_and_print_what_they_say(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    for code in blocks:
        exec(compile(code, "README.md", "exec"), {})
    said = re.findall(r"print\(.*#\s(\(.*)$", "\n".join(blocks), re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said == ["(5, 8, 64) (8, 5)"]


def test_linked_files_exist():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing


def test_every_variable_is_in_the_table():
    source = Path(env.__file__).read_text()
    known = set(re.findall(r'"(CUPYFLASH_[A-Z_]+)"', source))
    assert known == set(re.findall(r"^\| `(CUPYFLASH_[A-Z_]+)", README, re.MULTILINE))
