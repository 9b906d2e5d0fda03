"""Makes the pictures of the documents from real runs: python docs/pictures/make.py

Needs the extra `test` and Chromium.  Each picture is of the program as it is; `made.txt` says when, by which command.
"""

from __future__ import annotations

import datetime
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import sync_playwright

import osdp

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Picture:
    """A part of the report that a command writes."""

    name: str
    arguments: tuple[str, ...]
    """Of `osdp`; the file of the report is added."""
    height: int
    """In pixels, from the top of the page."""


PICTURES = (
    Picture("report.png", ("plan", "--model", "gpt2-1.5b", "--mem", "8GB"), 880),
    Picture("frontier.png", ("plan", "--model", "gpt2-1.5b", "--mem", "6GB:12GB:2GB"), 1400),
)


def main() -> int:
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser_path is None:
        print("there is no Chromium: apt-get install chromium", file=sys.stderr)
        return 2
    lines = [f"Made by `docs/pictures/make.py`, {datetime.date.today()}, OSDP {osdp.__version__}.", ""]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for picture in PICTURES:
            page_file = Path(folder, f"{picture.name}.html")
            command = [sys.executable, "-m", "osdp", *picture.arguments, "--html", str(page_file)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            page = browser.new_page(viewport={"width": 1200, "height": picture.height})
            page.goto(page_file.as_uri())
            page.wait_for_timeout(3000)  # Figures are drawn by then.
            page.screenshot(path=HERE / picture.name)
            lines.append(f"- `{picture.name}`: `{shlex.join(['osdp', *picture.arguments, '--html', 'report.html'])}`")
        browser.close()
    (HERE / "made.txt").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
