"""`pykv pull`: fetch a model."""

from __future__ import annotations

from pykv.cli.options import ModelArgument, ModelOption, Output
from pykv.cli.render import Screen
from pykv.errors import DownloadError

EXAMPLE = """\
pykv pull
pykv pull gemma-3-270m
pykv pull -hf user/repo:Q4_K_M"""


def command(
    model_option: ModelOption,
    output: Output,
    model: ModelArgument = None,
) -> None:
    """Fetch a model, check it, and print where it lies.

    Without MODEL, the default one.  A whole file that is already here is not fetched again;
    `pykv models` lists the names.
    """
    with Screen(output) as screen:
        from pykv.engine import hub

        with screen.progress() as progress:
            path = hub.resolve(
                model_option.pick(model), offline=model_option.offline, progress=progress
            )
            damaged = [m for m in hub.installed() if m.path == path and m.checksum == "wrong"]
            if damaged and not model_option.offline:
                screen.note(f"{path} is damaged: fetching it again")
                path = hub.pull(hub.find(damaged[0].name), progress)
            elif damaged:
                raise DownloadError(
                    f"{path} is damaged, and offline was asked for; pull it when there is a network"
                )
        if output.json:
            screen.json({"path": str(path), "bytes": path.stat().st_size})
        else:
            screen.line(str(path))
