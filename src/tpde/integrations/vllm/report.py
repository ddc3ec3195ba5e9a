"""What a user is told: bytes saved, kernels, and how many more tokens the KV cache has."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from tpde.memory import gib

log = logging.getLogger("vllm.tpde")


class Report:
    """Counts weights while they are loaded, and says what came of them when all are.

    Parameters
    ----------
    kernels : str
        Which were asked for.

    Attributes
    ----------
    plain_bytes, packed_bytes : int
        Of all weights that were looked at so far: plain, and as they are held.
    """

    def __init__(self, kernels: str) -> None:
        self._kernels = kernels
        self._waiting = self.plain_bytes = self.packed_bytes = 0
        self._kinds: Counter[str] = Counter()
        self._plain: Counter[str] = Counter()

    def expect(self) -> None:
        """Count a layer that will be loaded."""
        self._waiting += 1

    def drop(self) -> None:
        """Count a layer no more: it is tied to another one."""
        self._waiting -= 1

    def held(self, plain_bytes: int, packed_bytes: int, kind: str) -> None:
        """Count a weight as it is held from now on; `kind` says how."""
        self.plain_bytes += plain_bytes
        self.packed_bytes += packed_bytes
        self._kinds[kind] += 1

    def stays(self, what: str) -> None:
        """Count a weight that stays plain, and why."""
        self._plain[what] += 1

    def done(self) -> None:
        """Count a layer that is loaded; after the last one, say what was gained."""
        self._waiting -= 1
        if self._waiting == 0 and self.plain_bytes:
            self._tell()

    def _tell(self) -> None:
        saved = self.plain_bytes - self.packed_bytes
        kinds = ", ".join(f"{count} {kind}" for kind, count in self._kinds.most_common())
        log.info(
            "tpde: weights take %s instead of %s (%.1f %% less), every bit kept; kernels=%s: %s",
            gib(self.packed_bytes),
            gib(self.plain_bytes),
            100 * saved / self.plain_bytes,
            self._kernels,
            kinds,
        )
        for what, count in self._plain.items():
            log.info("tpde: plain: %d x %s", count, what)
        token = token_bytes()
        if token and saved > 0:
            log.info("tpde: that is room for %d more tokens in the KV cache", saved // token)


def token_bytes() -> int:
    """Bytes that a token takes in the KV cache of this process; 0 if that cannot be told."""
    from vllm.config import get_current_vllm_config_or_none

    config: Any = get_current_vllm_config_or_none()
    if config is None:
        return 0
    total = 0.0
    for layer in config.compilation_config.static_forward_context.values():
        ask = getattr(layer, "get_kv_cache_spec", None)
        spec = None if ask is None else ask(config)
        if spec is not None:
            total += spec.page_size_bytes / spec.block_size
    return int(total)
