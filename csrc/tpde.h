/* tpde.h: the C API of the codec core.
 *
 * The core encodes and decodes chunks of packed tensors (docs/format.md, sections 2.3 to 5), and what changed
 * between two states of a tensor (docs/delta.md, sections 1 to 4), and matrices of bf16 that stay on a device
 * (docs/windows.md). It knows nothing of files: the caller reads blob headers, and hands over tables, index maps and bytes.
 *
 * Every function is safe on any input bytes: it returns an error instead of reading or writing out of
 * bounds, and allocates at most what tpde_codec_open and tpde_encode state. Functions may be called from
 * several threads at once; a tpde_codec is read-only after it has been opened. Nothing here needs more
 * than C11, POSIX threads and a little-endian machine of 64 bits.
 *
 * Licence: Apache-2.0.
 */
#ifndef TPDE_H
#define TPDE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define TPDE_API __attribute__((visibility("default")))
#else
#define TPDE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define TPDE_ABI 7          /* raised with every change of this header */
#define TPDE_LANES 32       /* format.md 5.1 */
#define TPDE_MAX_PLANES 8   /* bytes of the largest word, format.md 2.1 */
#define TPDE_MAX_TABLES 16  /* format.md 7 */
#define TPDE_RECORD_BYTES 12 /* an index record, format.md 4.3 */
#define TPDE_MAX_THREADS 256
#define TPDE_MAX_TABLE_SECTION 20480 /* bytes that tpde_plan may write */
#define TPDE_MAX_CLASSES 16 /* of a model of changes, delta.md 2.1 */
#define TPDE_DELTA_CHUNK_WORDS 65536 /* delta.md 3.1 */
#define TPDE_MAX_MODEL 20480 /* bytes that tpde_delta_plan_model may write */
#define TPDE_WINDOW_TABLE 16 /* XORs of a blob, windows.md 4.2 */

/* What a call returned: 0, or one of these. */
enum {
  TPDE_OK = 0,
  TPDE_E_ARGUMENT = 1,  /* the caller's mistake: a size or a pointer that cannot be */
  TPDE_E_MEMORY = 2,    /* malloc failed */
  TPDE_E_TABLE = 3,     /* the table section is damaged */
  TPDE_E_INDEX = 4,     /* the index map is damaged */
  TPDE_E_CHUNK = 5,     /* a chunk's bytes are damaged */
  TPDE_E_CHECKSUM = 6,  /* a chunk decodes, but not to what was encoded */
  TPDE_E_SPACE = 7,     /* the output buffer is too small */
  TPDE_E_MODEL = 8,     /* a model of changes is damaged */
  TPDE_E_WINDOW = 9,    /* windows are damaged */
  TPDE_E_TRUNCATED = 10, /* bytes are missing at the end */
  TPDE_E_VERSION = 11   /* of a version that this library does not know */
};

/* Details of a failure. `what` is a short English phrase without a name or a position. */
typedef struct tpde_error {
  int32_t code;
  int32_t plane;    /* or -1 */
  uint64_t chunk;   /* number of the chunk or table, or UINT64_MAX */
  uint64_t found;
  uint64_t needed;
  char what[96];
} tpde_error;

/* The fixed facts of a packed tensor that its chunks depend on (format.md 2, 2.3, 4.1). */
typedef struct tpde_layout {
  uint64_t words;
  uint64_t segment_words;
  uint32_t chunk_words;
  uint8_t word_bytes;     /* 1, 2, 4, 8 */
  uint8_t rotate;         /* 0, 1 */
  uint8_t unit_log2;      /* 4 to 12 */
  uint8_t tables;         /* number of tables in the section */
  uint8_t first_table[TPDE_MAX_PLANES];
  uint8_t table_count[TPDE_MAX_PLANES];
} tpde_layout;

/* A layout with its tables expanded for decoding and encoding. */
typedef struct tpde_codec tpde_codec;

