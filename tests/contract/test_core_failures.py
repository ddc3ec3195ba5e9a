"""The core where the system has no memory, or no threads."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The core's own calls go to `tested_...`, by macros. Argument 1: how many threads can start, or what else.
PROGRAM = r"""
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "tpde.h"

static int can_start = 99;
static _Atomic long held, left = -1; /* blocks not freed; how many can be had before one is refused */

static void *counted(void *made) {
  held += made != NULL;
  return made;
}

static int refused(void) { return left >= 0 && left-- <= 0; }

void *tested_malloc(size_t size) { return refused() ? NULL : counted(malloc(size)); }

void *tested_calloc(size_t count, size_t size) { return refused() ? NULL : counted(calloc(count, size)); }

void tested_free(void *block) {
  held -= block != NULL;
  free(block);
}

int tested_create(pthread_t *id, const pthread_attr_t *with, void *(*job)(void *), void *context) {
  return can_start-- > 0 ? pthread_create(id, with, job, context) : 11;
}

static _Atomic int waits; /* whether a thread waits for others */

static _Thread_local int locked;

int tested_lock(pthread_mutex_t *lock) {
  if (locked++) abort();
  return pthread_mutex_lock(lock);
}

int tested_unlock(pthread_mutex_t *lock) {
  if (!locked--) abort();
  return pthread_mutex_unlock(lock);
}

int tested_wait(pthread_cond_t *until, pthread_mutex_t *lock) {
  if (!locked) abort();
  waits = 1;
  return pthread_cond_wait(until, lock);
}

#define WORDS (2u << 20) /* two bytes each: 37 batches, of which two threads hold 32 */
#define PAGE 65536
static uint16_t words[WORDS] __attribute__((aligned(PAGE)));
static uint8_t section[TPDE_MAX_TABLE_SECTION];
static uint8_t *out[2], *map[2];
static uint64_t chunks, bound, used[2];
static tpde_codec *codec;
static tpde_error error;

static int encode(int k, int threads) {
  uint32_t chunk = 0, stream = 0;
  return tpde_encode(codec, words, 0, chunks, 0, out[k], bound, &used[k], map[k], &chunk, &stream, threads,
                     &error);
}

static tpde_layout l = {.words = WORDS, .segment_words = WORDS, .chunk_words = 8192};
static uint32_t section_bytes;
static uint64_t estimate;
static uint16_t other[WORDS];
static uint8_t model[TPDE_MAX_TABLE_SECTION];
static uint32_t model_bytes, changes[64], sizes[64];
static tpde_delta_model *opened;

/* What takes memory, each with what gives it back. */
static int planned(int threads) {
  (void)threads;
  return tpde_plan(&l, words, 65536, 4, section, &section_bytes, &estimate, &error);
}

static int made_codec(int encode) {
  tpde_codec *made;
  int code = tpde_codec_open(&l, section, section_bytes, encode, &made, &error);
  if (!code != !!made) return 99;
  tpde_codec_close(made);
  return code;
}

static int encoded(int threads) {
  int code = encode(1, threads);
  return code || used[0] == used[1] ? code : 99;
}

static int decoded(int threads) {
  memset(other, 0, sizeof other);
  int code = tpde_decode(codec, map[0], 0, chunks, out[0], 0, used[0], used[0], other, sizeof other, threads,
                         &error);
  return code || !memcmp(words, other, sizeof words) ? code : 99;
}

static int surveyed(int threads) {
  (void)threads;
  int code = TPDE_E_MEMORY;
  tpde_delta_plan *p = tpde_delta_plan_new(2, 1, 16);
  if (!p) return code;
  code = tpde_delta_plan_survey(p, words, other, 65536, &error);
  if (!code) code = tpde_delta_plan_classes(p, 32, &error);
  if (!code) code = tpde_delta_plan_count(p, words, other, 65536, &error);
  if (!code) code = tpde_delta_plan_model(p, 32, model, &model_bytes, &error);
  tpde_delta_plan_free(p);
  return code;
}

