# SPDX-License-Identifier: Apache-2.0
"""A language model, classifier or reward model of a Hugging Face folder or hub ID.

`load` returns architecture, weights and tokenizer; `describe` reads only config.json, for callers
that need the architecture before the weights are sharded, or no weights.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from tba_jax.models import lora
from tba_jax.models.hf import adapter_files, families, folders, hf_weights
from tba_jax.models.shardings import param_shardings
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import Params, TransformerConfig


class Model(NamedTuple):
    """Architecture, weights and tokenizer."""

    config: TransformerConfig
    params: Params
    tokenizer: Tokenizer


@dataclasses.dataclass(frozen=True)
class Description:
    """A model whose weights and tokenizer are not loaded yet.

    Attributes:
        folder: folder of the model on this machine.
        hf_config: contents of its config.json.
        config: architecture of the model.
        tokenizer: tokenizer of a language model; None for a classifier, and for a folder without
            tokenizer files.
        adapters: folder of adapters that are merged into the weights of `folder`; None: none.
    """

    folder: Path
    hf_config: dict[str, Any]
    config: TransformerConfig
    tokenizer: Tokenizer | None = None
    adapters: Path | None = None

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the model; raise ValueError as `Tokenizer.load`."""
        return self.tokenizer or Tokenizer.load(self.folder)

    def load_params(
        self, *, param_dtype: Any = jnp.float32, shardings: Params | None = None
    ) -> Params:
        """Load the weights, streamed from the files to the devices that store them.

        Args:
            param_dtype: storage dtype; the checkpoint is converted.
            shardings: sharding of each leaf; None: the default device.

        Raises:
            ValueError: as `hf_weights.load` and `adapter_files.read`.
        """
        params = hf_weights.load(self.folder, self.config, param_dtype, shardings)
        if self.adapters is None:
            return params
        config, adapters = adapter_files.read(self.adapters, self.config)
        return lora.merge(params, adapters, config=config)

    def load_on(self, mesh: Mesh, param_dtype: Any) -> Params:
        """Load the weights as `load_params`, divided over a mesh."""
        shardings = param_shardings(self.config, mesh)
        return self.load_params(param_dtype=param_dtype, shardings=shardings)


def describe(path_or_hub_id: str | os.PathLike[str], *, with_weights: bool = True) -> Description:
    """Return the description of a model, without its weights.

    Rows of the vocabulary that are no tokens of the tokenizer have probability 0.

    Args:
        path_or_hub_id: a folder with config.json, or with adapters in the format of peft; a hub
            ID, or embedded:NAME.
        with_weights: whether to download the weights of a hub ID, too.

    Raises:
        ValueError: no such model, a setting that is not implemented, or a damaged tokenizer.
    """
    folder = folders.resolve(path_or_hub_id, with_weights=with_weights)
    if (settings := folder / folders.ADAPTER_SETTINGS).is_file():
        base = str(folders.read_json(settings).get("base_model_name_or_path"))
        found = describe(base, with_weights=with_weights)
        return dataclasses.replace(found, adapters=folder)
    hf_config = families.language_model(folders.load_config(folder))
    config = families.transformer_config(hf_config)
    if config.num_labels or not (folder / "tokenizer.json").is_file():
        return Description(folder, hf_config, config)
    tokenizer = Tokenizer.load(folder)
    if tokenizer.end < config.vocab_size:
        config = dataclasses.replace(config, num_tokens=tokenizer.end)
    return Description(folder, hf_config, config, tokenizer)


def load(path_or_hub_id: str | os.PathLike[str], *, param_dtype: Any = jnp.float32) -> Model:
    """Return a model with its weights on the default device.

    Args:
        path_or_hub_id: as in `describe`.
        param_dtype: storage dtype.

    Raises:
        ValueError: no such model, or a damaged model.
    """
    found = describe(path_or_hub_id)
    params = found.load_params(param_dtype=param_dtype)
    return Model(found.config, params, found.load_tokenizer())
