"""What a configuration says of each layer, or stage, of a model whose layers differ."""

from __future__ import annotations

from typing import Any


def layer_configs(config: Any) -> list[Any]:
    """The configuration of each layer, where they differ; else the one of all.

    transformers refuses to say for all layers what differs between them, such as `head_dim` of a Gemma 4.
    """
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def most(config: Any, name: str) -> int:
    """The largest number of that name, of all layers; 0 if there is none.

    Vision models have a list of one for each stage.
    """
    found = [getattr(it, name, None) or 0 for it in layer_configs(config)]
    return max(int(one) for it in found for one in (it if isinstance(it, (list, tuple)) else (it,)))
