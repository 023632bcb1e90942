# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: frequencies, scalings, and the rotation.

Invariant: dimensions i and i + width / 2 of the rotated part of a head are rotated as a pair (the
halves convention of Hugging Face checkpoints); the other dimensions do not change.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

Rope = tuple[Float32[Array, "*b f"], Float32[Array, "*b f"]]  # cosines and sines, f = width / 2


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Scaling of Llama 3.1: only wavelengths that are long for the original context are stretched.

    Attributes:
        factor: stretch of the longest wavelengths.
        low_freq_factor: wavelengths above original_max_positions / low_freq_factor are fully
            stretched.
        high_freq_factor: wavelengths below original_max_positions / high_freq_factor are unchanged.
        original_max_positions: context before the extension, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): a ramp over dimensions between stretched and plain frequencies.

    Attributes:
        factor: stretch of the slow dimensions.
        original_max_positions: context before the extension, in tokens.
        attention_factor: number that multiplies cosines and sines, and thereby queries and keys.
        beta_fast: number of rotations in the original context above which a dimension is unchanged.
        beta_slow: number of rotations below which a dimension is fully stretched.
        truncate: whether to round the ends of the ramp outwards to whole dimensions.
    """

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


Scaling = LinearScaling | Llama3Scaling | YarnScaling


def frequencies(dim: int, theta: float, scaling: Scaling | None) -> Float32[np.ndarray, " f"]:
    """Return the angle per position of each rotated pair.

    Args:
        dim: number of rotated dimensions of a head; an odd number is rounded up.
        theta: base of the geometric series.
        scaling: context extension, or None.
    """
    # Rounded at the same points as in transformers: at position 10^5 one unit in the last place of
    # a frequency is an angle of 0.01.
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    period = (theta ** exponent.astype(np.float64)).astype(np.float32)
    plain = np.float32(1) / period
    match scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / np.float32(factor)
        case Llama3Scaling():
            wavelength = 2 * np.pi / plain
            long = wavelength > scaling.original_max_positions / scaling.low_freq_factor
            short = wavelength < scaling.original_max_positions / scaling.high_freq_factor
            smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            between = (1 - smooth) * plain / scaling.factor + smooth * plain
            stretched = np.where(long, plain / scaling.factor, plain)
            return np.where(long | short, stretched, between).astype(np.float32)
        case YarnScaling():
            low, high = (
                dim
                * math.log(scaling.original_max_positions / (turns * 2 * math.pi))
                / (2 * math.log(theta))
                for turns in (scaling.beta_fast, scaling.beta_slow)
            )
            if scaling.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            high += 0.001 if low == high else 0.0  # avoids a division by zero
            ramp = np.clip((np.arange(len(plain)) - low) / (high - low), 0, 1)
            return (plain / scaling.factor * ramp + plain * (1 - ramp)).astype(np.float32)


def angles(positions: Int[Array, "*b"], dim: int, theta: float, scaling: Scaling | None) -> Rope:
    """Return cosines and sines at these positions; arguments as in `frequencies`."""
    frequency = jnp.asarray(frequencies(dim, theta, scaling))
    angle = positions[..., None].astype(jnp.float32) * jnp.broadcast_to(
        frequency, (*positions.shape, frequency.size)
    )
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if isinstance(scaling, YarnScaling):
        return cos * scaling.attention_factor, sin * scaling.attention_factor
    return cos, sin


def rotate(x: Float[Array, "*b n e"], rope: Rope) -> Float[Array, "*b n e"]:
    """Rotate every head of x by the angles of its position; in float32, or wider for wider x."""
    cos, sin = rope[0][..., None, :], rope[1][..., None, :]
    half = cos.shape[-1]
    a, b, rest = jnp.split(x, (half, 2 * half), axis=-1)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    a, b = a.astype(wide), b.astype(wide)
    turned = (a * cos - b * sin).astype(x.dtype), (b * cos + a * sin).astype(x.dtype)
    return jnp.concatenate([*turned, rest], axis=-1)
