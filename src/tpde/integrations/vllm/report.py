"""What a user is told: bytes saved, kernels, and how many more tokens the KV cache has room for."""

from __future__ import annotations

import logging
from collections import Counter

log = logging.getLogger("vllm.tpde")  # below vLLM's own, whose handlers and level it has


class LoadReport:
    """Counts weights while they are loaded, and says what came of them.

    Parameters
    ----------
    kernels : str
        Which were asked for.

    Attributes
    ----------
    kernels : str
        As given.
    plain_bytes, held_bytes : int
        Of all weights so far: plain, and as they are held.
    room_bytes : int
        That decoded experts take beside, of one layer at a time.
    awaited : int
        Layers that are packed only when all are loaded, and are not yet.
    """

    def __init__(self, kernels: str) -> None:
        self.kernels = kernels
        self.plain_bytes = self.held_bytes = self.room_bytes = self.awaited = self._told = 0
        self._cut_by_rows = 0
        self._on_host = [0, 0]  # bytes of `plain_bytes` and `held_bytes`
        self._kinds: Counter[str] = Counter()
        self._plain: Counter[str] = Counter()
        self._decoded: Counter[str] = Counter()

    def packed(self, plain_bytes: int, held_bytes: int, kind: str) -> None:
        """Count a weight that is packed from now on; `kind` says how."""
        self.plain_bytes += plain_bytes
        self.held_bytes += held_bytes
        self._kinds[kind] += 1

    def plain(self, nbytes: int, why: str) -> None:
        """Count a weight that stays plain, and why."""
        self.plain_bytes += nbytes
        self.held_bytes += nbytes
        self._plain[why] += 1

    def on_host(self, plain_bytes: int, held_bytes: int) -> None:
        """Count a weight that is kept in host memory, beside `packed`."""
        self._on_host[0] += plain_bytes
        self._on_host[1] += held_bytes

    @property
    def any_on_host(self) -> bool:
        """Whether weights are kept in host memory."""
        return self._on_host[0] > 0

    def cut_by_rows(self) -> None:
        """Count a matrix that GPUs share by rows where vLLM does by columns."""
        self._cut_by_rows += 1

    def decoded(self, why: str) -> None:
        """Count a layer whose experts are decoded for every batch, and why."""
        self._decoded[why] += 1

    def tell(self) -> None:
        """Say what was gained, once for all that was counted: when all layers are loaded."""
        from tpde.integrations.vllm import internals

        if self.awaited or self._told == self.plain_bytes:
            return
        self._told = self.plain_bytes
        saved = self.plain_bytes - self.held_bytes
        there, packed_there = self._on_host
        room, gained = self.room_bytes / 2**20, saved - (there - packed_there) - self.room_bytes
        log.info(
            "tpde: weights take %.1f MiB instead of %.1f (%.1f %% less), every bit kept; kernels=%s: %s",
            self.held_bytes / 2**20,
            self.plain_bytes / 2**20,
            100 * saved / self.plain_bytes,
            self.kernels,
            ", ".join(f"{count} {kind}" for kind, count in self._kinds.most_common()) or "none",
        )
        for why, count in self._plain.items():
            log.info("tpde: %d stay plain: %s", count, why)
        if self._cut_by_rows:
            log.info(
                "tpde: `VLLM_BATCH_INVARIANT` is set: %d matrices that vLLM cuts by columns are cut by rows, "
                "so that no sum of theirs is split over GPUs",
                self._cut_by_rows,
            )
            if internals.fuses_sums_with_norms():
                log.warning(
                    "tpde: results depend on the number of GPUs: vLLM adds up over them and normalizes in "
                    "one kernel, which rounds otherwise; `--compilation-config` needs "
                    '`"pass_config": {"fuse_allreduce_rms": false}`'
                )
        if there:
            log.info(
                "tpde: of these, %.1f MiB instead of %.1f are in host memory, copied before layers run",
                packed_there / 2**20,
                there / 2**20,
            )
        if room:
            log.info("tpde: experts are decoded into %.1f MiB beside, a layer's at a time", room)
        for why, count in self._decoded.items():
            log.info("tpde: experts of %d layers are decoded for batches of any size: %s", count, why)
        token = internals.token_bytes()
        if token and gained > 0:
            log.info("tpde: saved is room for %d tokens in the KV cache", gained // token)
