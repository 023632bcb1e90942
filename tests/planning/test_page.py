# SPDX-License-Identifier: Apache-2.0
"""The page of plans has a row for each run and slice, and keeps rows that are not planned again."""

import contextlib
import io
import json

from tba_jax.planning import page


def plan_of(rows, fits):
    step = {"hbm_gib": {"temporaries": 3.0}, "roofline_s": 0.5, "bound": "compute", "failure": ""}
    memory = {"peak_gib": 20.0, "capacity_gib": 16.0, "over_gib": 0.0 if fits else 4.0}
    facts = {
        "fits": fits,
        "placement": {
            "layout": "split",
            "trainer_mesh": "data 1 x fsdp 4 x model 1",
            "searcher_groups": 4,
            "searcher_devices": 1,
            "fields": {"batch.micro_batch_rows": rows, "placement": "split"},
        },
        "programs": {"train_step": step, "decode_chunk": {"roofline_s": 0.01}},
        "memory": {"trainer": memory},
        "balance": {"steps_per_hour": 1200.0},
    }

    def plan(argv):
        assert "--json" in argv
        if "--programs=train_step" in argv:  # with the preset's rows
            assert argv[-2] in {f"--config.batch.micro_batch_rows={n}" for n in (8, 64)}
            print(json.dumps(facts | {"programs": {"train_step": step | {"roofline_s": 2.0}}}))
            return 0
        print("heading")
        print(json.dumps(facts))
        return 0 if fits else 1

    return plan


def test_rows_are_written_and_kept(tmp_path):
    path = tmp_path / "plans.md"
    assert page.write(path, ["math:gsm8k", "math:math"], ["h100:8"], plan_of(16, True)) == 0
    assert page.write(path, ["math:math"], ["h100:8"], plan_of(8, False)) == 1
    lines = [line for line in path.read_text().splitlines() if line.startswith("| `math")]
    assert len(lines) == 2
    assert "rows=16" in lines[0] and lines[0].endswith("| fits |")
    assert "split, fsdp 4, 4 x 1 | `batch.micro_batch_rows=8` | 20.0 of 16.0 | 3.0" in lines[1]
    own = "64: 2 s, does not fit"
    assert lines[1].endswith(f"| 500 ms, compute | {own} | 10 ms | 1,200 | over by 4.0 |")
    assert "| 8: 2 s |" in lines[0]


def test_a_run_that_cannot_be_planned_has_a_row(tmp_path):
    path = tmp_path / "plans.md"
    assert page.write(path, ["math:math"], ["h100:1"], lambda argv: 2) == 1
    assert "| `math:math` | `h100:1` |" in path.read_text() and "no plan |" in path.read_text()
    page.write(path, ["math:math"], ["h100:1"], plan_of(8, True))
    assert "no plan" not in path.read_text()


def test_a_step_that_did_not_compile_has_no_figures_and_rows_are_sorted(tmp_path):
    def plan(argv):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            plan_of(16, False)(argv)
        facts = json.loads(printed.getvalue().splitlines()[-1])
        facts["programs"]["train_step"] |= {
            "hbm_gib": {},
            "roofline_s": 0.0,
            "failure": "too large",
        }
        print(json.dumps(facts))
        return 1

    path = tmp_path / "plans.md"
    page.write(path, ["tldr:pythia410m", "math:gsm8k"], ["v5e:2x4", "h100:1"], plan)
    lines = [line for line in path.read_text().splitlines() if line.startswith("| `")]
    assert lines == sorted(lines) and len(lines) == 4
    assert all("20.0 of 16.0 |  |  |" in line and "nan" not in line for line in lines)
    assert all("| 8: does not fit |" in line for line in lines if "gsm8k" in line)
