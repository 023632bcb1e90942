# SPDX-License-Identifier: Apache-2.0
"""Responses that a server samples: tokens, log-probs, versions, and each failure of a server."""

import jax
import numpy as np
import pytest
import served_model
from fake_batches import slow
from fake_models import START_MODEL_LOGIT, logprob_bound

from tba_jax.decoding.requests import SamplingSettings
from tba_jax.models import lora
from tba_jax.models import model as models
from tba_jax.models.transformer import unstack_layers
from tba_jax.run.model_parts import START_MODEL
from tba_jax.serving import vllm

PROMPT, SETTINGS = np.array(served_model.PROMPT, np.int32), SamplingSettings(9)


@pytest.fixture(params=["adapters", "all weights"])
def client(request, model, tmp_path):
    """Makes clients of the model's server; at the end nothing is left there or on disk."""
    model.policy, made, folder = model.config, [], tmp_path / "versions"
    start, address = models.describe(str(START_MODEL)), model.url
    if request.param == "adapters":
        model.policy = lora.with_adapters(model.config, 4, 8.0, ("q", "v", "down"))
        address += "/v1"

    def make(url=address, dtype="float32", longest=64, timeout_s=60.0):
        options = {"eos_ids": (2,), "longest": longest, "timeout_s": timeout_s}
        made.append(vllm.InferenceServer(url, start, model.policy, dtype, folder, **options))
        return made[-1]

    yield make
    model.faults, model.always = [], ""
    for server in made:
        server.close()
    assert (list(folder.glob("*")), [*model.queues], model.version) == ([], ["start"], "start")


def weights_of(model, version):
    """Weights of a version as searchers receive them, and as a whole model."""
    rng, fresh, size = np.random.default_rng(version), model.params, 0.01
    if model.policy.adapters:
        fresh, size = lora.init_adapters(model.policy, version), 0.1
    drawn = jax.tree.map(lambda x: x + size * rng.normal(size=x.shape).astype(np.float32), fresh)
    if model.policy.adapters:
        return drawn, lora.merge(model.params, drawn, config=model.policy)
    return unstack_layers(drawn, model.config), drawn


def session_of(model, server):
    server.check(loads=False)
    return server.session(weights_of(model, 3)[0], num_slots=4, version=3)


def assert_sampled(model, session, version, num=1):
    """Responses are those of our decoder with the weights of a version, for the seeds sent."""
    seeds = [2**31 + version + j for j in range(num)]  # of 63 bits: half of a key
    keys = np.array([divmod(2 * seed, 2**32) for seed in seeds], np.uint32)
    session.submit(PROMPT, keys, SETTINGS, np.ones(num))
    assert session.room == 4 - num and not session.is_idle
    _, params = weights_of(model, version)
    # Other programs run with another number of live slots.
    bound = logprob_bound(model.config, 64, START_MODEL_LOGIT)
    found = list(session.run())
    assert sorted(y.sample for y in found) == [*range(num)]
    for y in found:
        (z,) = model.decode(params, PROMPT, SETTINGS, seeds[y.sample])
        np.testing.assert_array_equal(y.tokens, z.tokens)
        np.testing.assert_allclose(y.token_logprobs, z.token_logprobs, rtol=0, atol=bound)
        assert y.has_eos == z.has_eos
        assert {y.version_min, y.version_max, *y.token_versions.tolist()} == {version}


def test_tokens_and_log_probs_are_those_of_the_engine_with_the_weights_of_each_version(
    model, client
):
    server = client()
    server.check()
    client(dtype="bfloat16").check()  # server and run may round differently
    # The known weights of the check are gone: a run that ends now leaves the server as it was.
    assert ([*model.queues], model.version) == (["start"], "start")
    session = session_of(model, server)
    assert_sampled(model, session, 3, num=5)
    model.calls.clear()
    for version in (4, 5):
        session.swap(weights_of(model, version)[0], version)
    if model.policy.adapters:  # version 3 is gone from server and disk
        assert [name.rsplit("-")[-1] for name in model.queues] == ["start", "4", "5"]
    else:
        names = ["pause", "collective_rpc", "reset_prefix_cache", "update_weight_version", "resume"]
        assert model.calls == [f"/{name}" for name in names] * 2
    assert_sampled(model, session, 5)
    assert server.failures.take() == {}


