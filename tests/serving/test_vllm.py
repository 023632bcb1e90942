# SPDX-License-Identifier: Apache-2.0
"""Responses that a server samples: tokens, log-probs, versions, and each failure of a server."""

import concurrent.futures
import time

import fake_models
import jax
import numpy as np
import pytest
from fake_models import START_MODEL_LOGIT, logprob_bound
from served_model import NUM_SLOTS, FaultyServer, ServedAdapters

from tba_jax.decoding.keys import fold_in
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.models import lora
from tba_jax.run.model_parts import START_MODEL
from tba_jax.serving.vllm import InferenceServer, ServerError

PROMPT = np.array([1, 28, 16, 26, 18, 24, 34], np.int32)
SETTINGS = SamplingSettings(9)


@pytest.fixture(scope="module")
def model():
    found = FaultyServer(START_MODEL)
    found.policy = lora.with_adapters(found.config, 4, 8.0, ("q", "v", "down"))
    with found.running():
        yield found


@pytest.fixture
def client(model, tmp_path):
    made = []

    def make(**options):
        options = {"eos_ids": (2,), "longest": 64, "timeout_s": 60.0, **options}
        url = options.pop("url", f"{model.url}/v1")
        made.append(InferenceServer(url, model.policy, "start", tmp_path / "adapters", **options))
        return made[-1]

    yield make
    model.faults, model.always = [], ""
    for server in made:
        server.close()
    assert not list((tmp_path / "adapters").glob("*")) and model.names == []


def adapters_of(model, version):
    keys = iter(jax.random.split(jax.random.key(version), 99))
    fresh = lora.init_adapters(model.policy, version)
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), fresh)


def session_of(model, server, version=3):
    return server.session(adapters_of(model, version), num_slots=4, version=version)


def wanted(model, version, keys, settings=SETTINGS):
    """What our decoder samples with the merged weights, for the seeds that are sent."""
    seeds = [(int(k[0]) << 32 | int(k[1])) >> 1 for k in keys]
    own = [fold_in(np.array([s >> 32, s & 0xFFFFFFFF], np.uint32), 0) for s in seeds]
    return fake_models.decode(
        model.decoder,
        lora.merge(model.params, adapters_of(model, version), config=model.policy),
        [PROMPT],
        num_samples=len(keys),
        key=np.array(own)[None],
        settings=settings,
        num_slots=NUM_SLOTS,
    )


def assert_equal(model, found, version, expected):
    for y in found:
        n = expected.lengths[0, y.sample]
        np.testing.assert_array_equal(y.tokens, expected.tokens[0, y.sample, :n])
        # Other programs run with another number of live slots.
        logprobs = expected.token_logprobs[0, y.sample, :n]
        np.testing.assert_allclose(y.token_logprobs, logprobs, rtol=0, atol=bound(model))
        assert y.has_eos == expected.has_eos[0, y.sample]
        assert {y.version_min, y.version_max, *y.token_versions.tolist()} == {version}


def bound(model):
    return logprob_bound(model.config, 64, START_MODEL_LOGIT)


def keys_of(number, num=5):
    return np.random.default_rng(number).integers(0, 2**32, (num, 2), np.uint32)


def test_tokens_and_log_probs_are_those_of_the_engine_with_the_weights_of_each_version(
    model, client
):
    server = client()
    server.check()
    session = session_of(model, server)
    before, after = keys_of(0), keys_of(1)
    session.submit(PROMPT, before, SETTINGS)
    assert session.room == -1 and not session.is_idle
    assert_equal(model, found := list(session.run()), 3, wanted(model, 3, before))
    assert len(found) == 5 and session.statistics.tokens == sum(len(y.tokens) for y in found)
    session.swap(adapters_of(model, 4), 4)
    # The adapter without users is gone from server and disk.
    assert [name.rsplit("-")[-1] for name in model.names] == ["4"]
    session.submit(PROMPT, after, SETTINGS)
    assert_equal(model, session.run(), 4, wanted(model, 4, after))
    assert server.failures.take() == {}


