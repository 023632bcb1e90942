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
        A sentence: what was saved, or why nothing was.
    """
    shared, step = run.shared, run.trainer.step_index
    if shared.workdir.exists():
        return "Nothing was written"
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