/* The number TPDE_ABI that the library was built with. */
TPDE_API int tpde_abi(void);

/* Names of the instruction sets this build has a path for and this machine can run, best first,
 * separated by spaces; the last is always "portable". */
TPDE_API const char *tpde_simd_available(void);

/* The path in use. It is the best available unless tpde_simd_select chose another. */
TPDE_API const char *tpde_simd(void);

/* Select a path by name, for tests and measurements. Not thread-safe. Returns 0, or TPDE_E_ARGUMENT. */
TPDE_API int tpde_simd_select(const char *name);

/* Number of chunks of a layout (format.md 4.1). 0 if there are no words or the layout is invalid. */
TPDE_API uint64_t tpde_chunk_count(const tpde_layout *layout);

/* An upper bound of the bytes that encoding `words` consecutive words of a tensor with `chunks` chunks
 * among them can take. */
TPDE_API uint64_t tpde_encode_bound(const tpde_layout *layout, uint64_t words, uint64_t chunks);

/* Choose planes and tables for a tensor from a sample of its words.
 *
 * `sample` holds `sample_words` words: whole chunks of layout->chunk_words, and at the end possibly a
 * shorter one; fewer than 4096 chunks. layout->words is the size of the whole tensor, which decides whether a
 * table is worth its bytes.
 * Writes layout->tables, first_table and table_count, and the table section into `section` (at least
 * TPDE_MAX_TABLE_SECTION bytes), whose size goes to *section_bytes, and to *estimate the expected size in
 * bytes of the tensor's chunks, tables and index. Deterministic: integers only. `max_variants`, 1 to 4, is
 * the most tables that one plane may have. */
TPDE_API int tpde_plan(tpde_layout *layout, const void *sample, uint64_t sample_words, int max_variants,
                       uint8_t *section, uint32_t *section_bytes, uint64_t *estimate, tpde_error *error);

/* Check a table section (format.md 3) and expand it. Allocates at most 16 KiB for each table, and with
 * `encode` nonzero 512 KiB more for each. */
TPDE_API int tpde_codec_open(const tpde_layout *layout, const uint8_t *section, uint32_t section_bytes,
                             int encode, tpde_codec **codec, tpde_error *error);
TPDE_API void tpde_codec_close(tpde_codec *codec);

/* Table `number` of a codec as expanded for decoding, for decoders elsewhere: `*entries` points at
 * 2^*index_bits entries that live as long as the codec, indexed by a lane's next bits, the first bit lowest. An
 * entry has the length in bits 0 to 4 (raw bits included), 0x100 for an escape (the length is then the
 * codeword's alone), and the symbol, or two of them, the first lower, from bit 16 on. Returns 0, or
 * TPDE_E_ARGUMENT. */
TPDE_API int tpde_codec_table(const tpde_codec *codec, int number, int *kind, int *raw_bits, int *index_bits,
                              const uint32_t **entries);

/* Check an index map of all chunks of a layout (format.md 4.3). `first_offset` is where chunks start in the
 * blob, `blob_bytes` where they end. */
TPDE_API int tpde_index_check(const tpde_layout *layout, const uint8_t *index, uint64_t first_offset,
                              uint64_t blob_bytes, uint32_t max_chunk_bytes, tpde_error *error);

/* Decode chunks `first` to `first + count - 1` into `out`, which takes their words one after the other.
 *
 * `index` points at record `first`, and has `count` records. `data` holds the bytes data_offset to
 * data_offset + data_bytes of the blob, at least all bytes of these chunks; `end_offset` is where the last
 * of them ends. Checks every chunk's checksum. Allocates at most 1 MiB a thread. `out` must not overlap
 * `data`. On failure it holds unspecified words. */
TPDE_API int tpde_decode(const tpde_codec *codec, const uint8_t *index, uint64_t first, uint64_t count,
                         const uint8_t *data, uint64_t data_offset, uint64_t data_bytes,
                         uint64_t end_offset, void *out, uint64_t out_bytes, int threads,
                         tpde_error *error);

