"""Of the core that writes blobs: encoding, threads, pages, plans."""

from __future__ import annotations

from ...mutant import mutant

_REFUSES = "unit/test_core_refuses.py"

MUTANTS = (
    mutant(
        "offsets-beyond-32-bits",
        "csrc/encode.c",
        "  if ((offset + e.used) >> l->unit_log2 > UINT32_MAX)\n",
        "  if ((offset + e.used) >> l->unit_log2 > (uint64_t)UINT32_MAX << 1)\n",
        "chunks of a large blob get the offsets of others",
        _REFUSES,
    ),
    mutant(
        "values-are-sought-up-to-the-first-best-number",
        "csrc/codes.c",
        "n >= MIN_VALUES && cost",
        "cost",
        "pruned fp16 weights take an eighth more",
        "unit/test_plan.py",
    ),
    mutant(
        "an-output-that-is-too-small",
        "csrc/encode.c",
        "  if (bound > out_bytes)\n",
        "  if (bound > 2 * out_bytes)\n",
        "the core writes behind the caller's buffer",
        _REFUSES,
    ),
    mutant(
        "the-longest-stream-is-not-told",
        "csrc/encode.c",
        "    if (kept[p].size > *max_stream) *max_stream = kept[p].size;\n",
        "    if (kept[p].size > *max_stream) *max_stream = kept[p].size - 4;\n",
        "a GPU keeps too little room for coded planes",
        "unit/test_blob_writer.py",
        "golden/test_golden.py",
    ),
    mutant(
        "batches-are-placed-out-of-order",
        "csrc/encode.c",
        "    set_offsets(e, batch_start(e, i), batch_start(e, i + 1), e->used);",
        "    set_offsets(e, batch_start(e, i), batch_start(e, i + 1) - 1, e->used);",
        "the last chunk of each batch has its offset within the batch",
        "contract/test_determinism.py",
    ),
    mutant(
        "padding-of-raw-planes-is-left",
        "csrc/encode.c",
        "    memset(at + n, 0, raw - n);\n",
        "    memset(at + n, (int)n, raw - n);\n",
        "the same words give other bytes",
        "contract/test_reference_encoder.py",
        "golden/test_golden.py",
    ),
    mutant(
        "shifts-are-one-too-small",
        "csrc/encode.c",
        "while (((high - low + (1u << c->shift) - 1) >> c->shift) > 255) c->shift++;",
        "while (((high - low) >> c->shift) > 256) c->shift++;",
        "a lane's length outgrows its byte",
        "contract/test_reference_encoder.py",
    ),
    mutant(
        "threads-that-do-not-start-leave-work",
        "csrc/threads.c",
        "  for (int i = started; i < threads; i++) job(context, i);",
        "  if (started == threads - 1) job(context, started);",
        "where threads cannot start, nothing is done",
        "contract/test_core_failures.py",
    ),
    mutant(
        "threads-are-not-waited-for",
        "csrc/threads.c",
        "  for (int i = 0; i < started; i++) pthread_join(w[i].id, NULL);",
        "  for (int i = 0; i < started; i++) pthread_detach(w[i].id);",
        "the core returns before its threads are done",
        "contract/test_determinism.py",
    ),
    mutant(
        "populating-tells-no-errors",
        "csrc/pages.c",
        "return errno;",
        "return 0;",
        "pages of a file that has become shorter are locked as if they were there",
        "unit/test_pages.py",
    ),
    mutant(
        "more-samples-than-chunks",
        "csrc/plan.c",
        "|| sample_words > layout->words ||",
        "||",
        "a sample larger than its tensor is planned with a scale of zero",
        _REFUSES,
    ),
    mutant(
        "four-planes-of-five-tables",
        "csrc/plan.c",
        "    if (layout->tables + n > TPDE_MAX_TABLES) {",
        "    if (layout->tables + n > TPDE_MAX_TABLES + 4) {",
        "a tensor of eight planes is planned with more tables than a reader takes",
        "unit/test_plan.py",
    ),
)
