"""Pages that mkdocs makes from elsewhere: the README as the first, the commands from the program, the Python reference.

A hook of mkdocs (`hooks` in mkdocs.yml).
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "osdp.api",
    "osdp.description",
    "osdp.resources",
    "osdp.uneven_lengths.balanced_batches",
    "osdp.odc",
    "osdp.partition",
    "osdp.integrations.lightning",
    "osdp.integrations.torchtitan",
    "osdp.integrations.ray",
)
"""What users import."""
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are no files of `docs`."""
    pages = {
        "index.md": (ROOT / "README.md").read_text(encoding="utf-8"),
        "reference/commands.md": _commands(),
        "reference/python.md": _modules(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have links lead from page to page, and leave of those to source files their text."""
    place = posixpath.dirname(posixpath.join("docs", page.file.src_uri))
    written_in = "" if page.file.src_uri == "index.md" else place  # The README is in the folder above.

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        if ":" in target or target.startswith("#"):
            return found[0]
        path, mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(written_in, path))
        path = "docs/index.md" if path == "README.md" else path
        return f"[{text}]({posixpath.relpath(path, place)}{mark}{anchor})" if path.startswith("docs/") else text

    return LINK.sub(link, markdown)


def _commands() -> str:
    """Have typer write the reference of all commands and options, which are those of `--help`."""
    command = [sys.executable, "-m", "typer", "osdp.cli.app", "utils", "docs", "--name", "osdp", "--title", "Commands"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise PluginError(f"the reference of commands could not be made: {done.stderr}")
    return done.stdout


def _modules() -> str:
    return "# Python\n\n" + "\n".join(f"## {module}\n\n::: {module}\n" for module in MODULES)
