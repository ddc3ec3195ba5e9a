"""What `tpde run` is to do."""

from __future__ import annotations

from collections.abc import Sequence

from tpde.errors import InvalidInput


def check_task(texts: Sequence[str], prompt: str | None, embed: bool) -> None:
    """Refuse what is not one task: to continue a prompt, or to embed texts.

    Raises
    ------
    InvalidInput
        If it is none, or more than one, or a text is no Unicode.
    """
    from tpde.files.documents import is_text

    if prompt is not None and embed:
        raise InvalidInput("`--prompt` and `--embed` are two tasks", hint="pass one of them")
    if embed and not texts:
        raise InvalidInput("`--embed` has no text", hint='write texts after it: `--embed "a text" "another"`')
    if texts and prompt is not None:
        raise InvalidInput(
            f"`--prompt` continues one text, and `{texts[0]:.50}` is another",
            hint="put quotes around the whole prompt, or embed texts with `--embed`",
        )
    if texts and not embed:
        raise InvalidInput(
            f"it is not said what to do with the text `{texts[0]:.50}`",
            hint="continue it with `--prompt TEXT`, or make a vector of it with `--embed TEXT`",
        )
    if prompt is None and not embed:
        raise InvalidInput(
            "it is not said what the model is to do",
            hint="continue a text with `--prompt TEXT`, or make vectors of texts with `--embed TEXT...`",
        )
    for text in texts if prompt is None else [prompt]:
        if not is_text(text):
            raise InvalidInput(
                f"the text `{text:.50}` is not UTF-8",
                hint="pass it as UTF-8; `iconv` converts it",
                where="--prompt" if prompt is not None else "TEXT",
            )
