# SPDX-License-Identifier: Apache-2.0
"""Parts of `bench.accelerator` that no other command measures.

python -m tba_jax.bench.accelerator_probe device|parity|memory [--dry_run]

device: versions, devices and measured rates. parity: log-probs, gradients and decoding on the
device, compared with CPU. memory: a program's memory as estimated by the compiler, compared with
the memory measured after the program has run. The last line of output is a JSON object.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.bench.processes import versions
from tba_jax.bench.reporting import make_parser
from tba_jax.config.command_line import override
from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.devices.platform import platform_of, take_gpu_memory
from tba_jax.devices.site import any_device
from tba_jax.models.hf import config_json
from tba_jax.models.logprobs import packed_token_logprobs, token_logprobs
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.transformer import TransformerConfig, init_params
from tba_jax.planning import layouts, roofline
from tba_jax.planning.programs import Planned, plan_programs
from tba_jax.planning.shapes import config_of
from tba_jax.run.model_parts import model_path

_SHAPE = TransformerConfig(
    vocab_size=4096,
    hidden_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    mlp_size=1024,
)
_TINY = dataclasses.replace(
    _SHAPE, vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, head_dim=16, mlp_size=32
)
_ROWS, _PROMPT, _RESPONSE = 4, 96, 32
# Limit of the norm of the difference divided by the norm. A float32 product on tensor cores keeps
# 10 bits of its factors, bfloat16 keeps 7.
_TOLERANCE = {"float32": 0.005, "bfloat16": 0.05}


def device(is_dry: bool) -> dict[str, Any]:
    """Return versions, devices and measured rates of the first device."""
    found = jax.local_devices()
    names = ("jax", "jaxlib", "flax", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
    rates = roofline.measure_rates("bfloat16", 2**24 if is_dry else 2**32)
    return {
        "versions": versions(*names),
        "platform": platform_of(found[0]),
        "platform_version": found[0].client.platform_version,
        "device": found[0].device_kind,
        "num_devices": len(found),
        "memory_bytes": (found[0].memory_stats() or {}).get("bytes_limit"),
        "bytes_per_s": rates.bytes_per_s,
        "bfloat16_flops_per_s": rates.flops_per_s,
    }


def parity(is_dry: bool) -> dict[str, Any]:
    """Compare every computation of a run at a small shape on the device with CPU in float32.

    Raises:
        ValueError: results differ by more than rounding; the message names them.
    """
    config = _TINY if is_dry else _SHAPE
    here, cpu = jax.local_devices()[0], jax.local_devices(backend="cpu")[0]
    with jax.default_device(cpu):
        params = init_params(config, jax.random.key(0), jnp.float32)
    wanted = _outputs(config, params, "float32", cpu)
    found: dict[str, Any] = {}
    for dtype in ("bfloat16",) if is_dry else _TOLERANCE:
        for name, value in _outputs(config, params, dtype, here).items():
            found[f"{name}.{dtype}"] = _difference(value, wanted[name])
    found["decoding.float32"] = _decoding_error(config, params, here, cpu)
    far = [n for n, x in found.items() if not x <= _TOLERANCE[n.rsplit(".", 1)[1]]]
    if far:
        raise ValueError(f"{', '.join(far)} differ from CPU: {json.dumps(found)}")
    return {"device": here.device_kind, "difference_over_norm": found}


def _difference(value: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(value - wanted) / np.linalg.norm(wanted))


def _outputs(
    config: TransformerConfig, params: Any, dtype: str, where: Any
) -> dict[str, np.ndarray]:
    """Return log-probs of padded and packed rows, and the gradients of both, as float32."""
    rng = np.random.default_rng(0)
    length = _PROMPT + _RESPONSE
    tokens = rng.integers(0, config.vocab_size, (_ROWS, length)).astype(np.int32)
    index = np.arange(length)
    lengths = (
        np.arange(_PROMPT, 0, -_PROMPT // _ROWS)[:_ROWS, None].astype(np.int32),
        np.full((_ROWS, 1), _RESPONSE - 1, np.int32),
    )
    segments = np.broadcast_to(1 + (index >= length // 2), tokens.shape).astype(np.int32)
    positions = np.broadcast_to(index % (length // 2), tokens.shape).astype(np.int32)
    options: Any = {
        "config": config,
        "scoring": Scoring(compute_dtype=dtype),
        "sharding": ComputeSharding(config, any_device(platform_of(where))),
    }

    def padded(params: Any, tokens: Any, *rows: Any) -> Any:
        return token_logprobs(params, tokens[:, None], *rows, response_bucket=_RESPONSE, **options)[
            :, 0
        ]

    packed = functools.partial(packed_token_logprobs, **options)
    out = {}
    with jax.default_device(where):
        own = jax.device_put(params, where)
        for name, score, rows in (
            ("padded", padded, (tokens, *lengths)),
            ("packed", packed, (tokens, segments, positions)),
        ):

            def loss(params: Any, score: Callable[..., Any] = score, rows: Any = rows) -> Any:
                logprobs = score(params, *rows)
                return jnp.sum(logprobs), logprobs

            grads, out[f"{name}.logprobs"] = jax.jit(jax.grad(loss, has_aux=True))(own)
            out[f"{name}.gradient"] = jnp.concatenate(
                [x.astype(jnp.float32).reshape(-1) for x in jax.tree.leaves(grads)]
            )
    return {name: np.asarray(x, np.float32) for name, x in out.items()}


def _decoding_error(config: TransformerConfig, params: Any, here: Any, cpu: Any) -> float:
    """Return the difference between the decoder's log-probs and log-probs computed on CPU."""
    prompts = np.random.default_rng(1).integers(0, config.vocab_size, (_ROWS, _PROMPT))
    with jax.default_device(here):
        decoder = Decoder(
            config,
            compute_dtype=jnp.float32,
            eos_ids=(),
            pad_id=0,
            prompt_buckets=(_PROMPT,),
            max_length=_PROMPT + _RESPONSE,
            site=any_device(platform_of(here)),
        )
        decoded = decoder.decode(
            jax.device_put(params, here),
            list(prompts.astype(np.int32)),
            num_samples=2,
            key=jax.random.key(2),
            settings=SamplingSettings(_RESPONSE),
        )
    rows = np.concatenate(
        [np.broadcast_to(prompts[:, None], (_ROWS, 2, _PROMPT)), decoded.tokens], axis=2
    )
    with jax.default_device(cpu):
        score = functools.partial(
            token_logprobs, response_bucket=_RESPONSE, config=config, scoring=Scoring()
        )
        lengths = (np.full((_ROWS, 2), n, np.int32) for n in (_PROMPT, _RESPONSE))
        scored = jax.jit(score)(params, rows.astype(np.int32), *lengths)
    return _difference(np.asarray(decoded.token_logprobs), np.asarray(scored))