def test_a_request_under_way_ends_with_the_weights_that_it_began_with(model, client):
    server, settings = client(), SamplingSettings(60, stop_ids=())
    session = session_of(model, server)
    model.pause(True)
    keys = keys_of(2, 4)
    session.submit(PROMPT, keys, settings)
    while sum(len(queue._live) for queue, _ in model.entries) < 4:
        time.sleep(0.01)
    session.swap(adapters_of(model, 4), 4)
    assert len(model.names) == 2
    model.pause(False)
    expected = wanted(model, 3, keys, SamplingSettings(60, stop_ids=()))
    assert_equal(model, session.run(), 3, expected)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (429, "server_down"),
        ("late", "server_down"),
        ("forgotten", "server_no_model"),
        ("another version", "server_nonsense"),
        ("no token ids", "server_nonsense"),
        ("no log-probs", "server_nonsense"),
        ("early end", "server_nonsense"),
    ],
)
def test_a_failed_request_is_counted_by_name_and_sent_again(model, client, capfd, fault, name):
    # On a busy machine any response may be late; what is late by itself takes 2 s.
    server = client(timeout_s=1.0 if fault == "late" else 60.0)
    session = session_of(model, server)
    keys = keys_of(4)
    model.faults = [fault]
    session.submit(PROMPT, keys, SETTINGS)
    assert_equal(model, found := list(session.run()), 3, wanted(model, 3, keys))
    assert len(found) == 5
    counts = server.failures.take()
    # Several requests may find that their adapter is gone.
    assert set(counts) == {name} and (counts[name] == 1 or fault == "forgotten")
    (line,) = [x for x in capfd.readouterr().err.splitlines() if "search.engine" in x]
    assert line.endswith(f"; 1 request(s) failed as {name}")


def test_a_failure_that_stays_ends_the_run_in_time(model, client):
    session = session_of(model, client(timeout_s=0.5))
    model.always = 500
    session.submit(PROMPT, keys_of(5), SETTINGS)
    start_s = time.monotonic()
    with pytest.raises(ServerError, match="in 1 s.*run the same command again to continue"):
        list(session.run())
    assert time.monotonic() - start_s < 15.0


def test_a_server_that_is_restarted_loses_no_request(model, tmp_path, capfd):
    """The port is closed at first: nothing listens there until the server is back."""
    first = FaultyServer(START_MODEL)
    port = first.server.port
    server = InferenceServer(
        f"http://127.0.0.1:{port}/v1",
        model.policy,
        "start",
        tmp_path / "adapters",
        longest=64,
        eos_ids=(2,),
        timeout_s=30.0,
    )
    first.server.close()
    keys = keys_of(6)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        opened = pool.submit(session_of, model, server)
        while "server_down" not in capfd.readouterr().err:
            assert not opened.done()
            time.sleep(0.05)
        with ServedAdapters(START_MODEL, port=port).running():
            session = opened.result()
            session.submit(PROMPT, keys, SETTINGS)
            assert_equal(model, session.run(), 3, wanted(model, 3, keys))
            assert set(server.failures.take()) == {"server_down"}
            server.close()


@pytest.mark.parametrize(
    ("fault", "options", "message"),
    [
        ("", {"url": "http://127.0.0.1:9/v1"}, "not reachable .*server_down.*--enable-lora"),
        ("", {"longest": 257}, "max_model_len = 256, and prompt and response may have 257"),
        ("no token ids", {}, "has no token_ids"),
        (401, {}, "HTTP 401 from /completions"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_before_training(
    model, client, fault, options, message
):
    model.always = fault
    with pytest.raises(ValueError, match=message) as error:
        client(**options).check()
    assert "\n" not in str(error.value) and str(error.value).startswith("config.search.engine")


def test_adapters_that_a_killed_process_left_are_unloaded(model, client, tmp_path):
    killed, server = client(), client()
    killed.acquire(3, adapters_of(model, 3))
    assert len(model.names) == 1
    (tmp_path / "adapters" / "tba-0-9").mkdir()  # loaded before the server was restarted
    server.unload_earlier()
    assert model.names == [] and not list((tmp_path / "adapters").glob("*"))
    assert server.failures.take() == {}
