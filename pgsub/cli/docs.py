"""``python -m pgsub.cli.docs [FOLDER]``: writes ``man/`` and ``completions/`` from the command tree.

Run it after a change of options. A test compares the result with the committed files. The program never imports it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pgsub.cli.app import program
from pgsub.cli.command_tree.shells import script
from pgsub.cli.command_tree.tree import describe
from pgsub.cli.man_pages import pages, topics

SCRIPTS = {"bash": "pgsub.bash", "zsh": "_pgsub", "fish": "pgsub.fish"}


def files() -> dict[str, str]:
    """Generate all files.

    :return: text by path below the sources.
    """
    tree = describe(program())
    found = {f"man/{name}": text for name, text in {**pages(tree), **topics()}.items()}
    return found | {f"completions/{name}": script(shell, tree) for shell, name in SCRIPTS.items()}


def write(folder: Path) -> None:
    """Write all generated files.

    :param folder: the folder of the sources.
    """
    for name, text in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
