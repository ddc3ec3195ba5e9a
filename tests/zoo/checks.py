"""What is checked of each architecture: one function a check, which raises if the bits differ."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tpde

from .architecture import Architecture
from .bits import Differs, kept, same, same_all, tensors
from .case import Case, PlainFails, agreed, large_weights, mostly_packed, one_line, place, seeded

TOKENS = 5
_CHECKPOINTING = {  # what the libraries call it
    "transformers": "gradient_checkpointing_enable",
    "diffusers": "enable_gradient_checkpointing",
    "timm": "set_grad_checkpointing",
}
_CACHES = ("past_key_values", "cache_params", "mems", "state")  # their gradients are nobody's


def forward(case: Case) -> None:
    """All tensors of the output, in evaluation mode."""
    plain = case.plain()
    expected = agreed(lambda: case.forward(plain))
    packed = case.packed()
    try:
        same_all(case.forward(packed), expected)
    except Differs as error:
        raise Differs(place(case, plain, packed) or str(error)) from error


def generate(case: Case) -> None:
    """Greedy tokens and their logits, two prompts, one of them padded at its left."""

    def run(model: Any) -> dict[str, torch.Tensor]:
        seeded()
        prompt = case.cast(case.architecture.prompt())  # type: ignore[misc]
        out = model.generate(
            **prompt,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return kept({"tokens": out.sequences, "logits": out.logits})

    plain = case.plain()
    expected = agreed(lambda: run(plain))
    same_all(run(case.packed()), expected)


def _load(case: Case, folder: Path, packed: bool, like: Any) -> Any:
    if case.architecture.library == "diffusers":
        from tpde.integrations.diffusers import load

        return (
            load(type(like), folder) if packed else type(like).from_pretrained(folder, torch_dtype=case.dtype)
        )
    if packed:
        return tpde.from_pretrained(folder).eval()
    return type(like).from_pretrained(folder, dtype="auto").eval()


def _saved(case: Case) -> tuple[Any, Path, dict[str, torch.Tensor]]:
    """A plain model, the folder it is saved in, and what it gives when loaded from there."""
    plain = case.plain()
    folder = case.folder()
    try:
        plain.save_pretrained(folder)
    except Exception as error:
        raise PlainFails(f"saving: {one_line(error)}") from error
    return plain, folder, agreed(lambda: case.forward(_load(case, folder, False, plain)))


def directory(case: Case) -> None:
    """Saved plain, packed, loaded; saved packed, and loaded again."""
    plain, folder, expected = _saved(case)
    packed, again = case.folder() / "packed", case.folder()
    tpde.pack(folder, packed)
    model = _mostly_packed(_load(case, packed, True, plain), plain)
    same_all(case.forward(model), expected, "loaded")
    _require_dtypes(case, folder, plain)
    model.save_pretrained(again)
    if any(tpde.nn.packed_modules(model)):  # else what was saved is a plain model
        model = _mostly_packed(_load(case, again, True, plain), plain)
        same_all(case.forward(model), expected, "saved again")


def restored(case: Case) -> None:
    """Loaded from packed files, unpacked, saved plain, and loaded as a plain model."""
    plain, folder, expected = _saved(case)
    packed, again = case.folder() / "packed", case.folder()
    tpde.pack(folder, packed)
    model = tpde.unpack_module(_load(case, packed, True, plain))
    same_all(case.forward(model), expected, "unpacked")
    _require_dtypes(case, folder, plain)
    model.save_pretrained(again)
    same_all(case.forward(_load(case, again, False, plain)), expected, "saved")


def _require_dtypes(case: Case, folder: Path, like: Any) -> None:
    """Refuse what transformers saves in fp16, and then loads in float32 (BLIP-2: its Q-Former's dtype)."""
    plain, again = _load(case, folder, False, like), case.folder()
    plain.save_pretrained(again)
    before, after = plain.state_dict(), _load(case, again, False, like).state_dict()
    other = [name for name in before.keys() & after.keys() if before[name].dtype != after[name].dtype]
    if other:
        raise PlainFails(f"saved again, {len(other)} of its weights load in another dtype")


def _mostly_packed(model: Any, plain: Any) -> Any:
    """Give a loaded model, if it is packed so far as one of this kind can be."""
    large = large_weights(plain)
    return mostly_packed(model, large) if large else model


def copies(case: Case) -> None:
    """`copy.deepcopy`, `pickle` and `torch.save` of the whole model."""

    def saved(model: Any) -> Any:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    ways: dict[str, Callable[[Any], Any]] = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda model: pickle.loads(pickle.dumps(model)),
        "torch.save": saved,
    }
    unsupported = []
    for name, way in ways.items():
        try:
            expected = agreed(lambda way=way: case.forward(way(case.plain())))  # type: ignore[misc]
        except PlainFails as error:
            unsupported.append(f"{name}: {error}")
            continue
        packed = case.packed()
        twin = mostly_packed(way(packed), large_weights(case.plain()))
        same_all(case.forward(twin), expected, name)
        same_all(case.forward(packed), expected, f"the original after {name}")
    if len(unsupported) == len(ways):
        raise PlainFails(unsupported[0])


