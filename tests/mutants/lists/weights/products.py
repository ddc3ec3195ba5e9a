"""Of windows, and products with them."""

from __future__ import annotations

from ...mutant import mutant

MUTANTS = (
    mutant(
        "pickled-words-may-be-any",
        "weights/pickled.py",
        "    if digest is not None and ",
        "    if False and ",
        "a damaged pickle of fused weights is loaded",
        "nn/test_windowed_weights.py",
    ),
    mutant(
        "pickled-windows-are-trusted",
        "weights/windowed.py",
        "windows.validate(blob.cpu().numpy(), default_threads()) if window is None else window",
        "windows.header(blob.cpu().numpy()) if window is None else window",
        "kernels read beyond a blob whose offsets are damaged",
        "nn/test_windowed_weights.py",
    ),
    mutant(
        "updates-leave-windows",
        "weights/apply_delta.py",
        "    if isinstance(source, WindowSource):\n",
        "    if False:\n",
        "a model that was updated is decoded block by block, and computes otherwise",
        "nn/test_windowed_weights.py",
    ),
    mutant(
        "products-in-graphs-go-unseen",
        "weights/product.py",
        "    if capturing(device):\n        source.recorded = True\n",
        "",
        "a CUDA graph reads a weight that was replaced",
        "nn/test_kernels_attacked.py",
    ),
    mutant(
        "products-in-forward-mode",
        "weights/product.py",
        "transformed() or forward_ad._current_level >= 0",
        "transformed()",
        "tangents are lost",
        "nn/test_fused_layers.py",
    ),
    mutant(
        "strips-all-alike",
        "weights/windowed.py",
        "            self._decode(room[: high - low], first, end)\n",
        "            self._decode(room[: high - low], 0, end - first)\n",
        "the rows of a large matrix are those of its first strip",
        "nn/test_fused_layers.py",
    ),
    mutant(
        "stacks-are-trusted",
        "codec/window_stacks.py",
        "windows.validate(data[at : at + size], threads)",
        "windows.header(data[at : at + size])",
        "kernels read beyond a pickled stack whose offsets are damaged",
        "nn/test_window_stacks.py",
    ),
    mutant(
        "experts-of-any-number-of-tokens",
        "weights/expert_products.py",
        "0 < tokens <= MOST_TOKENS and",
        "0 < tokens and",
        "prompts are multiplied eight rows at a time",
        "nn/test_expert_products.py",
    ),
    mutant(
        "experts-of-any-number-of-rows",
        "weights/expert_products.py",
        "min(MOST_ROUTED, MOST_EACH * self._count)",
        "MOST_ROUTED",
        "few experts are decoded again and again for their many rows",
        "nn/test_expert_products.py",
    ),
    mutant(
        "experts-take-x-as-it-lies",
        "weights/expert_products.py",
        "step % _X_WORDS or at % X_AT or",
        "step % _X_WORDS or",
        "rows of x at an odd address are refused",
        "nn/test_expert_products.py",
    ),
    mutant(
        "noise-chooses-a-way",
        "weights/product_timing.py",
        "return best if gains else self.default",
        "return best",
        "two runs of `tpde tune` write different tables",
        "unit/test_product_timing.py",
    ),
)
