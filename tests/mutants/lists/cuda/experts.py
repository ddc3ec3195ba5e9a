"""Of experts in windows: their rows, and products with them."""

from __future__ import annotations

from ...mutant import mutant

MUTANTS = (
    mutant(
        "kernel-of-experts-rows-of-the-one-before",
        "cuda/kernels/window_experts.cu",
        "return index ? l.ends[index - 1] : 0;",
        "return index ? l.ends[index - 1] - 1 : 0;",
        "a row of the expert before is multiplied once more, by this one",
        "unit/test_expert_kernels.py",
    ),
    mutant(
        "kernel-of-experts-one-flag-for-all",
        "cuda/kernels/window_experts.cu",
        "(u32)__ldg(&p->zero)};",
        "(u32)__ldg(&held->zero)};",
        "experts whose weights are half zeros decode as the first one",
        "unit/test_expert_kernels.py",
    ),
    mutant(
        "kernel-of-experts-groups-are-skipped",
        "cuda/kernels/window_experts.cu",
        "    if (v.group < (l.ends[v.at.index] >> 16) - (before(v.at.index) >> 16)) return;\n",
        "",
        "a ninth row of an expert is multiplied by another expert's chunk",
        "unit/test_expert_kernels.py",
    ),
    mutant(
        "kernel-of-experts-none-is-left-as-it-was",
        "cuda/kernels/window_experts.cu",
        "(found ? l.ends[found - 1] & 0xFFFF : 0) < count",
        "(found ? l.ends[found - 1] & 0xFFFF : 0) > count",
        "a row that the router sent nowhere has whatever was in its memory",
        "unit/test_expert_kernels.py",
    ),
    mutant(
        "kernel-of-experts-numbers-of-32-bits",
        "cuda/kernels/window_experts.cu",
        "wide ? ((const long long*)ids)[i] : ((const int*)ids)[i]",
        "((const long long*)ids)[i]",
        "numbers of 32 bits are read two at a time",
        "unit/test_expert_kernels.py",
    ),
    mutant(
        "kernel-of-experts-takes-no-padding",
        "cuda/kernels/window_experts.cu",
        "return id < 0 ? experts : (u32)id;",
        "return (u32)id;",
        "a row that vLLM marks as padding by -1 reads places that are no expert's",
        "unit/test_expert_kernels.py",
    ),
    mutant(
        "kernel-of-experts-sums-in-another-order",
        "cuda/kernels/window_experts.cu",
        "for (; p >> level & 1; level++) s",
        "for (; p > 0 && level < 1; level++) s",
        "a warp that is alone adds parts one after the other, so that results depend on how many tokens there are",
        "unit/test_expert_kernels.py",
    ),
    mutant(
        "kernel-of-experts-few-rows-in-a-wrong-order",
        "cuda/kernels/window_experts.cu",
        "l.order[(begin & 0xFFFF) + __popc(same & below)] = (u16)lane;",
        "l.order[begin & 0xFFFF] = (u16)lane;",
        "of an expert's rows only the last one is multiplied",
        "unit/test_expert_kernels.py",
    ),
    mutant(
        "launches-of-experts-start-anew",
        "cuda/window_experts.py",
        "numbers + 4 * at if numbers else 0,",
        "numbers,",
        "of very many experts the first ones are decoded again and again",
        "unit/test_expert_kernels.py",
    ),
)