def _loss(model: Any, case: Case) -> torch.Tensor:
    """The sum of what is returned but caches, weighted, so that no two elements' gradients are the same."""
    seeded()
    given = case.cast(case.architecture.inputs())
    out = model(**given)
    draw = torch.Generator().manual_seed(1)
    parts = [
        (tensor.float() * torch.randn(tensor.shape, generator=draw)).sum()
        for path, tensor in tensors(out)
        if tensor.is_floating_point() and not path.startswith(_CACHES)
    ]
    return torch.stack(parts).sum()


def _gradients(case: Case, frozen: bool, checkpoints: bool, packed: bool) -> dict[str, torch.Tensor]:
    model = case.plain()
    if frozen:
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() < 2)
    if packed:
        case.pack(model)
    model.train()
    if checkpoints:
        getattr(model, _CHECKPOINTING[case.architecture.library])()
    loss = _loss(model, case)
    if loss.requires_grad:  # else all weights of the model are packed, and frozen
        loss.backward()
    plain = {
        name: parameter
        for name, parameter in model.named_parameters()
        if type(parameter) is torch.nn.Parameter and parameter.grad is not None
    }
    return {"loss": loss.detach()} | {name: it.grad for name, it in plain.items() if it.grad is not None}


def gradients(case: Case) -> None:
    """Loss and gradients, as built and with only vectors trained, with and without checkpointing."""
    done, reasons = 0, []
    for frozen in (False, True):
        for checkpoints in (False, True):
            what = f"{'vectors trained' if frozen else 'as built'}{', checkpointing' if checkpoints else ''}:"
            try:
                expected = agreed(lambda f=frozen, c=checkpoints: _gradients(case, f, c, packed=False))  # type: ignore[misc]
            except PlainFails as error:
                reasons.append(f"{what} {error}")
                continue
            vectors = [name for name, grad in expected.items() if grad.dim() < 2]
            found = _gradients(case, frozen, checkpoints, packed=True)
            for name in vectors:  # never packed, and the loss
                if name not in found:
                    raise Differs(f"{what} `{name}` has no gradient")
            for name, grad in found.items():
                if name not in expected:
                    raise Differs(f"{what} `{name}` has a gradient, the plain model's has none")
                same(grad, expected[name], f"{what} {'' if name == 'loss' else 'gradient of '}{name}")
            done += len(found) - 1
    if not done:
        raise PlainFails(reasons[0] if reasons else "no gradient was compared")


def unpacked(case: Case) -> None:
    """`unpack_module` gives the plain model back; saved, it loads as a plain one."""
    plain, model = case.plain(), tpde.unpack_module(case.packed())
    for (path, a), (_, b) in zip(plain.named_modules(), model.named_modules(), strict=True):
        if (type(a).__module__, type(a).__qualname__) != (type(b).__module__, type(b).__qualname__):
            raise Differs(f"`{path}` is a {type(b).__name__}, expected {type(a).__name__}")
        if a._forward_hooks.keys() != b._forward_hooks.keys() or vars(a).keys() != vars(b).keys():
            raise Differs(f"`{path}` has attributes {sorted(vars(a).keys() ^ vars(b).keys())} or hooks left")
    expected = dict(plain.named_parameters(remove_duplicate=False))
    found = dict(model.named_parameters(remove_duplicate=False))
    if list(expected) != list(found) or list(plain.state_dict()) != list(model.state_dict()):
        raise Differs(f"other names: {sorted(expected.keys() ^ found.keys())[:3]}, or another order")
    for name, parameter in expected.items():
        same(found[name], parameter, name)
        if type(found[name]) is not type(parameter) or found[name].requires_grad != parameter.requires_grad:
            raise Differs(
                f"`{name}` is {type(found[name]).__name__}, requires_grad {found[name].requires_grad}"
            )
    outputs = agreed(lambda: case.forward(plain))
    same_all(case.forward(model), outputs, "unpacked")
    if case.architecture.library == "timm":  # does not save directories
        return
    try:
        _, _, expected_again = _saved(case)
    except PlainFails:
        return
    folder = case.folder()
    model.save_pretrained(folder)
    same_all(case.forward(_load(case, folder, False, model)), expected_again, "unpacked and saved")


def attributes(case: Case) -> None:
    """What libraries ask a model for."""
    plain, packed = case.plain(), case.packed()
    asks: dict[str, Callable[[Any], Any]] = {
        "dtype": lambda model: model.dtype,
        "device": lambda model: model.device,
        "num_parameters()": lambda model: model.num_parameters(),
        "num_parameters(exclude_embeddings=True)": lambda model: model.num_parameters(
            exclude_embeddings=True
        ),
    }
    failed = []
    for name, ask in asks.items():
        try:
            expected = ask(plain)
        except Exception:
            continue
        found = ask(packed)
        if found != expected:
            failed.append(f"{name} is {found}, expected {expected}")
    if failed:
        raise Differs("; ".join(failed))


CHECKS: dict[str, Callable[[Case], None]] = {
    "forward": forward,
    "generate": generate,
    "directory": directory,
    "restored": restored,
    "copies": copies,
    "gradients": gradients,
    "unpacked": unpacked,
    "attributes": attributes,
}


def applies(check: str, architecture: Architecture) -> bool:
    """Whether there is anything to check: not all models generate, and timm does not save directories."""
    if check == "generate":
        return architecture.prompt is not None
    return check not in ("directory", "restored") or architecture.library != "timm"
