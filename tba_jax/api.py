# SPDX-License-Identifier: Apache-2.0
"""Training from Python, in a script or a notebook: the names that `tba_jax` exports.

The functions work like the main command, without its flags, exit codes and signals: errors are
raised, and a process may call them several times. Importing this module does not load JAX.
"""

import contextlib
import dataclasses
import difflib
import io
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba_jax.config import methods, presets
from tba_jax.config.command_line import local_folder
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config, replace, unflatten
from tba_jax.devices.platform import prepare_process
from tba_jax.report import files
from tba_jax.report.jsonl import read_jsonl
from tba_jax.settings import ConfigError, given_names, importable_name

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from tba_jax.flow.trajectory import Trajectory
    from tba_jax.models.tokenizer import Tokenizer
    from tba_jax.models.transformer import TransformerConfig


def load_config(name: str, /, **overrides: Any) -> Config:
    """Return the config of a preset or file with some fields changed, checked as by the command.

        load_config("math")
        load_config("math:gsm8k", num_steps=20, search={"top_p": 0.9})

    Args:
        name: value of `--config`, such as math, math:gsm8k or path/to/file.py:preset.
        overrides: values by field name. The fields of a section are a mapping, as in presets.

    Returns:
        A frozen config: `config.search.top_p`. docs/config.md describes each field.

    Raises:
        ConfigError: a preset or field does not exist (with the nearest name), or values conflict.
    """
    config = methods.replace(presets.load(name), files.flat(overrides))
    validate(config)
    return config


def run_training(
    config: Config,
    workdir: str | os.PathLike[str],
    *,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
    objective: Any = None,
    callbacks: Sequence[Callable[..., Any]] = (),
    in_process: bool = False,
) -> dict[str, Any]:
    """Train in this process: begin a run, or continue the one in the work directory.

    A finished run is not repeated. An interrupt (Ctrl-C, the stop button of a notebook) saves the
    run after the current step and then raises; the same call continues the run. A script that calls
    this function needs `if __name__ == "__main__":`, because reward processes import the script.

    Args:
        config: return value of `load_config`.
        workdir: folder to create, or the folder of a run with exactly this config.

    Returns:
        Contents of report.json: `report["eval"]["before"]`, `["after"]`, times, counts, ...

    Raises:
        ConfigError: the config cannot run on this machine. UserError: the folder has another run.
        KeyboardInterrupt: the run was interrupted, and is saved.
    """
    from tba_jax.commands.interruption import Interruption, surviving_closed_outputs
    from tba_jax.planning.choices import choose, lines
    from tba_jax.run.run import train
    from tba_jax.run.workdir import begun_config

    if config.placement == "hosts":
        raise ConfigError(
            "config.placement = 'hosts': needs a process per host, and this is one process. Run "
            "`python -m tba_jax.main` on every host, or set another placement"
        )
    if config.placement == "fleet" and (callbacks or in_process):
        raise ConfigError(
            "config.placement = 'fleet': callbacks and in_process=True have no effect on its other "
            "processes. Import the reward from a file, or set another placement"
        )
    config = _with_given(config, reward, objective, in_process)
    validate(config)
    workdir = local_folder(workdir, "workdir")
    prepare_process()
    config = choose(config, begun_config(workdir))
    validate(config)
    for line in lines(config):
        print(line)
    # Python handles signals in the main thread only; in another thread no signal stops a run.
    is_main = threading.current_thread() is threading.main_thread()
    stop = Interruption([signal.SIGINT] if is_main else [], second=signal.default_int_handler)
    with contextlib.closing(stop), surviving_closed_outputs():
        report = train(config, workdir, interrupted=stop, callbacks=callbacks)
    assert report is not None, "this process trains"
    if report["steps"] < config.num_steps:
        raise KeyboardInterrupt(
            f"stopped at step {report['steps']} of {config.num_steps}; the run is saved in "
            f"{workdir}. Call the function again to continue"
        )
    return report