static int made_model(int encode) {
  tpde_delta_model *made;
  int code = tpde_delta_model_open(model, model_bytes, encode, &made, &error);
  if (!code != !!made) return 99;
  tpde_delta_model_close(made);
  return code;
}

static int changed(int threads) {
  uint64_t size, check;
  return tpde_delta_encode(opened, words, other, WORDS, out[1], bound, &size, changes, sizes, 0, &check,
                           threads, &error);
}

static int applied(int threads) {
  uint64_t size = 0;
  for (int i = 0; i < WORDS / 65536; i++) size += sizes[i];
  return tpde_delta_apply(opened, out[1], size, changes, sizes, words, WORDS, 1, threads, &error);
}

static uint8_t head[16384];
static uint64_t starts[1 << 10];

static int windowed(int threads) {
  tpde_window w;
  int code = tpde_window_plan(words, 1024, 2048, head, starts, threads, &error);
  if (code) return code;
  if (tpde_window_sections(1024, 2048, starts[64], &w) || w.bytes > bound) return 99;
  code = tpde_window_encode(words, head, starts, out[1], w.bytes, threads, &error);
  if (!code) code = tpde_window_check(out[1], w.bytes, &w, threads, &error);
  memset(other, 0, sizeof other);
  if (!code) code = tpde_window_decode(out[1], w.bytes, 0, 1024, other, sizeof other, threads, &error);
  return code || !memcmp(words, other, sizeof words) ? code : 99;
}

/* Refuse a call its first block, then its second one, and so on: it must say so, and keep none. */
static int starved(int (*call)(int), int with) {
  const long before = held;
  for (long blocks = 0;; blocks++) {
    left = blocks;
    memset(&error, 0, sizeof error);
    const int code = call(with), enough = left >= 0;
    left = -1;
    if (held != before) return 1;
    if (enough) return code ? 2 : !blocks;
    if (code != TPDE_E_MEMORY) return 3;
    if (call != surveyed && strcmp(error.what, "out of memory")) return 4;
  }
}

