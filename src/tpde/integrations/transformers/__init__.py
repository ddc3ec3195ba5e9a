"""Packed models in transformers: importing this teaches `from_pretrained` and `save_pretrained` about them.

>>> import tpde.integrations.transformers  # doctest: +SKIP
>>> model = AutoModelForCausalLM.from_pretrained("packed")  # doctest: +SKIP
>>> model.save_pretrained("again")  # doctest: +SKIP
"""

from tpde.integrations.transformers.require import require_transformers

require_transformers()

from transformers.quantizers.auto import (  # noqa: E402
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)

from tpde.format.constants import METHOD  # noqa: E402
from tpde.integrations.transformers.batch_generation import by_requests  # noqa: E402
from tpde.integrations.transformers.config import TpdeConfig  # noqa: E402
from tpde.integrations.transformers.load_model import from_pretrained  # noqa: E402
from tpde.integrations.transformers.quantizer import TpdeHfQuantizer  # noqa: E402
from tpde.nn.model_deltas import METHODS  # noqa: E402

if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
    register_quantization_config(METHOD)(TpdeConfig)
if METHOD not in AUTO_QUANTIZER_MAPPING:
    register_quantizer(METHOD)(TpdeHfQuantizer)
METHODS.setdefault("generate", by_requests)

__all__ = ["TpdeConfig", "TpdeHfQuantizer", "from_pretrained"]
