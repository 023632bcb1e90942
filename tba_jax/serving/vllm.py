# SPDX-License-Identifier: Apache-2.0
"""Client of an inference server with vLLM's routes, which samples the responses of a run.

The server receives prompts as token IDs. It returns token IDs, each with its log-prob and the name
of the weights that sampled it. A version of adapters has its own name, so a response has one
version. Without adapters the server pauses, reads a version from a folder, and resumes, so a
response may have several versions.

Names of failures: "server_down" (no response), "server_no_model" (the weights are not loaded),
"server_nonsense" (an unusable response) and "server_refused" (another status). Invariants: every
token has a finite log-prob and a version of this run. A failed request is repeated or ends the run.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tba_jax.decoding.requests import Response, SamplingSettings, Statistics, StopStrings
from tba_jax.devices.site import reading_mesh
from tba_jax.models import lora
from tba_jax.models.hf import adapter_files, hf_weights
from tba_jax.models.logprobs import Scoring, row_token_logprobs
from tba_jax.models.model import Description
from tba_jax.models.transformer import Params, TransformerConfig, abstract_params
from tba_jax.serving.failures import Failure, FailureLines

# Largest mean difference of the log-probs of a token in two programs in float32, in nats: each of
# about 10^4 sums rounds by 2^-24 of logits up to 30.
_ROUNDING = 1e-3
_NOISE = 0.5  # relative size of changes of all weights, so that each matrix has a clear effect
_CHECK_VERSION = -1  # version of the known weights that are loaded before training
_MOST_PAUSE_S = 30.0  # longest pause between two attempts
_STATUSES = {404: "server_no_model", 408: "server_down", 429: "server_down"}
_STEP_S = 0.02  # longest wait of a session's step
_START = (
    "Start it with vllm serve {} --enable-scale-out, for adapters with --enable-lora and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, for all weights with VLLM_SERVER_DEV_MODE=1"
)


@dataclasses.dataclass
class InferenceServer:
    """Thread-safe client, which all searchers of a process share.

    The environment variable OPENAI_API_KEY has the bearer token of a server that needs one.
    """

    url: str  # with or without /v1
    model: Description  # start model
    policy: TransformerConfig  # its architecture, with adapters if the run trains only adapters
    dtype: str  # name of the dtype of the run's matmuls and of written weights
    folder: Path  # parent of the folders of versions, which the server reads
    eos_ids: tuple[int, ...]  # tokens that end a response
    longest: int  # maximum number of tokens of prompt and response together
    timeout_s: float  # of an attempt, in seconds; attempts are repeated for twice that time
    stop_strings: StopStrings | None = None  # texts that end a response

    def __post_init__(self) -> None:
        import urllib3  # slow; other runs need no client

        self.failures = FailureLines(f"search.engine {self.url}")
        self._root = self.url.rstrip("/").removesuffix("/v1")
        key = os.environ.get("OPENAI_API_KEY")
        self._http = urllib3.PoolManager(
            maxsize=256,
            retries=False,
            headers={"authorization": f"Bearer {key}"} if key else None,
            timeout=urllib3.Timeout(connect=min(10.0, self.timeout_s), read=self.timeout_s),
        )
        self._no_response = urllib3.exceptions.HTTPError
        self._is_closed, self._loading, self._num_loads = threading.Event(), threading.Lock(), 0
        self._name = f"tba-{uuid.uuid4().hex[:8]}"
        self._base = ""  # name of the server's own model
        self._versions: dict[str, int] = {}  # of all written weights, by the names of their folders
        self._folders: list[Path] = []  # of the written versions, the newest last
        self._start = self._loaded = Path()  # folders of its own weights, and of those loaded last

    def check(self, *, loads: bool = True) -> None:
        """Raise ValueError if the server's model or, with `loads`, its log-probs are wrong."""
        if self.policy.adapters:
            adapter_files.check(self.policy)
        elif jax.process_count() > 1:
            raise ValueError("search.engine needs lora.rank in a run of several processes")
        try:
            cards = self._send("/v1/models").get("data") or []
            card = next((x for x in cards if not x.get("parent")), {})
            self._base, longest = str(card.get("id")), card.get("max_model_len") or self.longest
            self._start = self._loaded = Path(card.get("root") or self._base)
            if longest < self.longest:
                text = f"the model {self._base!r} has max_model_len = {longest}, and prompt and "
                text += f"response may have {self.longest} tokens (task.max_prompt_tokens + "
                text += "search.max_new_tokens). Lower one of them, or raise --max-model-len"
                raise Failure("server_refused", text)
            if loads:
                self._compare()
        except Failure as error:
            text = f"config.search.engine = {self.url!r}: {error} ({error.name})"
            raise ValueError(f"{text}. {_START.format(self.model.folder)}") from error

    def _compare(self) -> None:
        """Compare the server's log-probs with those of our scorer, for known weights.

        Afterwards the server has its own weights again. Raises Failure if the mean difference is
        larger than rounding: that of float32, and eight times the difference of our own log-probs
        between the dtype and float32; or larger than half of the difference to the start model,
        because a server that ignores weights has the start model's log-probs.
        """
        mesh = reading_mesh(self.policy.hidden_size, jax.local_devices())
        base = self.model.load_on(mesh, self.dtype)
        draw = functools.partial(jax.random.normal, jax.random.key(0))
        if self.policy.adapters:
            fresh = lora.init_adapters(self.policy, 0)
            known = jax.tree.map(lambda x: x + 0.02 * draw(x.shape), fresh)
            whole = lora.merge(base, known, config=self.policy)
        else:
            known = whole = jax.tree.map(lambda x: x * (1 + _NOISE * draw(x.shape, x.dtype)), base)
        # Random prompts, because after a usual one the next token may be almost certain.
        most = self.model.config.num_tokens or self.model.config.vocab_size
        prompts = np.random.default_rng(0).integers(0, most, (8, 8), np.int32)
        settings = SamplingSettings(min(4, self.longest - 8), stop_ids=())
        folder = self._write(_CHECK_VERSION, known)
        try:
            self._load(folder)
            found = [self._ask(row, np.zeros(2, np.uint32), settings) for row in prompts]
        finally:
            self._unload(folder)  # a run that is stopped now leaves no wrong weights
        plain = dataclasses.replace(self.policy, adapters=None, attention="xla")
        tokens, num = np.array([y.tokens for y in found]), settings.max_new_tokens
        rows = np.concatenate([prompts, tokens], axis=1), np.full(8, 8), np.full((8, 1), num)

        def score(params: Params, dtype: str) -> np.ndarray:
            how = {"response_bucket": num, "scoring": Scoring(compute_dtype=dtype), "config": plain}
            return np.asarray(jax.jit(functools.partial(row_token_logprobs, **how))(params, *rows))

        theirs = np.stack([y.token_logprobs for y in found])[:, None]
        ours = score(whole, self.dtype)
        pairs = (theirs, ours), (ours, score(whole, "float32")), (theirs, score(base, self.dtype))
        gap, rounding, effect = (float(np.abs(x - y).mean()) for x, y in pairs)
        if not gap <= (bound := min(_ROUNDING + 8 * rounding, effect / 2)):
            text = f"with known weights its log-probs differ from ours by {gap:.2g} a token; wanted"
            text += f" at most {bound:.2g} (model.compute_dtype = {self.dtype}). The server ignores"
            text += " weights, has those of an earlier run (restart it), or another model or dtype"
            raise Failure("server_nonsense", text)

    def session(self, params: Any, *, num_slots: int, version: int, **_: Any) -> "ServerSession":
        """Return an empty session of the trained weights; arguments as of `Decoder.session`."""
        return ServerSession(self, num_slots, params, version)

    def publish(self, version: int, params: Params) -> None:
        """Load a version of the trained weights if it is the newest, or raise RuntimeError."""
        with self._loading:
            if version <= max(self._versions.values(), default=_CHECK_VERSION):
                return
            folder = self._write(version, params)
            self._repeat(lambda: self._load(folder))
            # Requests under way end with the adapters that they began with.
            for old in self._folders[: -2 if self.policy.adapters else -1]:
                self._unload(old)

    def sample(self, prompt: np.ndarray, key: np.ndarray, settings: SamplingSettings) -> Response:
        """Return a response to a prompt, int32 [s], as sample 0 of request 0.

        The key, uint32 [2], becomes the seed of the request, which some servers ignore. Raises
        RuntimeError if the server gives no usable response.
        """

        def attempt() -> Response:
            seen = self._num_loads
            try:
                return self._ask(prompt, key, settings)
            except Failure as error:
                if error.name == "server_no_model":  # a restarted server has only its own weights
                    # If the load fails, the next attempt fails again.
                    with self._loading, contextlib.suppress(Failure):
                        if self._num_loads == seen:
                            self._load(self._loaded)
                raise

        return self._repeat(attempt)

    def close(self) -> None:
        """Stop retrying requests, leave the server its own weights, and delete all folders."""
        self._is_closed.set()
        with self._loading:
            for folder in list(self._folders):
                self._unload(folder)

    def _write(self, version: int, params: Params) -> Path:
        """Write a version to a new folder, whose name identifies the weights in the server."""
        folder = self.folder / f"{self._name}-{version}"
        self._versions[folder.name] = version
        self._folders.append(folder)
        if self.policy.adapters:
            adapter_files.write(folder, self.policy, params, str(self.model.folder))
            return folder
        for old in set(self.folder.glob("tba-????????-*")) - set(self._folders):
            shutil.rmtree(old)  # a run that was killed has left it
        if not isinstance(params["layers"], dict):  # of the decoder's layout: stacked on the host
            shapes, params = abstract_params(self.policy)["layers"], jax.device_get(params)
            layers = {
                name: [x[name].reshape(y.shape[1:]) for x in params["layers"] if name in x]
                for name, y in shapes.items()
            }
            params = {**params, "layers": layers}
        hf_weights.save(folder, self.policy, params, self.model.hf_config, dtype=self.dtype)
        return folder

    def _load(self, folder: Path) -> None:
        """Load the weights in a folder, or raise Failure."""
        if self.policy.adapters:
            body = {"lora_name": folder.name, "lora_path": str(folder)}
            self._send("/v1/load_lora_adapter", body)
        else:
            self._loaded = folder  # now, because a load that fails may have changed some weights
            self._send("/pause?mode=keep", {})
            try:
                where = {"weights_path": str(folder)}
                self._send("/collective_rpc", {"method": "reload_weights", "kwargs": where})
                self._send("/reset_prefix_cache", {})
                self._send("/update_weight_version", {"new_version": folder.name})
            finally:
                self._send("/resume", {})
        self._loaded, self._num_loads = folder, self._num_loads + 1

    def _unload(self, folder: Path) -> None:
        """Unload adapters, or load the server's own weights again; delete the version's folder."""
        try:
            if self.policy.adapters:
                self._send("/v1/unload_lora_adapter", {"lora_name": folder.name})
            elif self._loaded == folder:
                self._load(self._start)
        except Failure as error:
            if error.name != "server_no_model":  # a restarted server has no adapters
                self.failures.report("server_unload", str(error), "request(s) failed as")
        self._folders.remove(folder)
        shutil.rmtree(folder, ignore_errors=True)

    def _ask(self, prompt: np.ndarray, key: np.ndarray, settings: SamplingSettings) -> Response:
        """Return the response of one attempt of `sample`, or raise Failure."""
        name = self._loaded.name if self.policy.adapters else self._base
        stops = settings.stop_strings
        sampling = {
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "seed": (int(key[0]) << 32 | int(key[1])) >> 1,  # servers take 63 bits
            "stop_token_ids": list(settings.stop_ids or ()),
            "stop": [] if stops is None else list(stops.strings),
            "ignore_eos": True,  # only the run's stop tokens end a response
            "skip_special_tokens": False,  # a stop string may be one
            "include_stop_str_in_output": True,
            "logprobs": 1,
        }
        body = {"model": name, "token_ids": prompt.tolist(), "sampling_params": sampling}
        found = self._send("/inference/v1/generate", body)
        choice = (found.get("choices") or [{}])[0]
        spans = choice.get("weight_versions") or ()
        names = [x["version"] for x in spans for _ in range(x["start"], x["end"])]
        if self.policy.adapters:
            names = [str(found.get("model"))] * len(choice.get("token_ids") or ())
        if unknown := set(names) - self._versions.keys():
            raise Failure("server_no_model", f"sampled with {sorted(unknown)}, and not with {name}")
        return _read(choice, [self._versions[x] for x in names], settings)

    def _repeat(self, attempt: Callable[[], Any]) -> Any:
        """Call `attempt` until it raises no Failure, and return its result, or raise RuntimeError.

        A request that the server refuses is not repeated, others for twice the timeout.
        """
        start_s, pause_s = time.monotonic(), 0.5
        for num in itertools.count(1):
            try:
                return attempt()
            except Failure as error:
                failed = error
            self.failures.report(failed.name, str(failed), "request(s) failed as")
            spent_s = time.monotonic() - start_s
            left_s = 0.0 if failed.name == "server_refused" else 2 * self.timeout_s - spent_s
            if left_s <= 0 or self._is_closed.wait(min(pause_s, left_s)):
                raise RuntimeError(
                    f"search.engine = {self.url!r}: {failed} ({failed.name}; {num} attempts in "
                    f"{spent_s:.0f} s). Repair the server, then run the same command again to "
                    "continue"
                ) from failed
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def _send(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request once, a POST if there is a body, and return the response's JSON object.

        A text is returned as {}. Raises Failure without a response, and for statuses but 200.
        """
        method = "GET" if body is None else "POST"
        try:
            found = self._http.request(method, self._root + path, json=body)
        except self._no_response as error:
            text = f"not reachable within {self.timeout_s:.0f} s ({type(error).__name__})"
            raise Failure("server_down", text) from error
        if found.status == 200:
            with contextlib.suppress(ValueError):  # a text
                return dict(found.json())
            return {}
        text = f"HTTP {found.status} from {path}: {found.data[:300].decode(errors='replace')}"
        other = "server_down" if found.status >= 500 else "server_refused"
        raise Failure(_STATUSES.get(found.status, other), text)


def _read(
    choice: Mapping[str, Any], versions: Sequence[int], settings: SamplingSettings
) -> Response:
    """Return the response in a choice with the versions of its tokens, or raise Failure."""
    ids, finish = choice.get("token_ids") or [], choice.get("finish_reason")
    content = (choice.get("logprobs") or {}).get("content") or []
    logprobs = np.array([x.get("logprob") for x in content], np.float32)
    num, most, is_token = len(ids), settings.max_new_tokens, [isinstance(x, int) for x in ids]
    for is_right, wrong in (
        (num and all(is_token) and min(ids) >= 0, "no token_ids: this server cannot return them"),
        (len(logprobs) == num, f"{num} tokens and {len(logprobs)} log-probs"),
        ((logprobs > -9999).all(), "a log-prob that is not finite"),  # vLLM's value of NaN
        (len(versions) == num, f"{num} tokens and weight_versions of {len(versions)}"),
        (finish == "stop" or num == most, f"{num} of {most} tokens, and ends by {finish!r}"),
    ):
        if not is_right:
            raise Failure("server_nonsense", f"the response has {wrong}")
    drawn_by = np.array(versions, np.int32)
    ends = finish == "stop", int(drawn_by.min()), int(drawn_by.max()), settings.temperature
    return Response(0, 0, np.array(ids, np.int32), logprobs, *ends, drawn_by)


class ServerSession:
    """Session with the methods of `decoding.engine.Session`, whose responses a server samples.

    One thread drives it; each response has a thread that sends its request.
    """

    def __init__(self, server: InferenceServer, num_slots: int, params: Any, version: int) -> None:
        self._server, self.num_slots, self.statistics = server, num_slots, Statistics()
        self._open = set[Future[Response]]()
        self._numbers = itertools.count()
        self.swap(params, version)

    @property
    def is_idle(self) -> bool:
        return not self._open

    @property
    def room(self) -> int:
        return self.num_slots - len(self._open)

    def swap(self, params: Any, version: int) -> None:
        self._server.publish(version, params)
        self.version = version

    def submit(
        self, prompt: np.ndarray, keys: np.ndarray, settings: SamplingSettings, temperatures: Any
    ) -> int:
        """Request responses to one prompt; arguments and result as of `Session.submit`."""
        number, server = next(self._numbers), self._server
        ids = server.eos_ids if settings.stop_ids is None else settings.stop_ids
        ends = {"stop_ids": ids, "stop_strings": settings.stop_strings or server.stop_strings}
        for j, key in enumerate(keys):
            own = dataclasses.replace(settings, temperature=float(temperatures[j]), **ends)
            future = Future[Response]()
            row = (future, number, j, prompt, key, own)
            threading.Thread(target=self._sample, args=row, daemon=True).start()
            self._open.add(future)
        return number

    def _sample(self, future: Future[Response], number: int, j: int, *arguments: Any) -> None:
        """Put the response to one request, or an error, into a future."""
        try:
            y = self._server.sample(*arguments)
            future.set_result(y._replace(request=number, sample=j))
        except Exception as error:  # raised again by the thread of the session
            future.set_exception(error)

    def forget(self, conversation: np.ndarray) -> None:
        """Do nothing: the server decides which caches it keeps."""

    def step(self) -> list[Response]:
        """Wait a short time for responses; return those that have arrived, or raise an error."""
        start_s = time.perf_counter()
        ended, self._open = wait(self._open, _STEP_S, FIRST_COMPLETED)
        found = [future.result() for future in ended]
        self.statistics.tokens += sum(len(y.tokens) for y in found)
        self.statistics.decode_s += time.perf_counter() - start_s
        return found

    def run(self) -> Iterator[Response]:
        while not self.is_idle:
            yield from self.step()
