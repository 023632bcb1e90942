# SPDX-License-Identifier: Apache-2.0
"""Checked reading of the settings of a Hugging Face config.json.

A setting that the models do not implement is refused by name; a setting that transformers does not
use at inference (dropout, initialiser range) is ignored.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from tba_jax.models import rope
from tba_jax.models.architecture import Activation, LayerKind

Values = Mapping[str, Any]
Fields = dict[str, Any]
"""Fields of TransformerConfig by name."""

_LAYER_TYPES: Mapping[str, LayerKind] = {
    "full_attention": "full",
    "sliding_attention": "window",
    "linear_attention": "delta",
}
# Four names of GELU mean one polynomial inside tanh.
_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh")
ACTIVATIONS: Mapping[str, Activation] = {
    **{"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu"},
    **dict.fromkeys(_TANH, "gelu_tanh"),
}
_ORIGINAL = "original_max_position_embeddings"


def unsupported(setting: str, got: Any, wanted: str) -> ValueError:
    """Return the error of a setting whose value the models do not implement."""
    return ValueError(
        f"config.json has {setting} = {got!r}, which this model does not implement (it covers: "
        f"{wanted}). Choose a checkpoint whose setting is covered"
    )


class Settings:
    """Settings of one config.json, read with checks.

    Args:
        values: contents of the file, or of an object in it.
        defaults: values of transformers for missing settings.
        inside: name of the object with a dot behind it; "": the file itself.
        family: model_type.
    """

    def __init__(
        self, values: Values, defaults: Values | None = None, inside: str = "", family: str = ""
    ) -> None:
        self.family, self._inside = family or str(values.get("model_type")), inside
        self._nulls = {name for name, value in values.items() if value is None}
        self._values = {**(defaults or {}), **{x: y for x, y in values.items() if y is not None}}

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a setting, not checked; null and missing are equal."""
        return self._values.get(name, default)

    def __call__(self, name: str, kind: type, default: Any = None) -> Any:
        """Return a setting, which is required unless there is a default.

        Args:
            kind: bool; int: at least 1; float: above 0.

        Raises:
            ValueError: the setting is missing or not of this kind.
        """
        value, shown = self.get(name, default), self._inside + name
        if value is None:
            raise ValueError(
                f"config.json of a {self.family} model lacks {shown}. Add it, as in the published "
                "config.json of the model"
            )
        is_number = isinstance(value, int if kind is int else int | float) and value is not True
        if isinstance(value, bool) if kind is bool else is_number and 0 < value < math.inf:
            return value
        words = {bool: "true or false", int: "a whole number above 0", float: "a number above 0"}
        raise ValueError(
            f"config.json has {shown} = {value!r:.60}; wanted {words[kind]}. Correct it, or "
            "download the file again"
        )

    def optional(self, name: str, kind: type = float) -> Any:
        """Return a setting; None if it is null, or missing and without default."""
        is_absent = name in self._nulls or name not in self._values
        return None if is_absent else self(name, kind)

    def choice(self, name: str, choices: Mapping[str, Any], default: Any = None) -> Any:
        """Return the value of a choice; raise ValueError for anything else."""
        if (value := self.get(name, default)) not in choices:
            raise unsupported(self._inside + name, value, ", ".join(choices))
        return choices[value]

    def only(self, **covered: Any) -> None:
        """Refuse a setting that has another value than the only supported one."""
        for name, value in covered.items():
            if self.get(name, value) != value:
                wanted = f"{json.dumps(value)} for {self.family}"
                raise unsupported(name, self.get(name), wanted)


def layers(s: Settings, pattern: tuple[LayerKind, ...]) -> Fields:
    """Return the fields of the kinds of layers.

    Args:
        pattern: kinds of layers of the family, repeated, if config.json does not list them.
    """
    num, types = s("num_hidden_layers", int), s.get("layer_types")
    window = s.optional("sliding_window", int) if "window" in pattern else None
    if types is None:
        if "window" in pattern and window is None:
            pattern = ("full",)
        # Older files of Gemma 3, and files of Qwen3.5.
        for setting in ("sliding_window_pattern", "full_attention_interval"):
            if len(pattern) > 1 and (period := s.get(setting)):
                pattern = (*pattern[:1] * (int(period) - 1), "full")
        kinds = [pattern[i % len(pattern)] for i in range(num)]
    else:
        known = [x for x, kind in _LAYER_TYPES.items() if kind in ("full", *pattern)]
        if unknown := [name for name in types if name not in known]:
            raise unsupported("layer_types", unknown[0], f"{', '.join(known)} for {s.family}")
        kinds = [_LAYER_TYPES[name] for name in types]
    if len(kinds) != num or ("window" in kinds and window is None):
        raise ValueError(
            f"config.json has layer_types of {len(kinds)} layers, num_hidden_layers = {num} and "
            f"sliding_window = {window}, which do not fit each other. Correct one of them"
        )
    # The shortest pattern that repeats.
    period = next(p for p in range(1, num + 1) if all(kinds[i] == kinds[i % p] for i in range(num)))
    window = window if "window" in kinds else 0
    return {"num_layers": num, "pattern": tuple(kinds[:period]), "window": window}


