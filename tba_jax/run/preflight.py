# SPDX-License-Identifier: Apache-2.0
"""All problems of a run together, before weights are read.

They are listed with --dry_run, and when a run meets its first one.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from tba_jax.config.command_line import usable_part
from tba_jax.config.devices import validate_devices
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config, replace
from tba_jax.devices.placement import MODES
from tba_jax.models.hf import folders
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.rewards.kinds import KINDS, kind_of
from tba_jax.rewards.pool import RewardFailure, RewardPool
from tba_jax.run.errors import UserError
from tba_jax.run.model_parts import describe_model, longest_sequence, policy_config
from tba_jax.run.peers import start_cluster
from tba_jax.run.shared import first_row, make_server, make_task
from tba_jax.search.prompts import text_of
from tba_jax.settings import ConfigError, listed
from tba_jax.tasks.registry import Task, entry_of

T = TypeVar("T")


@contextlib.contextmanager
def all_problems(config: Config) -> Iterator[None]:
    """If the block fails because of user input, raise all problems of the input together.

    Raises:
        UserError: all problems, if `problems` finds any. Else the failure itself.
    """
    try:
        yield
    except (ValueError, RewardFailure, UserError) as error:
        if found := problems(config):
            raise UserError(listed(found)) from error
        raise


def command_problems(argv: Sequence[str]) -> list[str]:
    """Return the errors in a command's settings, and in the files and models that they name.

    Args:
        argv: program name and arguments.
    """
    config, found = usable_part(argv)
    return found if config is None else [*found, *problems(config)]


def problems(config: Config) -> list[str]:
    """Return what is wrong with config, data, model, reward, devices and packages, one line each.

    Weights are not read. Reward functions are tried on one row, each in a process of its own.

    Args:
        config: not necessarily valid.
    """
    found = _Found()
    found.attempt(lambda: validate(config))
    task = None
    if not found.mentions("task.name", "task.data_path", "task.columns", "task.num_eval_prompts"):
        task = found.attempt(lambda: _open_task(config))
    tokenizer = found.attempt(lambda: _open_model(config))
    if task is not None and tokenizer is not None:
        found.attempt(lambda: text_of(task, tokenizer, "train", 0))
    if not found.mentions("task.name", "task.reward"):
        for function in functions(config):
            found.attempt(lambda function=function: try_reward(config, function, task))
        found.attempt(lambda: _find_reward_models(config))
    if not found.mentions("mesh", "num_searchers", "search.num_devices", "placement"):
        found.attempt(lambda: _check_devices(config))
    found.attempt(lambda: _check_packages(config))
    return list(found.lines)


class _Found:
    """Problems, in the order in which they were found."""

    def __init__(self) -> None:
        self.lines: dict[str, None] = {}

    def attempt(self, step: Callable[[], T]) -> T | None:
        """Return the result of a check; if it fails, record its error and return None."""
        try:
            return step()
        except ConfigError as error:
            self.lines.update(dict.fromkeys(map(str, error.args)))
        except (ValueError, RewardFailure, OSError, UserError) as error:
            self.lines[str(error)] = None
        return None

    def mentions(self, *names: str) -> bool:
        """Return whether one of these settings is a problem already."""
        return any(line.startswith(f"config.{name} ") for line in self.lines for name in names)


def _open_task(config: Config) -> Task:
    if not config.task.max_prompt_tokens:  # then the number of held-out rows is chosen, too
        config = replace(config, {"task.num_eval_prompts": 1})
    task = make_task(config)
    task.train_size()
    first_row(task)
    return task


def _open_model(config: Config) -> Tokenizer:
    model = describe_model(config, with_weights=False)
    policy = policy_config(config, model.config)
    if config.task.max_prompt_tokens:
        longest_sequence(config, model.config)
    tokenizer = model.load_tokenizer()
    if policy.adapters is not None:
        server = make_server(config, policy, tokenizer, Path())
        if server is not None:
            server.check()
    return tokenizer


def functions(config: Config) -> list[str]:
    """Return the reward functions, each by its name."""
    own = "" if config.reward.model_path else entry_of(config.task.name).task.reward
    named = config.task.reward or own
    if named in KINDS:
        return []
    return [part.strip() for part in f"{named},{config.eval.gold_reward}".split(",") if part]


def try_reward(config: Config, function: str, task: Task | None) -> None:
    """Load a reward function in a separate process, and try it on a row of the task.

    Raises:
        ValueError, RewardFailure: the function cannot be used.
    """
    pool = RewardPool(
        function,
        num_workers=1,
        timeout_s=config.reward.timeout_s,
        max_failure_rate=1.0,
        row=None if task is None else first_row(task),
    )
    try:
        pool.check()
    finally:
        pool.close()


def _find_reward_models(config: Config) -> None:
    own = entry_of(config.task.name).task.reward
    kind = kind_of(config, config.task.reward, own, config.task.name)
    for path in (*kind.models(config).values(), config.eval.gold_model):
        if path:
            folders.load_config(folders.resolve(path, with_weights=False))


def _check_devices(config: Config) -> None:
    if MODES[config.placement].spans_hosts:
        return  # the other hosts are not there to be counted
    start_cluster(config)
    import jax

    validate_devices(config, len(jax.local_devices()))


def _check_packages(config: Config) -> None:
    wanted = {
        "log.tensorboard": ("tensorboardX", "tensorboard", config.log.tensorboard),
        "log.wandb_project": ("wandb", "wandb", bool(config.log.wandb_project)),
        "placement=fleet": ("ray", "fleet", MODES[config.placement].searches_elsewhere),
    }
    missing = [
        f"{setting} needs the package {package}: pip install 'tba_jax[{extra}]'"
        for setting, (package, extra, is_set) in wanted.items()
        if is_set and importlib.util.find_spec(package) is None
    ]
    if missing:
        raise ConfigError(*missing)
