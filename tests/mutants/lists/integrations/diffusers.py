"""Of components of diffusers."""

from __future__ import annotations

from ...mutant import mutant

MUTANTS = (
    mutant(
        "components-of-another-shape",
        "integrations/diffusers/load_model.py",
        "        if specs[name].shape != shape:\n",
        "        if len(specs[name].shape) != len(shape):\n",
        "who names a `config.json` of other weights is not told which of the two is wrong",
        "integration/test_diffusers.py",
    ),
    mutant(
        "components-that-lack-tensors",
        "integrations/diffusers/load_model.py",
        "        ([name for name in wanted if name not in specs],",
        "        ([name for name in specs if name not in specs],",
        "a component is loaded without some of its weights",
        "integration/test_diffusers.py",
    ),
    mutant(
        "modules-kept-in-32-bits",
        "integrations/diffusers/dtypes.py",
        "return torch.float32 if set(kept or ()) & set(name.split(",
        "return dtype if set(kept or ()) & set(name.split(",
        "what a class keeps in 32 bits is cast",
        "integration/test_diffusers.py",
    ),
    mutant(
        "streamed-components-are-saved",
        "integrations/diffusers/quantizer.py",
        "        self.require_bytes()\n",
        "",
        "a streamed component is saved without its weights",
        "integration/test_diffusers_vram.py",
    ),
)