def rotary(
    s: Settings, *, default_fraction: float | None = None, window_theta: str | None = None
) -> Fields:
    """Return the fields of rotary positions; the settings may have either of two formats.

    `rope_parameters` is the format of transformers 5. Earlier versions have separate settings for
    base, scaling and rotated share. If a file has both scalings, transformers uses the earlier
    format.

    Args:
        default_fraction: share of a head that is rotated, without a setting; None: heads of the
            family are rotated whole.
        window_theta: earlier setting of the base in window layers. Such families have an entry per
            kind of layer in `rope_parameters`. None: window layers rotate as full layers do.
    """
    name = "rope_scaling" if s.get("rope_scaling") else "rope_parameters"
    of_full, of_windows = s.get(name, {}), {}
    if nested := [key for key, value in of_full.items() if isinstance(value, Mapping)]:
        if window_theta is None:
            raise unsupported(name, f"one entry per {', '.join(nested)}", "one for all layers")
        of_windows = of_full.get("sliding_attention") or {}
        of_full = of_full.get("full_attention") or {}
    share = s.get("partial_rotary_factor", default_fraction or 1.0)
    base = {"rope_theta": s.get("rope_theta", 10000.0), "partial_rotary_factor": share}
    full = Settings(of_full, base, f"{name}.", s.family)
    theta, share = full("rope_theta", float), full("partial_rotary_factor", float)
    if default_fraction is None and not math.isclose(share, 1.0):
        raise unsupported("partial_rotary_factor", share, f"1.0 for {s.family}")
    longest = s("max_position_embeddings", int)
    scaling = _scaling(full, int(s(_ORIGINAL, float, full.get(_ORIGINAL, longest))), longest)
    if isinstance(scaling, rope.YarnScaling):
        # Files of Qwen2.5 keep the context before the extension as max_position_embeddings.
        longest = max(longest, int(scaling.factor * scaling.original_max_positions))
    found = {
        "max_positions": longest,
        "rope_theta": float(theta),
        "rotary_fraction": float(share),
        "rope_scaling": scaling,
    }
    if window_theta is not None:
        base = {"rope_theta": s.get(window_theta, theta)}
        windows = Settings(of_windows, base, f"{name}.sliding_attention.", s.family)
        windows.choice("rope_type", {"default": None}, "default")
        of_window = float(windows("rope_theta", float))
        if scaling is not None or of_window != theta:
            found["window_rope_theta"] = of_window
    return found


def _scaling(s: Settings, original: int, longest: int) -> rope.Scaling | None:
    """Return the context extension.

    Args:
        s: rotary settings of full layers.
        original: context before the extension, in tokens.
        longest: max_position_embeddings.
    """
    kinds = {kind: kind for kind in ("default", "linear", "llama3", "yarn")}
    kind = s.choice("rope_type", kinds, s.get("type", "default"))
    if kind == "linear":
        return rope.LinearScaling(float(s("factor", float)))
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        factor, low, high = (float(s(name, float)) for name in names)
        return rope.Llama3Scaling(factor, low, high, original)
    if kind == "yarn":
        factor = float(s("factor", float, longest / original))
        # As in the paper, unless the file has both of the two weights, or the factor itself.
        stretch, attention = 0.1 * math.log(max(factor, 1.0)), s.get("attention_factor")
        above, below = s.get("mscale"), s.get("mscale_all_dim")
        if not (above and below):
            above, below = 1.0, 0.0
        return rope.YarnScaling(
            factor,
            original,
            attention_factor=attention or (1.0 + above * stretch) / (1.0 + below * stretch),
            beta_fast=float(s.get("beta_fast") or 32.0),  # some files have 0 in place of a default
            beta_slow=float(s.get("beta_slow") or 1.0),
            truncate=bool(s.get("truncate", True)),
        )
    return None