/* Encode chunks `first` to `first + count - 1` from `words`.
 *
 * The encoded bytes, *used of them, go to the start of `out`, which has room for tpde_encode_bound bytes: they are
 * the blob's bytes from `offset` on, a multiple of the unit. What follows them in `out` is unspecified. Writes `count`
 * index records and the largest sizes seen, *max_chunk and *max_stream, which the caller initialises. Allocates at
 * most 5.1 MiB a thread. Nothing of this depends on `threads`. */
TPDE_API int tpde_encode(const tpde_codec *codec, const void *words, uint64_t first, uint64_t count,
                         uint64_t offset, uint8_t *out, uint64_t out_bytes, uint64_t *used, uint8_t *index,
                         uint32_t *max_chunk, uint32_t *max_stream, int threads, tpde_error *error);

/* Split `n` words into byte planes (plane p at planes + p * stride), and back (format.md 2.3). */
TPDE_API int tpde_split(const tpde_layout *layout, const void *words, uint64_t n, uint8_t *planes,
                        uint64_t stride);
TPDE_API int tpde_merge(const tpde_layout *layout, const uint8_t *planes, uint64_t stride, uint64_t n,
                        void *words);

/* The checksum of a chunk's `bytes` decoded bytes (format.md 4.5). */
TPDE_API uint32_t tpde_checksum(const void *words, uint64_t bytes);

/* ---- deltas ---- */

/* Add the terms of `bytes` bytes to a fingerprint (delta.md 4). They start at byte `offset` of the tensor, a multiple of
 * 8, and their number is one too, unless they are the last. Order does not matter; a whole tensor's starts at zero. */
TPDE_API void tpde_fingerprint(const void *data, uint64_t bytes, uint64_t offset, uint64_t sum[2]);

/* Chooses a model (delta.md 2) for the changes of tensors of one kind of words. Takes 1.2 MiB, and 1 MiB more for
 * tokens. Not for several threads at once. */
typedef struct tpde_delta_plan tpde_delta_plan;

/* `max_classes` is 1 for the fast mode, at most TPDE_MAX_CLASSES. NULL if memory is out or a number cannot be. */
TPDE_API tpde_delta_plan *tpde_delta_plan_new(int word_bytes, int rotate, int max_classes);
TPDE_API void tpde_delta_plan_free(tpde_delta_plan *plan);

/* Another plan of the same words and classes, without counts: for another thread. NULL if memory is out. */
TPDE_API tpde_delta_plan *tpde_delta_plan_fork(const tpde_delta_plan *plan);

/* Add what another plan of the same words and classes has counted. */
TPDE_API int tpde_delta_plan_add(tpde_delta_plan *plan, const tpde_delta_plan *other, tpde_error *error);

/* Count, at first, which symbols' words change, and how far. At most TPDE_DELTA_CHUNK_WORDS words at a time, 2^30 in all:
 * whole chunks of the tensors, or a sample of them. */
TPDE_API int tpde_delta_plan_survey(tpde_delta_plan *plan, const void *base, const void *target, uint64_t words,
                                    tpde_error *error);

/* Then choose the classes. There are `scale` times as many words as were surveyed. */
TPDE_API int tpde_delta_plan_classes(tpde_delta_plan *plan, uint64_t scale, tpde_error *error);

/* Then count tokens: the same chunks again. */
TPDE_API int tpde_delta_plan_count(tpde_delta_plan *plan, const void *base, const void *target, uint64_t words,
                                   tpde_error *error);

/* Then write the model, at most TPDE_MAX_MODEL bytes. Deterministic: integers only. */
TPDE_API int tpde_delta_plan_model(const tpde_delta_plan *plan, uint64_t scale, uint8_t *model, uint32_t *model_bytes,
                                   tpde_error *error);

/* A model, checked and expanded; read-only after it has been opened. Takes at most 16 KiB for each class, and with
 * `encode` nonzero 64 KiB more. */
