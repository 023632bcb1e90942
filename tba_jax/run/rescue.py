# SPDX-License-Identifier: Apache-2.0
"""What can be saved when the work directory of a run is gone: its state, which is in memory.

It does not bring back logs, and writes nothing where another process holds the directory.
"""

from tba_jax.run.checkpoint import CheckpointError, Checkpoints
from tba_jax.run.errors import UserError
from tba_jax.run.run import Run
from tba_jax.run.workdir import begin_run


def rescue(run: Run) -> str:
    """Write config.json and a checkpoint of a run that stands still, where its directory was.

    Args:
        run: aborted; between two steps.

    Returns:
        One or two sentences: what was saved, or where the last log lines are.
    """
    shared, step = run.shared, run.trainer.step_index
    if shared.workdir.exists():
        names = " and ".join(run.logs.replaced())
        lines = "it drops the log lines of these steps"
        if names:
            lines = (
                f"it has replaced {names} by copies, so that the last lines of this process are in "
                "no log"
            )
        return (
            f"This process ends at step {step}. The other process continues from the newest "
            f"checkpoint and makes later steps again; {lines}"
        )
    if shared.cluster.num_processes > 1:
        return "Run the same command in another work directory to begin again"
    config = shared.config
    try:
        begin_run(shared.workdir, config, shared.facts.run_id)
        checkpoints = Checkpoints(
            str(shared.workdir / "checkpoints"),
            keep=config.checkpoint.keep,
            timeout_s=config.checkpoint.timeout_s,
        )
        checkpoints.save(step, run.trainer.state, run.host_state())
        checkpoints.close()
    except (UserError, CheckpointError) as error:
        return f"Saving its state there again failed: {error}"
    return (
        f"Its state at step {step} was saved there again, and the same command continues; the "
        "logs until then are lost"
    )