def _with_given(config: Config, reward: Any, objective: Any, in_process: bool) -> Config:
    """Return the config with the names of the caller's rewards and objective."""
    rewards = [reward] if callable(reward) else list(reward)
    names = given_names(rewards) if in_process else [importable_name(f) for f in rewards]
    if "" in names:
        raise ConfigError(
            f"reward={rewards[names.index('')]!r:.80}: reward processes cannot import it. Define "
            "it in a file and import it from there. Or give in_process=True to run it in this "
            "process, without a deadline for a call that hangs"
        )
    fields = {"task.reward": ",".join(names)} if names else {}
    if objective is not None:
        (fields["objective.name"],) = given_names([objective])
    return replace(config, fields)


def load_run(workdir: str | os.PathLike[str]) -> "SavedRun":
    """Return the files of a run, finished or not, to read them.

    Raises:
        ValueError: the folder has no run.
    """
    from tba_jax.run.workdir import run_folder

    return SavedRun(files.load_run(run_folder(workdir, "workdir")))


@dataclasses.dataclass(frozen=True)
class Policy:
    """The policy of a checkpoint, after `step` optimiser steps.

    The parameters have stacked layers, sharded over the devices of this machine.
    """

    step: int
    config: "TransformerConfig"
    params: Any = dataclasses.field(repr=False)
    tokenizer: "Tokenizer" = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, repr=False)
class SavedRun:
    """Files of a run in its work directory; `load_run` returns it."""

    _files: files.Run

    def __repr__(self) -> str:
        from tba_jax.report.page import headline

        return f"{self.workdir}: {headline(self._files)}"

    @property
    def workdir(self) -> Path:
        return self._files.workdir

    @property
    def config(self) -> Config:
        return unflatten(self._files.config)

    @property
    def report(self) -> Mapping[str, Any]:
        """Contents of report.json; {} if the run has not written it yet."""
        return self._files.report

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl at this moment: one dictionary per step, metrics by name."""
        return read_jsonl(self.workdir / "metrics.jsonl")

    def column(self, name: str) -> "tuple[np.ndarray, np.ndarray]":
        """Return the steps at which a metric was written, and the values at these steps.

        Raises:
            ValueError: no line has the metric; the error lists the nearest names.
        """
        known = self._files.metrics.names
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
            raise ValueError(f"no metric {name!r} in {self.workdir}; similar: {', '.join(near)}")
        return self._files.metrics.column("step", name)

    @property
    def plots(self) -> tuple[str, ...]:
        """Valid names for `plot`."""
        from tba_jax.report.figures import FIGURES

        return tuple(FIGURES)

    def plot(self, name: str, *, dpi: int = 110) -> "Image":
        """Return a figure of the report, which a notebook displays as the value of a cell.

        Raises:
            ValueError: there is no such figure, or the run has no data for it.
        """
        from PIL import Image

        from tba_jax.report.figures import FIGURES, to_png

        if name not in FIGURES:
            raise ValueError(f"no plot {name!r}; there are {', '.join(FIGURES)}")
        if (figure := FIGURES[name](self._files)) is None:
            raise ValueError(f"{self.workdir} has no data for the plot {name!r} yet")
        return Image.open(io.BytesIO(to_png(figure, dpi)))

    def buffer(self) -> "dict[str, list[Trajectory]]":
        """Return the responses in the replay buffer of the newest checkpoint, by prompt.

        Raises:
            CheckpointError: there is no readable checkpoint.
        """
        from tba_jax.replay.records import from_snapshot
        from tba_jax.run.checkpoint import load_host_state

        prompts, packed, packer = from_snapshot(*load_host_state(str(self.workdir))[1]["buffer"])
        return {
            prompt.text: [packer.unpack(y) for y in own]
            for prompt, own in zip(prompts, packed, strict=True)
        }

    def load_policy(self) -> Policy:
        """Return the policy of the newest checkpoint; adapters are merged.

        Raises:
            ValueError, CheckpointError: there is no readable checkpoint.
        """
        from tba_jax.commands.saved import load_policy
        from tba_jax.models.tokenizer import Tokenizer

        step, config, params, _, folder, _ = load_policy(str(self.workdir))
        return Policy(step, config, params, Tokenizer.load(folder))
