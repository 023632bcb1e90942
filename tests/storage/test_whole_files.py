# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

from tba_jax.storage.whole_files import write_whole

WRITER = """
import sys
from pathlib import Path
from tba_jax.storage.whole_files import write_whole
for number in range(60):
    write_whole(Path(sys.argv[1]), (sys.argv[2] * 200_000).encode())
"""


def test_processes_that_replace_one_file_leave_it_whole(tmp_path):
    """Two processes of a pod record smaller sizes in config.json at the same moment."""
    path = tmp_path / "config.json"
    write_whole(path, b"a" * 200_000)
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), letter]) for letter in "abc"
    ]
    while any(writer.poll() is None for writer in writers):
        content = path.read_bytes()
        assert len(content) == 200_000 and len(set(content)) == 1
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