def test_each_token_has_the_version_that_the_server_names(model, client, monkeypatch):
    server = client()
    session_of(model, server).swap(weights_of(model, 4)[0], 4)
    old, new = server._versions
    spans = [{"version": old, "start": 0, "end": 1}, {"version": new, "start": 1, "end": 3}]
    choice = {"token_ids": [5, 6, 7], "finish_reason": "length", "weight_versions": spans}
    choice["logprobs"] = {"content": [{"logprob": -1.0}] * 3}
    answer = {"model": old, "choices": [choice]}  # to a request that was under way
    monkeypatch.setattr(server, "_send", lambda path, body: answer)
    y = server.sample(PROMPT, np.zeros(2, np.uint32), SamplingSettings(3))
    assert y.token_versions.tolist() == ([3] * 3 if model.policy.adapters else [3, 4, 4])
    assert (y.version_min, y.version_max) == (3, 3 if model.policy.adapters else 4)


# Faults of a server one after another, and the names by which the client counts them.
FAULTS = [
    ([429], {"down"}),
    (["late"], {"down"}),
    ([500] * 5 + ["forgotten"], {"down", "no_model"}),  # attempts are counted by name
    *(([fault], {"nonsense"}) for fault in ("token_ids", "logprobs", "early end")),
]


@pytest.mark.parametrize("client", ["adapters", slow("all weights")], indirect=True)
@pytest.mark.parametrize(("faults", "names"), FAULTS)
def test_a_failed_request_is_counted_by_name_and_sent_again(
    model, client, capfd, monkeypatch, faults, names
):
    monkeypatch.setattr(vllm, "_MOST_PAUSE_S", 0.01)
    # On a busy machine any response may be late; what is late by itself takes 2 s.
    server = client(timeout_s=1.0 if "late" in faults else 60.0)
    session, model.faults = session_of(model, server), [*faults]
    assert_sampled(model, session, 3)
    assert set(server.failures.take()) == {f"server_{name}" for name in names}
    lines = [x for x in capfd.readouterr().err.splitlines() if "search.engine" in x]
    ends = {line.rpartition("; ")[2] for line in lines}
    assert ends == {f"1 request(s) failed as server_{name}" for name in names}


@pytest.mark.parametrize("client", ["adapters", slow("all weights")], indirect=True)
def test_a_failure_that_stays_ends_the_run_in_time(model, client):
    session = session_of(model, client(timeout_s=0.5))
    model.always = 500
    with pytest.raises(RuntimeError, match="in 1 s.*run the same command again to continue"):
        assert_sampled(model, session, 3)


REFUSED = [
    ("", {"url": "http://127.0.0.1:9"}, "not reachable .*server_down.*--enable-scale-out"),
    ("", {"longest": 257}, "max_model_len = 256, and prompt and response may have 257"),
    ("token_ids", {}, "has no token_ids"),
    ("no loading", {}, "HTTP 500 from /(v1/load_lora_adapter|pause)"),
    ("no effect", {}, "differ from ours by .* ignores weights.* of an earlier run \\(restart it"),
    slow("old norm", {"dtype": "bfloat16"}, "differ from ours by .* wanted at most 0.[01]"),
    ("shifted", {}, "differ from ours by 0.05 a token; wanted at most 0.001"),
    (401, {}, "HTTP 401 from /inference/v1/generate"),
]


@pytest.mark.parametrize(("fault", "options", "message"), REFUSED)
def test_a_server_that_cannot_be_used_is_refused_before_training(
    model, client, fault, options, message
):
    model.always = fault
    with pytest.raises(ValueError, match=message) as error:
        client(**options).check()
    assert "\n" not in str(error.value) and str(error.value).startswith("config.search.engine")
