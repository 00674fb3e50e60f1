"""`pykv generate`: continue a prompt."""

from __future__ import annotations

from pykv.cli.options import ModelArgument, ModelOption, Output, Request, decoded, piped
from pykv.cli.render import Screen
from pykv.config import CacheConfig, LoadConfig, SamplingConfig
from pykv.errors import ConfigError

EXAMPLE = """\
pykv generate -p "Once upon a time" -n 64 --temp 0
pykv generate model.gguf -f prompt.txt -ctk bf16 -ctv bf16 --json
echo "The capital of France is" | pykv generate -n 8"""


def command(
    request: Request,
    model_option: ModelOption,
    load: LoadConfig,
    cache: CacheConfig,
    sampling: SamplingConfig,
    output: Output,
    model: ModelArgument = None,
) -> None:
    """Continue a prompt: -p TEXT, -f FILE, or standard input.

    The text goes to standard output, the figures to standard error.  With -sys the prompt is
    sent as one message of a conversation, through the model's chat template.
    """
    with Screen(output) as screen:
        prompt = prompt_text(request, screen)
        if prompt is None:
            raise ConfigError("no prompt: give one with -p, -f or on standard input")
        with screen.loaded(
            model_option.pick(model),
            offline=model_option.offline,
            load=load,
            cache=cache,
            sampling=sampling,
        ) as opened:
            system, limit, stop = request.system_text(), request.max_tokens, request.stops()
            if system is None:
                generation = opened.generate(prompt, max_tokens=limit, stop=stop)
            else:
                generation = opened.chat(system).send(prompt, max_tokens=limit, stop=stop)
            screen.answer(generation, opened.path)


def prompt_text(request: Request, screen: Screen) -> str | None:
    """The prompt of -p, -f or a pipe; None where there is none."""
    given = request.text()
    if given is None:
        data = piped()
        if data is None:
            return None
        given = decoded(data)
    screen.warn_bad_bytes(given[1])
    return given[0]
