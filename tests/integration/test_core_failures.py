"""Encoding on several threads where the system has no memory, or no threads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The core's own calls go to `tested_...`, by macros. Argument 1: how many threads can be started.
PROGRAM = r"""
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "tpde.h"

static int memory = 1, can_start;

void *tested_malloc(size_t size) { return memory ? malloc(size) : NULL; }

int tested_create(pthread_t *id, const pthread_attr_t *with, void *(*job)(void *), void *context) {
  return can_start-- > 0 ? pthread_create(id, with, job, context) : 11;
}

#define WORDS (2u << 20) /* two bytes each: 37 batches, of which two threads hold 32 */
static uint16_t words[WORDS];
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

int main(int count, char **given) {
  tpde_layout l = {.words = WORDS, .segment_words = WORDS, .chunk_words = 8192};
  uint32_t section_bytes;
  uint64_t estimate;
  l.word_bytes = 2;
  l.unit_log2 = 4;
  chunks = tpde_chunk_count(&l);
  bound = tpde_encode_bound(&l, WORDS, chunks);
  for (int k = 0; k < 2; k++) {
    out[k] = malloc(bound);
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
    can_start = atoi(given[count - 1]);
    if (encode(1, threads) || used[0] != used[1]) return 5;
    if (memcmp(out[0], out[1], used[0]) || memcmp(map[0], map[1], TPDE_RECORD_BYTES * chunks)) return 6;
  }
  memory = 0;
  for (int threads = 1; threads < 4; threads++)
    if (encode(1, threads) != TPDE_E_MEMORY || used[1] || strcmp(error.what, "out of memory")) return 7;
  tpde_codec_close(codec);
  for (int k = 0; k < 2; k++) {
    free(out[k]);
    free(map[k]);
  }
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
    replaced = ["-Dmalloc=tested_malloc", "-Dpthread_create=tested_create"]
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