typedef struct tpde_delta_model tpde_delta_model;
TPDE_API int tpde_delta_model_open(const uint8_t *bytes, uint32_t size, int encode, tpde_delta_model **model,
                                   tpde_error *error);
TPDE_API void tpde_delta_model_close(tpde_delta_model *model);

/* The table of a class, for other decoders and encoders. `decode` has an entry for each `index_bits` bits, lowest first: bits
 * 0 to 4 are what a codeword takes, 16 and up the token; bit 8 says that 14 bits of it follow instead. `encode`, NULL if
 * the model was not opened for it, has one for each token: bits 0 to 4 are what it takes, the topmost ones the codeword;
 * bit 8 says that it is `escape` and the token. They are there until the model is closed. */
TPDE_API int tpde_delta_model_table(const tpde_delta_model *model, int number, int *index_bits, uint32_t *escape,
                                    const uint32_t **decode, const uint32_t **encode);

/* Number of chunks of a tensor. */
TPDE_API uint64_t tpde_delta_chunks(uint64_t words);

/* Encode what changed from `base` to `target`, as sparse chunks (delta.md 3). `changes` and `sizes` have a number for each
 * chunk. The chunks' bytes, *used of them, go to the start of `out`; TPDE_E_SPACE if they take more than out_bytes, or a
 * chunk more than its part of it: the tensor then is not worth a delta. *check becomes the changes' check (delta.md 4)
 * under a model of one class, else 0; `first` words of the tensor lie before these. Takes 140 KiB a thread. Nothing of
 * the result depends on `threads`. */
TPDE_API int tpde_delta_encode(const tpde_delta_model *model, const void *base, const void *target, uint64_t words,
                               uint8_t *out, uint64_t out_bytes, uint64_t *used, uint32_t *changes, uint32_t *sizes,
                               uint64_t first, uint64_t *check, int threads, tpde_error *error);

/* Turn a base into its target where it lies. `words` holds the tensor's words; with `check` nonzero they are left as they
 * are, and all chunks are read to their end. Without that, a damaged chunk leaves some of them changed. Takes 80 KiB a
 * thread. */
TPDE_API int tpde_delta_apply(const tpde_delta_model *model, const uint8_t *data, uint64_t data_bytes,
                              const uint32_t *changes, const uint32_t *sizes, void *words, uint64_t count, int check,
                              int threads, tpde_error *error);

/* List these changes: which words of the tensor, ascending, what they become, and in *check_sum their check (delta.md 4),
 * which is the one that was written if the words that change are the base's, and become the target's. There is room for
 * as many as `changes` says. Reads those words alone; nothing is written to them. The model must be of one class.
 * Otherwise as tpde_delta_apply with `check`. */
TPDE_API int tpde_delta_list(const tpde_delta_model *model, const uint8_t *data, uint64_t data_bytes,
                             const uint32_t *changes, const uint32_t *sizes, const void *words, uint64_t count,
                             uint64_t *positions, void *targets, uint64_t *check_sum, int threads, tpde_error *error);

/* ---- windows ---- */

/* Of a blob in the window layout (windows.md 5): the matrix, how many entries there are, and where sections start. */
typedef struct tpde_window {
  uint64_t rows, columns, entries;
  uint64_t stripes;       /* of 16 rows */
  uint64_t stripe_chunks; /* chunks of each */
  uint64_t stripe_bytes;  /* of the bodies of each */
  uint64_t records_at, offsets_at, entries_at, bodies_at, bytes;
  uint32_t flags;
  uint8_t table[TPDE_WINDOW_TABLE];
} tpde_window;

/* Where everything of a blob would be; without flags and table. TPDE_E_ARGUMENT if there is no such blob. */
TPDE_API int tpde_window_sections(uint64_t rows, uint64_t columns, uint64_t entries, tpde_window *window);

