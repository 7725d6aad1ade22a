import json
from pathlib import Path
from typing import Any

from jetdraft.manifest import MANIFEST, SEAL, seal_hash


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / MANIFEST).read_text())


def write(folder: Path, manifest: dict[str, Any]) -> None:
    sealed = {**manifest, SEAL: seal_hash(manifest)}
    (folder / MANIFEST).write_text(json.dumps(sealed, indent=2))


def edit(folder: Path, **changes: object) -> None:
    write(folder, {**read(folder), **changes})
