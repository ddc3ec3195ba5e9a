"""Packed transformers and UNets of diffusers' pipelines.

>>> import tpde.integrations.diffusers as packed  # doctest: +SKIP
>>> unet = packed.load(UNet2DConditionModel, "sd-packed/unet", device="cuda")  # doctest: +SKIP
>>> pipe = StableDiffusionPipeline.from_pretrained("sd", unet=unet)  # doctest: +SKIP
"""

from tpde.integrations.diffusers.loading import load

__all__ = ["load"]
