"""Of `verify`: directories and files."""

from __future__ import annotations

from ...mutant import mutant

_VERIFY = "unit/test_verify.py"

MUTANTS = (
    mutant(
        "verify-passes-over-folders",
        "files/verify_directory.py",
        "            if not (root / name).is_dir()\n",
        "            if (root / name).is_file()\n",
        "an empty folder that is missing is not told",
        "integration/test_trees.py",
    ),
    mutant(
        "verify-says-nothing-of-what-was-left-out",
        "files/verify_directory.py",
        "problems += _left_out(manifest, against, exclude)",
        "problems += []",
        "`verify --against` takes a pack that lacks files for its source",
        "integration/test_trees.py",
    ),
    mutant(
        "weights-are-not-compared-with-the-manifest",
        "files/verify_directory.py",
        'verify_file(path, other, threads, progress, info["sha256"])',
        "verify_file(path, other, threads, progress)",
        "exchanged shards are intact",
        "malformed/test_changes.py",
    ),
    mutant(
        "verify-passes-over-permissions",
        "files/verify_directory.py",
        "(path.stat().st_mode ^ other.stat().st_mode) & stat.S_IXUSR:",
        "(path.stat().st_mode & ~other.stat().st_mode) & stat.S_IXUSR:",
        "a program that became none is equal to its source",
        "integration/test_trees.py",
    ),
    mutant(
        "verify-trusts-documents",
        "files/verify_directory.py",
        'return made is None or path.read_bytes() == made.encode("utf-8")',
        "return True",
        "a configuration that somebody changed in the packed directory is intact",
        "integration/test_directories.py",
    ),
    mutant(
        "verify-stops-at-a-bad-shard",
        "files/verify_directory.py",
        "            problems.append(Problem(str(folder / name), None, None, str(error)))\n",
        "            return [Problem(str(folder / name), None, None, str(error))]\n",
        "one bad shard hides the others'",
        "integration/test_directories.py",
        _VERIFY,
    ),
    mutant(
        "the-sources-header-is-not-compared",
        "files/verify_file.py",
        "    if packed.original is not None and packed.source_header() != source.container.header:\n",
        "    if packed.original is None and packed.source_header() != source.container.header:\n",
        "a source with other metadata is the one that was packed",
        _VERIFY,
    ),
    mutant(
        "verify-compares-the-tensors-that-both-have",
        "files/verify_file.py",
        "for name in sorted(set(packed.specs).symmetric_difference(source.specs)):",
        "for name in sorted(set(packed.specs).difference(source.specs)):",
        "a tensor of the source that was not packed is not told",
        _VERIFY,
    ),
    mutant(
        "tensors-are-not-hashed",
        "files/checked_reads.py",
        "    if digest is not None and found != digest:\n",
        "    if digest is None and found != digest:\n",
        "a plain tensor that is damaged is unpacked",
        "malformed/test_attacks_blob.py",
    ),
    mutant(
        "small-tensors-of-another-kind-are-equal",
        "files/verify_file.py",
        "[packed.specs[name] for name in names] != [source.specs.get(name) for name in names]",
        "len(names) != len([name for name in names if name in source.specs])",
        "a small tensor of another dtype and the same bytes is equal to the source's",
        "unit/test_together.py",
    ),
    mutant(
        "small-tensors-are-not-compared",
        "files/verify_file.py",
        '        if data != b"".join(source.read_small(names)):\n',
        '        if not b"".join(source.read_small(names)):\n',
        "a source that differs in a small tensor is the one that was packed",
        "unit/test_together.py",
    ),
    mutant(
        "small-tensors-are-not-in-the-files-hash",
        "files/verify_file.py",
        "        whole.update(data)\n",
        "        whole.update(data[1:])\n",
        "an intact directory of small tensors is not",
        "unit/test_together.py",
    ),
    mutant(
        "small-tensors-are-read-from-their-neighbours",
        "io/small_reads.py",
        "        if offset != end:\n",
        "        if offset < end:\n",
        "small tensors that lie apart are read as if they were side by side",
        "unit/test_together.py",
    ),
    mutant(
        "verify-names-one-difference-too-late",
        "files/verify_file.py",
        "at = int(np.argmax(differ))",
        "at = int(np.argmin(differ))",
        "`verify --against` names a byte that is equal",
        _VERIFY,
    ),
)
