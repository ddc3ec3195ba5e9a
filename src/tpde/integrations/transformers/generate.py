"""Text from a packed model, token by token."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LogitsProcessorList, TextStreamer

from tpde.errors import InvalidInput
from tpde.files.documents import is_text
from tpde.integrations.transformers.run_memory import explained
from tpde.integrations.transformers.skeleton import config_of


@dataclass(frozen=True)
class Generation:
    """What was generated, and how fast.

    Attributes
    ----------
    text : str
        Without the prompt.
    tokens : list of int
        The same as tokens, those included that have no text.
    prompt_tokens : int
        Tokens of the prompt.
    first_token_seconds : float
        From the start to the first token.
    tokens_per_second : float or None
        Of those after the first; None if there are none.
    seconds : float
        From the start to the end.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    first_token_seconds: float
    tokens_per_second: float | None
    seconds: float


class _Stream(TextStreamer):
    """Hands text on as soon as it is complete, and notes when tokens come."""

    def __init__(self, tokenizer: Any, write: Callable[[str], object], clock: Callable[[], float]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write, self._clock, self.pieces = write, clock, list[str]()
        self.tokens: list[int] = []
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(self._clock())
            self.tokens += value.flatten().tolist()
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append(text)
        self._write(text)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model directory.

    Raises
    ------
    InvalidInput
        If there is none that transformers can load, which reads `config.json` for it, too.
    """
    try:
        found = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of any kind, where `tokenizer.json` holds something else
        config_of(folder)  # which raises an error of ours if `config.json` is why
        first = str(error).strip().partition("\n")[0]
        raise _no_tokenizer(folder, first) from None
    if _has_no_words(found):
        raise _no_tokenizer(folder, f"of what is there it makes a {type(found).__name__} without words")
    return found


def _no_tokenizer(folder: Path, why: str) -> InvalidInput:
    if not is_text(str(folder)):
        return InvalidInput(
            f"transformers can load no tokenizer from `{folder}`, whose path is not UTF-8",
            hint="rename what is not UTF-8 in it",
            where=str(folder),
        )
    return InvalidInput(
        f"`{folder}` has no tokenizer that transformers can load ({why})",
        hint="add the source's `tokenizer.json` and `tokenizer_config.json`",
    )


def _has_no_words(tokenizer: Any) -> bool:
    """Whether all texts are unknown to a tokenizer: without files, transformers 5 makes some of nothing.

    They have special tokens, and T5's the mark of a word's beginning.
    """
    return len(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)) < 2


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    write: Callable[[str], object],
    clock: Callable[[], float] = time.perf_counter,
) -> Generation:
    """Continue a prompt.

    Parameters
    ----------
    model : PreTrainedModel
        One that generates text.
    tokenizer : PreTrainedTokenizerBase
        Its tokenizer.
    prompt : str
        Taken as it is, without a chat template.
    max_new_tokens : int
        At most so many.
    temperature : float
        0 takes the likeliest token each time, anything else draws.
    seed : int
        Of the draws.
    write : callable
        Called with each piece of text.
    clock : callable
        Gives the time, in seconds.

    Raises
    ------
    InvalidInput
        If the model generates no text, the prompt has no tokens, or scores of a token are NaN.
    OutOfMemory
        If the device has too little free memory.
    """
    if not model.can_generate():
        raise InvalidInput(
            f"a {type(model).__name__} generates no text", hint="use `--embed` if it is an encoder"
        )
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    count = inputs["input_ids"].shape[1]
    if not count:
        raise InvalidInput("the prompt has no tokens", hint="give a text")
    greedy = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    stream = _Stream(tokenizer, write, clock)
    torch.manual_seed(seed)
    start = clock()
    with torch.inference_mode(), explained(model.device, "generating"):
        model.generate(
            **inputs,
            **({"do_sample": True, "temperature": temperature} if temperature > 0 else greedy),
            max_new_tokens=max_new_tokens,
            pad_token_id=_padding(tokenizer, model),
            logits_processor=LogitsProcessorList([_numbers]),
            streamer=stream,
        )
    seconds = clock() - start
    times = stream.times
    return Generation(
        text="".join(stream.pieces),
        tokens=stream.tokens,
        prompt_tokens=count,
        first_token_seconds=times[0] - start if times else seconds,
        tokens_per_second=(len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None,
        seconds=seconds,
    )


def _numbers(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The scores of the next token, as they are.

    Without probabilities the likeliest token is any, and none can be drawn: a GPU's kernel fails then, and
    with it all that the process does there.

    Raises
    ------
    InvalidInput
        If they are NaN or too large, as those of a model whose training diverged.
    """
    if not scores.logsumexp(-1).isfinite().all():
        raise InvalidInput(
            f"the model's scores after {tokens.shape[1]:,} tokens are no numbers: some are NaN or infinite",
            hint="the plain model's are, too; its weights may be NaN, or fp16 may be too small for it",
        )
    return scores


def _padding(tokenizer: Any, model: Any) -> int:
    """A padding token: with one prompt it is never seen, but transformers insists."""
    for found in (tokenizer.pad_token_id, model.generation_config.pad_token_id, tokenizer.eos_token_id):
        if found is not None:
            return int(found)
    return 0
