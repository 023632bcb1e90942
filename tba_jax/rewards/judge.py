# SPDX-License-Identifier: Apache-2.0
"""A reward from a language model that judges, behind an OpenAI-compatible address.

A user's file makes a judge, and the run names it: `--config.task.reward=my_rewards.py:judge`.

    judge = Judge("http://127.0.0.1:8000/v1", model="qwen", prompt="Rate: {prompt} {completion}")

Each reward process has a judge with its own limits and cache. Invariant: a request that fails gives
no reward and is counted by name.
"""

import asyncio
import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tba_jax.rewards.graders import Content, last_number, optional, text_of
from tba_jax.rewards.scores import Score

openai = optional("openai", "a judge", "judge")
_MOST_TEXT = 300  # characters of an answer in a message
# Names of failures; the first class that fits counts.
_FAILURES = {
    openai.APITimeoutError: "judge_timeout",
    openai.APIConnectionError: "judge_down",
    openai.RateLimitError: "judge_rate_limit",
    openai.OpenAIError: "judge_error",
}


def conversation(*contents: Content) -> str:
    """Return texts and chat messages as lines "ROLE: TEXT"; a text has no role."""
    messages = [m for x in contents for m in ([{"content": x}] if isinstance(x, str) else x)]
    return "\n".join(": ".join(m[key] for key in ("role", "content") if key in m) for m in messages)


@dataclasses.dataclass(eq=False)
class Judge:
    """A reward function: a language model rates each response, several at a time.

    Attributes:
        url: address of the API, ending in /v1. The key is in OPENAI_API_KEY.
        model: name of the model at that address.
        prompt: text of a request, with {prompt} (its last message), {completion}, {conversation}
            (all messages of both) and {COLUMN} filled in.
        parse: answer of the model -> reward; None or any exception: the answer has no reward. By
            default its last number, where "8/10" is 0.8: let the prompt ask for a plain number.
        sampling: further fields of each request.
        concurrency: maximum number of concurrent requests of a process.
        timeout_s: timeout of a request.
        retries: maximum number of retries after an error, a temporary refusal or a timeout.
    """

    url: str
    _: dataclasses.KW_ONLY
    model: str
    prompt: str
    parse: Callable[[str], float | None] = last_number
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    concurrency: int = 16
    timeout_s: float = 30.0
    retries: int = 3

    def __post_init__(self) -> None:
        options: Any = {"timeout": self.timeout_s, "max_retries": self.retries}
        options["api_key"] = os.environ.get("OPENAI_API_KEY", "none")
        self._client = openai.AsyncOpenAI(base_url=self.url, **options)
        self._free, self._cache = asyncio.Semaphore(self.concurrency), dict[str, Score]()

    async def __call__(
        self, prompts: Sequence[Content], completions: Sequence[Content], **columns: Sequence[Any]
    ) -> list[Score]:
        """Return a reward or a named failure for each response."""

        def asked(i: int) -> str:
            facts = {name: column[i] for name, column in columns.items()}
            facts |= {"prompt": text_of(prompts[i]), "completion": text_of(completions[i])}
            facts["conversation"] = conversation(prompts[i], completions[i])
            return re.sub(r"\{(\w+)\}", lambda x: str(facts.get(x[1], x[0])), self.prompt)

        return await asyncio.gather(*(self._rate(asked(i)) for i in range(len(completions))))

    async def _rate(self, text: str) -> Score:
        if text in self._cache:
            return self._cache[text]
        fixed: Any = {"model": self.model, "temperature": 0, **self.sampling}
        fixed["messages"], answer = [{"role": "user", "content": text}], None
        try:
            async with self._free:
                answer = await self._client.chat.completions.create(**fixed)
            reward: Any = self.parse(answer.choices[0].message.content or "")
            return self._cache.setdefault(text, Score(float(reward)))
        except openai.OpenAIError as error:
            name = next(name for kind, name in _FAILURES.items() if isinstance(error, kind))
            return Score(None, name, f"{error!s:.{_MOST_TEXT}} ({error.__cause__})")
        except Exception as error:  # the user's parser failed, or there is no answer
            shown = f"{answer!r:.{_MOST_TEXT}}"
            return Score(None, "judge_nonsense", f"{type(error).__name__}: {error}; got {shown}")
