"""Of experts that are streamed."""

from __future__ import annotations

from ...mutant import mutant

MUTANTS = (
    mutant(
        "experts-are-written-while-they-are-read",
        "streaming/experts.py",
        "            if freed is not None:\n                self.device.hold(freed)\n",
        "            pass\n",
        "an expert is copied over one that is being decoded",
        "unit/test_expert_events.py",
    ),
    mutant(
        "experts-of-a-failed-fetch-stay",
        "streaming/experts.py",
        "                self._asked.popleft().cancel()\n            self.cache.clear()\n",
        "                self._asked.popleft().cancel()\n",
        "after an error, places are taken for experts that never came",
        "nn/test_experts.py",
    ),
    mutant(
        "requests-of-a-failed-fetch-stay",
        "streaming/experts.py",
        "            while self._asked:\n                self._asked.popleft().cancel()\n",
        "            self._asked.clear()\n",
        "experts that were asked for in vain keep their feed's memory",
        "unit/test_expert_events.py",
    ),
    mutant(
        "experts-are-not-released",
        "streaming/experts.py",
        "        self.cache.release(it)\n",
        "",
        "no place of the cache is ever free again",
        "unit/test_expert_store.py",
    ),
    mutant(
        "held-experts-make-room",
        "streaming/expert_cache.py",
        "next((other for other in self._places if other not in self._held), None)",
        "next(iter(self._places), None)",
        "an expert that is wanted now is evicted for another",
        "unit/test_expert_cache.py",
    ),
    mutant(
        "one-user-releases-for-all",
        "streaming/expert_cache.py",
        "        self._held[key] -= 1\n        if not self._held[key]:\n            del self._held[key]\n",
        "        del self._held[key]\n",
        "an expert that two hold is free after the first",
        "unit/test_expert_cache.py",
    ),
)
