# SPDX-License-Identifier: Apache-2.0
"""Command: responses of a model to one prompt.

    python -m tba_jax.generate --model=DIR_OR_HUB_ID --prompt="Once upon a time" --temperature=0

With --json the last line of standard output is one object with `texts`.
"""

import argparse
import functools
import json
import sys
from collections.abc import Sequence

from tba_jax.commands.entry_point import make_parser
from tba_jax.report.words import shown


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = make_parser("generate", __doc__)
    add = parser.add_argument
    add("--model", default="embedded:start_model", help="folder or Hugging Face hub id")
    add("--prompt", required=True, help="text to continue")
    add("--max_new_tokens", type=int, default=64, help="response limit in tokens")
    add("--temperature", type=float, default=1.0, help="0: greedy")
    add("--top_p", type=float, default=1.0, help="share of the probability to keep")
    add("--top_k", type=int, default=0, help="number of tokens to keep; 0: all")
    add("--num_samples", type=int, default=1, help="responses to draw")
    add("--stop_string", action="append", help="text that ends a response; may be repeated")
    add("--seed", type=int, default=0, help="seed of the random numbers")
    add("--chat", nargs="?", const=True, default=False, help="chat template; as task.chat")
    add("--json", action="store_true", help="last line of output: a JSON object")
    args = parser.parse_args(argv)
    result = _generate(args)
    for text in result["texts"]:
        whole = f"{args.prompt}{text}"
        # Control characters would act on a terminal; a file gets the exact text.
        print(shown(whole) if sys.stdout.isatty() else whole)
    if args.json:
        print(json.dumps(result))
    return 0


def _generate(args: argparse.Namespace) -> dict:
    # Imported here, so that --help and wrong flags answer at once.
    import jax

    from tba_jax.commands.saved import decoding_site
    from tba_jax.decoding.engine import Decoder
    from tba_jax.decoding.requests import SamplingSettings, StopStrings
    from tba_jax.models import model as models
    from tba_jax.tasks.config import template_options

    site, dtype = decoding_site()
    config, params, tokenizer = models.load(args.model, param_dtype=dtype)
    chat = [{"role": "user", "content": args.prompt}]
    options = template_options(args.chat, "--chat")
    text = tokenizer.format_chat(chat, variables=options) if args.chat else args.prompt
    prompt = tokenizer.encode(text, add_bos=not args.chat)
    decoder = Decoder(
        config,
        compute_dtype=dtype,
        eos_ids=tokenizer.eos_ids,
        pad_id=tokenizer.pad_id,
        prompt_tokens=len(prompt),
        max_length=len(prompt) + args.max_new_tokens,
        site=site,
    )
    if args.stop_string:
        text_of = functools.partial(tokenizer.decode, skip_special=False)
        decoder.stop_strings = StopStrings(args.stop_string, text_of)
    (decoded,) = decoder.decode(
        params,
        [prompt],
        num_samples=args.num_samples,
        key=jax.random.key(args.seed),
        settings=SamplingSettings(
            args.max_new_tokens, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k
        ),
    )
    return {
        "texts": tokenizer.batch_decode([y.tokens for y in decoded]),
        "num_tokens": [len(y.tokens) for y in decoded],
        "logprobs": [float(y.token_logprobs.sum()) for y in decoded],
        "has_eos": [y.has_eos for y in decoded],
    }