/* Choose the windows of a matrix: `rows` x `columns` words of bf16, row by row. Writes what comes before the offsets into
 * `head`, offsets_at bytes, and into `starts` how many entries come before each stripe, and at its end how many there are:
 * stripes + 1 numbers. From these tpde_window_sections says what the blob takes. Takes 1.1 KiB of memory for each stripe.
 * TPDE_E_SPACE if there are more entries than a blob can have. */
TPDE_API int tpde_window_plan(const void *words, uint64_t rows, uint64_t columns, uint8_t *head, uint64_t *starts,
                              int threads, tpde_error *error);

/* For encoders elsewhere: choose the table and the flag of a blob. `counts` are 2 * 128 numbers, how many escapes have
 * each XOR, with the flag clear and with it set, the windows of rows being chosen. Writes where everything of the blob is,
 * with flag and table, and into `said` 128 sets: which entries of the table say each XOR, bits of their indices.
 * TPDE_E_SPACE as above. */
TPDE_API int tpde_window_choose(uint64_t rows, uint64_t columns, const uint64_t *counts, tpde_window *window,
                                uint16_t *said, tpde_error *error);

/* Encode the same words into exactly the blob's bytes. Nothing of them depends on `threads`. */
TPDE_API int tpde_window_encode(const void *words, const uint8_t *head, const uint64_t *starts, uint8_t *out,
                                uint64_t out_bytes, int threads, tpde_error *error);

/* What a blob's header says, which is checked, as is the blob's size. */
TPDE_API int tpde_window_open(const uint8_t *blob, uint64_t bytes, tpde_window *window, tpde_error *error);

/* Check all of a blob but its bodies, which may hold any bytes. */
TPDE_API int tpde_window_check(const uint8_t *blob, uint64_t bytes, tpde_window *window, int threads,
                               tpde_error *error);

/* Decode some rows, into exactly their words. Checks what it reads. */
TPDE_API int tpde_window_decode(const uint8_t *blob, uint64_t bytes, uint64_t first_row, uint64_t rows, void *out,
                                uint64_t out_bytes, int threads, tpde_error *error);

/* Cut a part out of a blob, where windows.md 7 lets it be cut: in two steps, as tpde_window_plan and tpde_window_encode. */
TPDE_API int tpde_window_cut_plan(const uint8_t *blob, uint64_t bytes, uint64_t first_row, uint64_t rows,
                                  uint64_t first_column, uint64_t columns, uint8_t *head, uint64_t *starts, int threads,
                                  tpde_error *error);
TPDE_API int tpde_window_cut(const uint8_t *blob, uint64_t bytes, uint64_t first_row, uint64_t first_column,
                             const uint8_t *head, const uint64_t *starts, uint8_t *out, uint64_t out_bytes, int threads,
                             tpde_error *error);

/* Beside chunks: bring mapped pages, from `address` on, which is one's start, into memory and into the process's page
 * tables, and let other threads map memory meanwhile. Returns 0, or what madvise(2) says: EFAULT where a file has
 * become shorter or cannot be read, others where the system does not know how. */
TPDE_API int tpde_populate(void *address, uint64_t bytes);

/* A kernel with a grid of its own, for the CUDA driver. */
typedef struct tpde_launch {
  uint64_t driver;     /* address of its cuLaunchKernelEx */
  uint64_t kernel;     /* a CUkernel or CUfunction */
  uint32_t grid;       /* blocks */
  uint32_t block;      /* threads of each */
  uint32_t shared;     /* bytes of dynamic shared memory */
  uint32_t cluster;    /* blocks of a cluster; the grid is a multiple of it */
  uint32_t early;      /* whether it may start while the kernel before it ends */
} tpde_launch;

/* Launch it on a stream, 0 for the legacy default one, with up to 32 integers as parameters: 8 bytes for each, of which
 * a kernel takes as many as it has declared. Returns what the driver does, or -1 if there are more. */
TPDE_API int tpde_launch_start(const tpde_launch *launch, uint64_t stream, const uint8_t *values, uint64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
