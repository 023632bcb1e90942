# SPDX-License-Identifier: Apache-2.0
import sys
from pathlib import Path

import pytest

from tba_jax.commands import sweep
from tba_jax.commands.sweep import parse_grid, points
from tba_jax.settings import ConfigError

ROOT = Path(__file__).parents[2]
# Stands for the main command: it says when it begins and when it ends.
FAKE_MAIN = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from fake_workdir import fake_workdir
given = dict(argument.split("=", 1) for argument in sys.argv[1:])
workdir = Path(given["--workdir"])
events = workdir.parent.parent / "events"
events.open("a").write(f"begin {{workdir.name}}\\n")
if given.get("--config.sync_period") == "3":
    sys.exit("error: three does not work")
fake_workdir(workdir, num_steps=20)
(workdir / "report.html").write_text("<html>")
events.open("a").write(f"end {{workdir.name}}\\n")
"""
ARGUMENTS = ["--config=math", "--config.num_steps=20"]


def test_seeds_vary_slowest_and_bad_points_are_known_before_the_first_run():
    grid = parse_grid("objective.preset=tba,grpo;optimizer.learning_rate=1e-5,-1")
    found = points(ARGUMENTS, grid, [3, 4])
    names = [*found]
    assert names[:2] == ["preset=tba-learning_rate=1e-5-seed3", "preset=tba-learning_rate=-1-seed3"]
    assert len(names) == 8 and names[4].endswith("seed4")
    assert [isinstance(x, ConfigError) for _, x in found.values()] == [False, True] * 4
    with pytest.raises(ConfigError, match="did you mean optimizer.learning_rate"):
        points(ARGUMENTS, {"lr": ["1"]}, [0])


@pytest.mark.slow
# JAX, which other tests load, warns of the fork before a run; the command itself loads no JAX.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_one_bad_point_does_not_end_a_sweep_that_ends_in_a_comparison(
    tmp_path, capsys, monkeypatch
):
    program = FAKE_MAIN.format(tests=str(ROOT / "tests"))
    monkeypatch.setattr(sweep, "MAIN", (sys.executable, "-c", program))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    out = tmp_path / "out"
    arguments = [*ARGUMENTS, "--grid=sync_period=0,3,1", "--seeds=2", f"--out={out}"]
    assert sweep.main(arguments) == 1
    told = capsys.readouterr()
    assert "sync_period=0-seed0: failed, " in told.out
    assert "sync_period=3-seed1: failed, exit status 1: error: three does not work" in told.out
    assert "4 of 6 runs failed" in told.err and (out / "compare.html").is_file()
    assert sweep.main(arguments) == 1  # finished runs are not started again
    events = (tmp_path / "events").read_text().splitlines()
    wanted = [f"{x} sync_period=1-seed{seed}" for seed in (0, 1) for x in ("begin", "end")]
    assert [x for x in events if "=1" in x] == wanted
