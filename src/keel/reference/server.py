"""A teacher behind a server with vLLM's `prompt_logprobs`: its top tokens' log-probabilities, over HTTP."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from keel.base.errors import KeelError
from keel.base.json_http import RequestFailed, ask, below, check_reachable, shown
from keel.models.options import LoadedModel
from keel.reference.weights import FrozenWeights, NoSingleModel, Sharder

TRIES = 6
BACKOFF_S = 1.0
LARGEST_ANSWER = 1 << 30  # bytes: 32,000 tokens with 200 log-probabilities each
CHECKED_AT_ONCE = 1024  # vocabulary tokens per request
PROBED = 64  # tokens whose log-probabilities identify the model
OTHER_MODEL = 0.2  # nats per token: far above rounding, far below the difference of two models
LARGEST_EXCESS = 1e-3  # the most by which a sum of probabilities may exceed 1
Entry = Mapping[str, Mapping[str, Any]]  # log-probabilities and texts by token id, at one position
Item = TypeVar("Item")
Result = TypeVar("Result")
Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]  # prompt and completion


@dataclass(frozen=True)
class KnownTokens:
    """Logits `[n, V]` from the log-probabilities of some tokens; the remaining mass is uniform over all others.

    A state `[2m]` has m token ids (V: none), then their log-probabilities. The first m − 1 tokens are the top tokens.
    The last is the scored token if it is not a top token. No other token gets more probability than any top token.
    """

    vocabulary: int

    def __call__(self, states: Tensor) -> Tensor:
        ids, logp = states.chunk(2, dim=-1)
        known = ids < self.vocabulary
        rounding = 8 * torch.finfo(states.dtype).eps  # of the sum
        rest = (1 - torch.where(known, logp.exp(), 0.0).sum(-1)).clamp_min(rounding)
        unknown = (self.vocabulary - known.to(states.dtype).sum(-1)).clamp_min(1)
        least = torch.where(known, logp, math.inf)[:, :-1].min(-1).values
        even = torch.minimum(rest.log() - unknown.log(), least)
        logits = even[:, None].repeat(1, self.vocabulary + 1)
        return logits.scatter_(-1, ids.long(), logp)[:, :-1]


class ServerTeacher(FrozenWeights):
    """A model behind `url`, an OpenAI-compatible endpoint such as http://host:8000/v1.

    `option` is the option that gave the URL, for errors.
    """

    def __init__(
        self,
        policy: LoadedModel,
        url: str,
        *,
        option: str,
        served_model_name: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
        concurrency: int = 16,
    ) -> None:
        self._ask = partial(
            ask,
            option=option,
            headers=headers,
            timeout_s=timeout_s,
            retries=TRIES - 1,
            backoff_s=BACKOFF_S,
            max_bytes=LARGEST_ANSWER,
        )
        self.url, self.concurrency, self._option = url, concurrency, option
        self.vocabulary = policy.model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
        card = self._card(served_model_name)
        self.name, longest = str(card["id"]), card.get("max_model_len")
        self.context_length = None if longest is None else int(longest) - 1  # a server generates at least one token
        self._at_once = min(CHECKED_AT_ONCE, (self.context_length or CHECKED_AT_ONCE) - 1)
        self._check_tokens(policy)
        self._probe = self._scores_of_probe(policy.tokenizer)
        self._tokenizer = policy.tokenizer

    def __str__(self) -> str:
        return f"{self.name} at {shown(self.url)}"

    def score(self, sequences: Sequences, k: int) -> list[Tensor]:
        """The states of `KnownTokens` `[T, 2(k + 1)]` of each sequence's T completion tokens."""
        unique = list(dict.fromkeys((tuple(prompt), tuple(completion)) for prompt, completion in sequences))
        states = dict(zip(unique, self._each(lambda pair: self._states(pair[0], pair[1], k), unique), strict=True))
        return [states[tuple(prompt), tuple(completion)] for prompt, completion in sequences]

    # -- as the weights of a reference ------------------------------------------------------------------------------

    def model(self) -> AbstractContextManager[nn.Module]:
        raise NoSingleModel(
            f"{self} is a server, which returns only log-probabilities, but the model's weights are needed "
            "here: use a model that Keel can load"
        )

    def tensors(self) -> dict[str, Tensor]:
        return {"probe": self._probe}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse a server whose model has changed."""
        gap = (self._scores_of_probe(self._tokenizer) - tensors["probe"]).abs().mean().item()
        if not gap <= OTHER_MODEL:
            raise KeelError(
                f"{self} gives log-probabilities that differ by {gap:.2g} nats per token from those of the saved run's "
                "teacher: serve the model that the run started with"
            )

    def fingerprint(self) -> str:
        return sha256(self.name.encode()).hexdigest()

    def shard(self, sharder: Sharder) -> None:
        """Do nothing: the server holds the weights."""

    # -- requests ---------------------------------------------------------------------------------------------------

    def _card(self, name: str | None) -> Mapping[str, Any]:
        """The server's entry for the named model, by default its first."""
        answer = self._answer("/models")
        cards = answer.get("data") if isinstance(answer, dict) else None
        named = {str(card["id"]): card for card in cards or () if isinstance(card, dict) and "id" in card}
        if not named:
            raise KeelError(f"{shown(self.url)} lists no model: set {self._option} to the URL that ends in /v1")
        if name is not None and name not in named:
            section = self._option.rpartition(".")[0]
            raise KeelError(
                f"{section}.served_model_name is {name}, and {shown(self.url)} has {', '.join(named)}: name one of them"
            )
        return named[name] if name is not None else next(iter(named.values()))

    def _answer(self, path: str, body: Any = None) -> Any:
        try:
            return self._ask(below(self.url, path), body)
        except RequestFailed as error:
            raise KeelError(f"the teacher at {error}") from None

    def _entries(self, prompt: Sequence[int], completion: Sequence[int], k: int) -> list[Entry]:
        """The server's `prompt_logprobs` for each token of the completion."""
        body = {
            "model": self.name,
            "prompt": [*prompt, *completion],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": k,
        }
        answer = self._answer("/completions", body)
        try:
            entries = answer["choices"][0]["prompt_logprobs"][len(prompt) :]
        except (KeyError, IndexError, TypeError):
            raise KeelError(
                f"{self} returns no prompt_logprobs: {self._option} needs a server with vLLM's completions"
            ) from None
        if len(entries) != len(completion):
            raise KeelError(f"{self} returned log-probabilities of {len(entries)} tokens for {len(completion)}")
        return list(entries)

    def _states(self, prompt: Sequence[int], completion: Sequence[int], k: int) -> Tensor:
        entries = self._entries(prompt, completion, k) if completion else []
        rows = [self._row(entry, token, k) for entry, token in zip(entries, completion, strict=True)]
        return torch.tensor(rows, dtype=torch.float32).view(len(rows), 2 * (k + 1))

    def _row(self, entry: Entry, token: int, k: int) -> list[float]:
        """The top k tokens and the scored one, in the form of `KnownTokens`."""
        logps = self._logps(entry, token)
        top = sorted(logps, key=logps.__getitem__, reverse=True)[:k]
        if len(top) < k:
            raise KeelError(
                f"{self} returned {len(top)} log-probabilities of a token instead of {k}: start it with "
                f"--max-logprobs {k} or more, or lower kl.topk"
            )
        if sum(math.exp(logps[each]) for each in top) > 1 + LARGEST_EXCESS:
            raise KeelError(f"{self} returned log-probabilities of a token that sum to more than 1")
        ids = [*top, self.vocabulary if token in top else token]
        ids = [
            each if each < self.vocabulary else self.vocabulary for each in ids
        ]  # ids of padding rows of the teacher's head
        return [*map(float, ids), *(logps[each] for each in top), logps[token]]

    def _logps(self, entry: Entry, token: int) -> dict[int, float]:
        try:
            logps = {int(name): float(each["logprob"]) for name, each in entry.items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise KeelError(f"{self} returned {str(entry)[:60]!r} instead of log-probabilities") from None
        if token not in logps or not all(map(math.isfinite, logps.values())):
            raise KeelError(f"{self} returned no log-probability of token {token}")
        return logps

    def _check_tokens(self, policy: LoadedModel) -> None:
        """Send every token of the policy's vocabulary to the server, and compare the texts that it returns.

        Bytes that are not a complete character have no text and are not compared.
        """
        tokenizer = policy.tokenizer
        ids = sorted(set(tokenizer.get_vocab().values()))
        parts = [ids[start : start + self._at_once] for start in range(0, len(ids), self._at_once)]
        read = self._each(lambda part: self._entries(ids[:1], part, 1), parts)
        for token, entry in zip(ids, chain.from_iterable(read), strict=True):
            theirs, mine = (entry.get(str(token)) or {}).get("decoded_token"), tokenizer.decode([token])
            if theirs is None:
                raise KeelError(f"{self} returns no decoded_token, which is needed to check its vocabulary")
            if theirs.strip() != mine.strip() and "\ufffd" not in theirs + mine:
                raise KeelError(
                    f"{self} has another vocabulary than {policy.name}: token {token} is {theirs!r} there and "
                    f"{mine!r} here; use "
                    "a teacher with the policy's tokenizer"
                )

    def _each(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """The results in order, with several requests at a time; the first error cancels the rest."""
        with ThreadPoolExecutor(self.concurrency) as threads:
            waiting = [threads.submit(function, item) for item in items]
            try:
                return [each.result() for each in waiting]
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _scores_of_probe(self, tokenizer: Any) -> Tensor:
        ids = sorted(set(tokenizer.get_vocab().values()))
        ids = ids[:: max(1, len(ids) // PROBED)][: min(PROBED, self._at_once)]
        entries = self._entries(ids[:1], ids, 1)
        return torch.tensor([self._logps(entry, token)[token] for entry, token in zip(entries, ids, strict=True)])


def check_server(url: str, headers: Mapping[str, str] | None, option: str) -> None:
    """Raise a KeelError if the server is down, before anything is trained."""
    try:
        check_reachable("the teacher", url, headers, option=option, timeout_s=10.0)
    except RequestFailed as error:
        raise KeelError(str(error)) from None
