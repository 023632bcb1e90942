# SPDX-License-Identifier: Apache-2.0
"""A language model, classifier or reward model of a Hugging Face folder or hub ID.

`load` returns architecture, weights and tokenizer; `describe` reads only config.json, for callers
that need the architecture before the weights are sharded, or no weights.
"""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from tba_jax.models.hf import config_json, families, folders, hf_weights
from tba_jax.models.shardings import param_shardings
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import Params, TransformerConfig, abstract_params


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
    """

    folder: Path
    hf_config: dict[str, Any]
    config: TransformerConfig
    tokenizer: Tokenizer | None = None

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
            ValueError: as `hf_weights.read` and `hf_weights.check_tied`.
        """
        stored = hf_weights.open_folder(self.folder)
        if self.config.tie_embeddings and not self.config.num_labels:
            hf_weights.check_tied(stored, *families.tied_names(self.config))
        return hf_weights.read(
            stored,
            families.tensors(self.config, stored),
            abstract_params(self.config, param_dtype),
            shardings=shardings,
            family=self.config.family,
            aliases=functools.partial(families.aliases, config=self.config),
            is_spare=functools.partial(families.is_spare, config=self.config),
        )


def describe(path_or_hub_id: str | os.PathLike[str], *, with_weights: bool = True) -> Description:
    """Return the description of a model, without its weights.

    Rows of the vocabulary that are no tokens of the tokenizer have probability 0.

    Args:
        path_or_hub_id: a folder with config.json, a hub ID, or embedded:NAME.
        with_weights: whether to download the weights of a hub ID, too.

    Raises:
        ValueError: no such model, a setting that is not implemented, or a damaged tokenizer.
    """
    folder = folders.resolve(path_or_hub_id, with_weights=with_weights)
    hf_config = config_json.language_model(folders.load_config(folder))
    config = config_json.transformer_config(hf_config)
    if config.num_labels or not (folder / "tokenizer.json").is_file():
        return Description(folder, hf_config, config)
    tokenizer = Tokenizer.load(folder)
    if tokenizer.end < config.vocab_size:
        config = dataclasses.replace(config, num_tokens=tokenizer.end)
    return Description(folder, hf_config, config, tokenizer)


def load(
    path_or_hub_id: str | os.PathLike[str],
    *,
    param_dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
) -> Model:
    """Return a model with weights divided over a mesh.

    Args:
        path_or_hub_id: as in `describe`.
        param_dtype: storage dtype.
        mesh: mesh with any of the axes of `devices.sharding`; None: the default device.

    Raises:
        ValueError: no such model, a damaged model, or the mesh does not divide it.
    """
    found = describe(path_or_hub_id)
    shardings = None if mesh is None else param_shardings(found.config, mesh)
    params = found.load_params(param_dtype=param_dtype, shardings=shardings)
    return Model(found.config, params, found.load_tokenizer())
