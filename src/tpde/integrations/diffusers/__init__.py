"""Packed components of diffusers' pipelines: importing this teaches `from_pretrained` about them.

>>> import tpde.integrations.diffusers as packed  # doctest: +SKIP
>>> pipe = StableDiffusionPipeline.from_pretrained("sd-packed", torch_dtype=torch.float16)  # doctest: +SKIP
>>> unet = packed.load(UNet2DConditionModel, "sd-packed/unet", device="cuda", vram="8GiB")  # doctest: +SKIP
"""

from contextlib import suppress

from tpde.frameworks import require_torch

require_torch("`tpde.integrations.diffusers`", extra="diffusers")

from tpde.integrations.diffusers.load_model import load  # noqa: E402

with suppress(ImportError):  # without diffusers, `load` says what is missing
    from tpde.integrations.diffusers.register import register

    register()

__all__ = ["load"]
