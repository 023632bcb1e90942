# SPDX-License-Identifier: Apache-2.0
"""A benchmark's result says which command it is of; what cannot be measured is one line."""

import argparse
import datetime
import json

from tba_jax.bench import reporting


def parser():
    made = argparse.ArgumentParser(prog="python -m tba_jax.bench.sums")
    reporting.add_process_flags(made)
    return made


def table(result):
    return [f"total {result['total']}"]


def test_a_result_carries_its_command_and_date(capsys):
    argv = ["--repeats=4", "--dtype=bfloat16", "--json"]
    code = reporting.run_command(parser(), argv, lambda args: {"total": 2 * args.repeats}, table)
    first, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert (code, first, result["total"]) == (0, "total 8", 8)
    assert result["command"] == "python -m tba_jax.bench.sums --repeats=4 --dtype=bfloat16 --json"
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(result["date"])
    assert abs(age.total_seconds()) < 60