def memory(is_dry: bool) -> dict[str, Any]:
    """Return the estimated and the measured memory of a decode chunk and of a train step.

    The device reports the peak since the start of the process, so the smaller program runs first.
    """
    preset = "math:arithmetic" if is_dry else "math:gsm8k"
    devices = jax.local_devices()[:1]
    config = override(None, [f"--config={preset}", "--config.placement=shared"])
    config = dataclasses.replace(config, num_searchers=1)
    model_config = config_json.transformer_config(config_of(model_path(config)))
    placement = layouts.place(config, devices).placement
    planned = {p.name: p for p in plan_programs(config, model_config, placement)}
    return {
        "preset": preset,
        "device": devices[0].device_kind,
        "programs": {
            name: _measured(planned[name], devices[0]) for name in ("decode_chunk", "train_step")
        },
    }


def _measured(planned: Planned, where: Any) -> dict[str, Any]:
    lowered = planned.lower()
    compiled = lowered.compile()
    taken = compiled.memory_analysis()
    assert taken is not None, "this backend does not report the memory of compiled programs"
    arguments = jax.tree.map(
        lambda x, sharding: jax.device_put(jnp.zeros(x.shape, x.dtype), sharding),
        *_arguments(lowered, compiled),
    )
    jax.block_until_ready(compiled(*arguments))
    stats = where.memory_stats() or {}
    compiled_bytes = (
        taken.argument_size_in_bytes
        + taken.output_size_in_bytes
        - taken.alias_size_in_bytes
        + taken.temp_size_in_bytes
    )
    measured = stats.get("peak_bytes_in_use")
    return {
        "compiled_bytes": compiled_bytes,
        "measured_bytes": measured,
        "measured_over_compiled": measured / compiled_bytes if measured else None,
    }


def _arguments(lowered: Any, compiled: Any) -> tuple[Any, Any]:
    """Return (shapes of the positional arguments, their shardings)."""
    shapes, _ = lowered.args_info
    shardings, _ = compiled.input_shardings
    return shapes, shardings


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    parts = {"device": device, "parity": parity, "memory": memory}
    parser = make_parser("accelerator_probe", __doc__)
    parser.add_argument("part", choices=parts)
    parser.add_argument("--dry_run", action="store_true", help="run at tiny sizes")
    args = parser.parse_args(argv)
    take_gpu_memory()
    try:
        print(json.dumps(parts[args.part](args.dry_run)))
    except ValueError as error:
        print(f"accelerator_probe: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
