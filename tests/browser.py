# SPDX-License-Identifier: Apache-2.0
"""Opens a page in Chromium and reads a value back."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest


def in_browser(page: Path, folder: Path, *, script: str):
    """Open a page without a window; return the value of `script`.

    Args:
        page: file of the page, which is opened as a copy that has `script` and no security policy,
            so that the escaping of texts is all that protects it.
        folder: for the browser's files.
        script: body of a JavaScript function; what it returns is read back.
    """
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")
    text = page.read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    called = (
        f"<script>const told = (() => {{{script}}})();"
        "document.documentElement.setAttribute('data-told', JSON.stringify(told));</script>"
    )
    opened = folder / "opened.html"
    opened.write_text(text.replace("</body>", called + "</body>"), encoding="utf-8")
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder / 'browser'}", "--virtual-time-budget=8000", "--dump-dom"]
    done = subprocess.run(
        [*command, opened.as_uri()], capture_output=True, text=True, timeout=300, check=True
    )
    found = re.search(r'data-told="([^"]*)"', done.stdout)
    assert found is not None, done.stdout[:2000]
    return json.loads(html.unescape(found[1]))
