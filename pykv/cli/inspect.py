"""`pykv inspect`: what a model file holds, and what its KV cache will cost."""

from __future__ import annotations

from typing import Any

from pykv.cli.options import ModelArgument, ModelOption, Output
from pykv.cli.render import Screen, plain

EXAMPLE = """\
pykv inspect
pykv inspect model.gguf --json"""


def command(
    model_option: ModelOption,
    output: Output,
    model: ModelArgument = None,
) -> None:
    """Show a model file: its metadata, its tensors, and the cache's bytes per token.

    Nothing is loaded: the file's header is read, and no weight.
    """
    with Screen(output) as screen:
        from pykv.engine.hub import resolve
        from pykv.engine.inspect import report

        with screen.progress() as progress:
            path = resolve(
                model_option.pick(model), offline=model_option.offline, progress=progress
            )
        found = report(path)
        if output.json:
            screen.json(found)
            return
        screen.line(f"{found['path']} (GGUF version {found['version']})")
        screen.line()
        screen.table(["metadata", "value"], [[k, _value(v)] for k, v in found["metadata"].items()])
        screen.line()
        tensors = found["tensors"]
        rows = [[t["type"], t["count"], t["values"], t["bytes"]] for t in tensors["types"]]
        rows.append(["total", tensors["count"], tensors["values"], tensors["bytes"]])
        screen.table(["tensors", "count", "values", "bytes"], rows)
        screen.line()
        screen.table(
            ["model", "value"],
            [[k.replace("_", " "), _value(v)] for k, v in found["model"].items() if v is not None],
        )
        if found["cache"]:
            screen.line()
            screen.table(
                ["cache type", "bits a value", "bytes a token, K", "V", "both"],
                [
                    [c["type"], c["bits_per_value"], c["key_bytes"], c["value_bytes"], c["bytes"]]
                    for c in found["cache"]
                ],
            )


def _value(value: Any) -> str:
    if isinstance(value, list):
        return plain(f"[{', '.join(str(v) for v in value)}]")
    if isinstance(value, dict):
        first = ", ".join(plain(v, 20) for v in value["first"])
        return f"[{first}, ...] ({value['length']:,} values)"
    return plain(value)
