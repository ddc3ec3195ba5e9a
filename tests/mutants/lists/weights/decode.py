"""Of decoding packed tensors: rows, damage, launches."""

from __future__ import annotations

from ...mutant import mutant

_DECODER = "unit/test_decoder.py"
_LAUNCH = "unit/test_launch.py"

MUTANTS = (
    mutant(
        "rows-beyond-the-last",
        "weights/rows.py",
        "not 0 <= ids.min() <= ids.max() < self._count:",
        "not 0 <= ids.min() <= ids.max() <= self._count:",
        "a row behind the matrix is looked up",
        "unit/test_rows.py",
    ),
    mutant(
        "all-rows-between",
        "weights/rows.py",
        "np.flatnonzero(firsts[1:] > lasts[:-1] + 1) + 1, rows.size)",
        "np.flatnonzero(firsts[1:] > lasts[:-1] + (1 << 40)) + 1, rows.size)",
        "looking up the first and the last row decodes all of a vocabulary",
        "unit/test_rows.py",
    ),
    mutant(
        "rows-on-the-host-are-checked-once",
        "weights/rows.py",
        "check=not (self.packed.settled and self._verified))",
        "check=not self._verified)",
        "damage of rows in host memory is not noticed after the first look",
        "unit/test_streaming_damage.py",
    ),
    mutant(
        "rows-are-read-while-memory-is-given-back",
        "weights/rows.py",
        "        with self.packed.opened():  # kernels",
        "        if True:  # kernels",
        "a kernel reads host memory that was given back",
        "unit/test_streaming_closing.py",
    ),
    mutant(
        "rows-that-nobody-watches",
        "weights/rows.py",
        "        self.packed.watch(self)\n",
        "",
        "`check` does not tell of damaged rows",
        "unit/test_streaming_damage.py",
    ),
    mutant(
        "weights-of-two-devices-together",
        "weights/source.py",
        "        if source.device != device:\n",
        "        if source.device.type != device.type:\n",
        "a weight on another device is decoded with its neighbours",
        "unit/test_rows.py",
    ),
    mutant(
        "constants-have-no-sign",
        "weights/decoder.py",
        '"little", signed=b > 1)',
        '"little", signed=False)',
        "a constant with its first bit set cannot be filled with",
        _DECODER,
    ),
    mutant(
        "first-damage-is-not-told",
        "weights/decoder.py",
        "            self._launch.report([self._packed.name])\n            self._verified = True",
        "            self._verified = True",
        "chunks that are damaged are decoded without a word",
        _DECODER,
    ),
    mutant(
        "weights-are-verified-before-they-are",
        "weights/decoder.py",
        "            self._launch.report(self._names)\n            self._verified = True",
        "            self._verified = True\n            self._launch.report(self._names)",
        "damage is told once, and decoded without a word from then on",
        _DECODER,
    ),
    mutant(
        "graphs-wait",
        "weights/decoder.py",
        "        if check and not recording:\n",
        "        if check:\n",
        "recording a CUDA graph waits for the device, and fails",
        _DECODER,
    ),
    mutant(
        "reports-stay",
        "weights/launch.py",
        "            self._reports[number].zero_()\n",
        "",
        "damage that was told is told for ever",
        _LAUNCH,
    ),
    mutant(
        "reports-are-read-while-they-are-written",
        "weights/launch.py",
        "np.flatnonzero(found[:, 0] == REPORTED)",
        "np.flatnonzero(found[:, 0])",
        "a report that is not complete names another chunk",
        _LAUNCH,
    ),
    mutant(
        "chunks-have-32-bits",
        "weights/launch.py",
        "high << 32 | low",
        "low",
        "damage of a chunk beyond 2^32 names another",
        _LAUNCH,
    ),
    mutant(
        "launches-on-another-device",
        "weights/launch.py",
        "        if torch._C._cuda_getDevice() == self._index:\n            return launch(",
        "        if torch._C._cuda_getDevice() >= 0:\n            return launch(",
        "a kernel is launched on the device that is current, not on its own",
        _LAUNCH,
    ),
)
