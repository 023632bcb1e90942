# SPDX-License-Identifier: Apache-2.0
"""Base of the tasks of published data sets, which know the columns of their rows."""

from collections.abc import Mapping
from typing import Any

from tba_jax.tasks import rows
from tba_jax.tasks.custom import Custom
from tba_jax.tasks.task import Split


class RowTask(Custom):
    """Data in the form of a published data set; without a source, that data set from the hub.

    Attributes:
        text: prompt of a row, with the names of columns in braces.
        message: the user message that replaces the prompt in a chat.
        columns: columns of a row that are read; the last is the reward's column `answer`.
        hub: sources of the splits.
        hub_eval_split: name of the held-out split on the hub.
        is_disjoint: whether training problems of the hub are left out that are held out.
    """

    text: str
    message: str
    columns: tuple[str, ...]
    hub: Mapping[Split, str]
    hub_eval_split: rows.Split = "test"
    is_disjoint = False

    def __init__(self, settings: Any) -> None:
        super().__init__(settings, settings.data_path or self.hub["train"])
        if not settings.data_path:
            self._sets[0].test = self.hub["eval"], self.hub_eval_split
            self._sets[0].is_disjoint = self.is_disjoint

    def _read(self, row: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
        for column in self.columns:
            if not isinstance(row.get(column), str):
                got = f"{column} = {row.get(column)!r:.80}, of {', '.join(map(str, row))}"
                raise ValueError(
                    f"{where}: {got}; wanted text in column {column!r}. Correct the row"
                )
        form = self.message if self._chat else self.text
        return form.format(**row), {"answer": row[self.columns[-1]]}
