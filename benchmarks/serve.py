"""Serving with vLLM: bf16, FP8, tpde and Glyd, one after the other on the same model and machine.

    python benchmarks/serve.py --shape llama-8b [--out FILE.md]

A model of random bf16 weights with a trained one's statistics is written to a folder; nothing is downloaded.
Each way is served by a vLLM server of its own, and asked by vLLM's own `bench serve`. Needs vLLM (0.32 is
tried), and of disk 16 GB for `llama-8b`, 61 GB for `qwen3-30b-a3b`, once more two thirds for packed files.
A way that fails says why in its row. `--shape tiny` runs on vLLM's CPU build.
"""

from __future__ import annotations

import json
import tempfile
import traceback
from pathlib import Path
from typing import Any

from _machine import arguments, emit, header, note, table
from _serving import SHAPES, Server, make, served

EXACT = json.dumps({"quantization_config": {"quant_method": "tpde", "kernels": "exact"}})
# What vLLM is told, and whether of packed files.
WAYS: dict[str, tuple[str, list[str], bool]] = {
    "bf16": ("vLLM, bf16", [], False),
    "fp8": ("vLLM, FP8 (other weights)", ["--quantization", "fp8_per_tensor"], False),
    "tpde": ("tpde", ["--quantization", "tpde"], False),
    "tpde-packed": ("tpde, packed files", [], True),
    "tpde-exact": ("tpde, exact", ["--hf-overrides", EXACT], False),
    "glyd": ("Glyd", ["--quantization", "glyd"], False),
}
FIGURES = (
    ("output_throughput", "tokens generated a second, all requests together (times bf16)", 1),
    ("mean_ttft_ms", "time to the first token, ms", 1),
    ("mean_itl_ms", "time between what is streamed, ms", 2),
    ("mean_tpot_ms", "time a token after the first, ms", 2),
)
Row = dict[str, Any]


def measure(server: Server, model: Path, concurrent: list[int], lengths: tuple[int, int], rounds: int) -> Row:
    """What a way does with each number of requests at a time."""
    found: Row = {
        "load_s": server.load_s,
        "kv": server.figure(r"KV cache size: ([\d,]+) tokens"),
        "weights": server.figure(r"[Mm]odel loading took ([\d.]+ GiB)"),
    }
    if found["weights"] == "-":
        found["weights"] = server.figure(r"weights take ([\d.]+ MiB)")
    for count in concurrent:
        note(f"  {count} at a time")
        asked = server.bench(model, count, lengths, max(rounds * count, 4))
        if asked["completed"] < max(rounds * count, 4):
            raise RuntimeError(f"{asked['failed']} of the requests failed")
        found[f"{count}"] = {key: asked[key] for key, *_ in FIGURES}
    return found


def report(rows: dict[str, Row], concurrent: list[int], lengths: tuple[int, int]) -> str:
    """The tables."""
    first = [
        [
            WAYS[way][0],
            row.get("problem") or f"{row['load_s']:.1f}",
            row.get("weights", ""),
            row.get("kv", ""),
        ]
        for way, row in rows.items()
    ]
    text = table(["way", "start, s", "weights", "KV cache, tokens"], first)
    text += f"\nPrompts of {lengths[0]} tokens, {lengths[1]} are generated.\n"
    plain = rows.get("bf16", {})
    for key, title, digits in FIGURES:
        lines = []
        for way, row in rows.items():
            if "problem" in row:
                continue
            cells = []
            for count in concurrent:
                value, base = row[f"{count}"][key], plain.get(f"{count}", {}).get(key)
                times = f" ({value / base:.2f})" if base and key == "output_throughput" else ""
                cells.append(f"{value:.{digits}f}{times}")
            lines.append([WAYS[way][0], *cells])
        if lines:
            text += f"\n{title}, by requests at a time:\n\n"
            text += table(["way", *map(str, concurrent)], lines)
    return text


def main() -> int:
    """Run it; 1 if a way of ours fails."""
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--concurrent", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens generated for each")
    parser.add_argument("--rounds", type=int, default=4, help="requests for each that runs at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="keep the model here, or use the one that is there")
    parser.add_argument("--serve", default="", help="more options of the server, in one string")
    given = parser.parse_args()
    lengths = given.prompt, given.tokens
    with tempfile.TemporaryDirectory() as scratch:
        at = given.dir or Path(scratch)
        plain, packed = at / given.shape, at / f"{given.shape}-packed"
        if not (plain / "config.json").exists():
            make(plain, given.shape, given.seed)
        rows: dict[str, Row] = {}
        for way in given.ways:
            note(way)
            _, options, of_packed = WAYS[way]
            common = ["--max-model-len", str(sum(lengths) + 16), "--no-enable-prefix-caching"]
            try:
                if of_packed and not (packed / "config.json").exists():
                    import tpde

                    tpde.pack(plain, packed)
                model = packed if of_packed else plain
                log = Path(scratch) / f"{way}.log"
                with served(model, [*common, *options, *given.serve.split()], log) as server:
                    rows[way] = measure(server, model, given.concurrent, lengths, given.rounds)
            except Exception as error:
                traceback.print_exc()
                rows[way] = {"problem": str(error)[:160]}
    text = header(f"Serving with vLLM: {given.shape}", gpu=True) + "\n"
    emit(text + report(rows, given.concurrent, lengths), given.out)
    return int(any("problem" in row for way, row in rows.items() if way.startswith("tpde")))


if __name__ == "__main__":
    raise SystemExit(main())
