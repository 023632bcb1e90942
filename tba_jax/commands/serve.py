# SPDX-License-Identifier: Apache-2.0
"""Command: serve a model over HTTP, to OpenAI clients and to training clients.

    python -m tba_jax.serve --model=FOLDER
    python -m tba_jax.serve --workdir=RUN --port=8000 --token=SECRET

The server listens on the loopback interface. With --host it listens on another interface, and
--token is required. See docs/guide/serve.md.
"""

import argparse
import ipaddress
import signal
import socket
from collections.abc import Sequence
from typing import Any

from tba_jax.commands.entry_point import make_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command until SIGINT or SIGTERM; return the exit code."""
    parser = make_parser("serve", __doc__)
    add = parser.add_argument
    add("--model", default="", help="folder or Hugging Face hub id")
    add("--workdir", default="", help="run whose newest checkpoint is served")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8000, help="port to listen on; 0: any free port")
    add("--token", default="", help="bearer token that requests must carry")
    add("--renderer", default="", help="chat and tool format of the library renderers")
    add("--chat", default="", help="options of the chat template, as task.chat; empty: the run's")
    add("--num_slots", type=int, default=64, help="responses decoded at a time")
    add("--max_length", type=int, default=0, help="tokens of prompt and response; 0: up to 4096")
    args = parser.parse_args(argv)
    _check(args)
    # Imported here, so that --help and wrong flags answer at once.
    from tba_jax.remote.http_server import bind

    try:
        bound = bind(args.host, args.port)
    except OSError as error:
        raise ValueError(
            f"--port={args.port}: cannot listen on {args.host} ({error}). Give a free port, or 0"
        ) from error
    with bound:
        return _serve_on(bound, args)


def _serve_on(bound: socket.socket, args: argparse.Namespace) -> int:
    from tba_jax.commands.saved import decoding_site, load_run_config
    from tba_jax.decoding.engine import Decoder
    from tba_jax.devices.worker import StopFlag, Worker
    from tba_jax.models.tokenizer import Tokenizer
    from tba_jax.remote.http_server import HttpServer
    from tba_jax.serving.chat import Served, make_chat_format
    from tba_jax.serving.server import RequestQueue, make_application
    from tba_jax.tasks.config import template_options

    site, dtype = decoding_site()
    name = args.model or args.workdir
    config, params, folder, version = _load(args, dtype)
    tokenizer = Tokenizer.load(folder)
    longest = args.max_length or min(config.max_positions, 4096)
    decoder = Decoder(
        config,
        compute_dtype=dtype,
        eos_ids=tokenizer.eos_ids,
        pad_id=tokenizer.pad_id,
        prompt_tokens=longest,
        max_length=longest,
        site=site,
    )
    given = args.chat or (load_run_config(args.workdir).task.chat if args.workdir else True)
    chat = make_chat_format(tokenizer, args.renderer, template_options(given, "--chat"))
    served = Served(name, tokenizer, chat, tokenizer.eos_ids, longest)
    session = decoder.session(params, num_slots=args.num_slots, version=version)
    queue = RequestQueue(served)
    application = make_application(lambda episode: queue, served, token=args.token)
    stop = StopFlag()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    decoding = Worker("decoder", lambda: queue.step(session), stop, idle_s=0.002).start()
    server = HttpServer(application, "http-server", bound)
    host = f"[{args.host}]" if ":" in args.host else args.host
    print(f"serving {name} at http://{host}:{server.port}/v1", flush=True)
    while not stop.wait(0.5):
        pass
    server.close()
    decoding.join(60.0)
    stop.check()
    return 0


def _check(args: argparse.Namespace) -> None:
    """Check flags that need no model."""
    if bool(args.model) == bool(args.workdir):
        raise ValueError("give --model=FOLDER or --workdir=RUN, and not both")
    for name, least in {"num_slots": 1, "max_length": 0}.items():
        if (value := getattr(args, name)) < least:
            raise ValueError(f"--{name}={value}: must be at least {least}. Set --{name}={least}")
    try:
        is_loopback = args.host == "localhost" or ipaddress.ip_address(args.host).is_loopback
    except ValueError:  # another name
        is_loopback = False
    if not args.token and not is_loopback:
        raise ValueError(
            f"--host={args.host} is reachable from other machines. Add --token=SECRET, or "
            "use --host=127.0.0.1"
        )


def _load(args: argparse.Namespace, dtype: Any) -> tuple[Any, Any, str, int]:
    """Return architecture, weights, folder and weight version of the model."""
    if args.workdir:
        import jax

        from tba_jax.commands.saved import load_policy

        step, config, params, _, folder, _ = load_policy(args.workdir)
        device = jax.local_devices()[0]
        params = jax.tree.map(lambda x: jax.device_put(x, device).astype(dtype), params)
        return config, params, folder, step
    from tba_jax.models import model as models

    found = models.describe(args.model)
    return found.config, found.load_params(param_dtype=dtype), str(found.folder), 0