static int without_memory(void) {
  int code;
#define CHECK(call, with) \
  if ((code = starved(call, with))) return printf("%s(%d): %d: %s\n", #call, with, code, error.what), 8
  CHECK(planned, 1);
  CHECK(made_codec, 0);
  CHECK(made_codec, 1);
  for (int threads = 1; threads < 4; threads++) {
    CHECK(encoded, threads);
    CHECK(decoded, threads);
    CHECK(windowed, threads);
  }
  memcpy(other, words, sizeof other);
  for (uint32_t i = 0; i < WORDS; i += 97) other[i] ^= 1 << i % 5;
  CHECK(surveyed, 1);
  if (surveyed(1)) return 9;
  CHECK(made_model, 0);
  CHECK(made_model, 1);
  if (tpde_delta_model_open(model, model_bytes, 1, &opened, &error)) return 10;
  for (int threads = 1; threads < 4; threads++) {
    CHECK(changed, threads);
    if (changed(threads)) return 11;
    CHECK(applied, threads);
  }
  tpde_delta_model_close(opened);
  return 0;
}

/* A page is there as soon as a thread waits for the one that needs it. */
static void *missing;

static void come(int signal) {
  (void)signal;
  while (!waits) usleep(1000);
  mprotect(missing, PAGE, PROT_READ | PROT_WRITE);
}

/* Hold one thread up, that encodes or puts to their place, until others have made all that may be held. */
static int held_up(int threads, void *page) {
  waits = 0;
  signal(SIGSEGV, come);
  if (mprotect(missing = page, PAGE, PROT_NONE)) return 20;
  int code = encode(1, threads) ? 21 : used[0] != used[1] || memcmp(out[0], out[1], used[0]) ? 22 : 0;
  signal(SIGSEGV, SIG_DFL);
  return code ? code : memcmp(map[0], map[1], TPDE_RECORD_BYTES * chunks) ? 23 : 0;
}

int main(int count, char **given) {
  l.word_bytes = 2;
  l.unit_log2 = 4;
  chunks = tpde_chunk_count(&l);
  bound = tpde_encode_bound(&l, WORDS, chunks);
  for (int k = 0; k < 2; k++) {
    out[k] = aligned_alloc(PAGE, (bound / PAGE + 1) * PAGE);
    map[k] = malloc(TPDE_RECORD_BYTES * chunks);
  }
  for (uint32_t i = 0, r = 1; i < WORDS; i++) {
    r = r * 1664525u + 1013904223u;
    words[i] = (uint16_t)(r >> 30 & r >> 20);
  }
  if (tpde_plan(&l, words, 65536, 4, section, &section_bytes, &estimate, &error)) return 2;
  if (tpde_codec_open(&l, section, section_bytes, 1, &codec, &error)) return 3;
  if (encode(0, 1)) return 4;
  for (int threads = 2; threads <= 8; threads *= 2) {
    memset(out[1], 0, bound);
    can_start = *given[1] <= '9' ? atoi(given[1]) : 99;
    if (encode(1, threads) || used[0] != used[1]) return 5;
    if (memcmp(out[0], out[1], used[0]) || memcmp(map[0], map[1], TPDE_RECORD_BYTES * chunks)) return 6;
  }
  can_start = *given[1] <= '9' ? atoi(given[1]) : 99;
  if (windowed(4)) return 7;
  if (count > 1 && !strcmp(given[1], "memory")) {
    int code = without_memory();
    if (code) return code;
  }
  if (count > 1 && !strcmp(given[1], "held up")) {
    int code = held_up(2, words);
    if (!code) code = held_up(2, out[1]);
    if (code) return code;
  }
  tpde_codec_close(codec);
  for (int k = 0; k < 2; k++) {
    free(out[k]);
    free(map[k]);
  }
  if (held) return 12;
  puts("the same");
  return 0;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the core with its calls replaced."""
    compiler = shutil.which("cc")
    assert compiler, "a C compiler is needed to build the package, so it is there"
    folder = tmp_path_factory.mktemp("core")
    (folder / "main.c").write_text(PROGRAM)
    flags = [compiler, "-std=gnu11", "-O1", "-Wall", "-Werror", f"-I{ROOT / 'csrc'}"]
    replaced = [f"-D{name}=tested_{name}" for name in ("malloc", "calloc", "free")]
    replaced += ["-Dpthread_create=tested_create", "-Dpthread_cond_wait=tested_wait"]
    replaced += [f"-Dpthread_mutex_{name}=tested_{name}" for name in ("lock", "unlock")]
    sources = sorted((ROOT / "csrc").glob("*.c"))
    subprocess.run([*flags, *replaced, "-c", *map(str, sources)], check=True, cwd=folder)
    objects = sorted(folder.glob("*.o"))
    command = [*flags, "main.c", *map(str, objects), "-lpthread", "-o", "program"]
    subprocess.run(command, check=True, cwd=folder)
    return folder / "program"


@pytest.mark.parametrize("started", [0, 1, 2, 7])
def test_as_many_threads_as_start_encode_everything(program: Path, started: int) -> None:
    result = subprocess.run([program, str(started)], check=False, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "the same\n")


@pytest.mark.skipif(sys.platform != "linux", reason="what is not there yet has another signal elsewhere")
def test_threads_that_wait_for_one_that_is_held_up_go_on(program: Path) -> None:
    result = subprocess.run([program, "held up"], check=False, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "the same\n")


def test_whatever_there_is_no_memory_for_is_told_and_nothing_is_kept(program: Path) -> None:
    result = subprocess.run([program, "memory"], check=False, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "the same\n")
