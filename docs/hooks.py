"""Files of the repository that pages link to, as files of the site: links are the same in both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("benchmarks/results/*", "examples/*", "csrc/tpde.h", "CONTRIBUTING.md")


def on_files(files: Files, config: Any) -> Files:
    """Add what is linked as `../benchmarks/results/codec.md`; it is not in the navigation."""
    for path in sorted(it for pattern in LINKED for it in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        file = File(
            f"../{name}",
            src_dir=None,
            dest_dir=config.site_dir,
            use_directory_urls=False,
            inclusion=InclusionLevel.NOT_IN_NAV,
        )
        file.abs_src_path = str(path)
        file.dest_uri = f"repository/{name.removesuffix('.md')}{'.html' if path.suffix == '.md' else ''}"
        files.append(file)
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse pages that fetch anything from elsewhere."""
    found = re.search(r'<(?:script|img|link)[^>]+="https?://[^"]+"', output)
    if found:
        raise PluginError(f"`{page.file.src_uri}` fetches from elsewhere: {found[0]}")
    return output
