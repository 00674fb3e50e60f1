"""`pykv chat`: a conversation at the keyboard, or one answer to a piped message."""

from __future__ import annotations

import difflib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pykv.cli.generate import prompt_text
from pykv.cli.options import ModelArgument, ModelOption, Output, Request
from pykv.cli.render import Screen
from pykv.config import CacheConfig, LoadConfig, SamplingConfig
from pykv.errors import ConfigError, PykvError

if TYPE_CHECKING:
    from pykv.engine.model import Chat, Generation, Model

EXAMPLE = """\
pykv chat
pykv chat model.gguf -sys "Answer in one sentence." -ctk bf16 -ctv bf16
pykv chat -p "What is a KV cache?" --temp 0
git diff | pykv chat -sys 'Describe this change.'"""

HELP = """\
/help         this list
/clear        forget the conversation
/undo         take back the last message and its answer
/retry        answer the last message again
/system TEXT  set the system message; without TEXT, remove it
/save FILE    write the conversation to a new file (.json: as JSON)
/stats        figures of the last answer
/exit         leave; so do Ctrl-D and Ctrl-C pressed twice
A line that ends in \\ goes on in the next one.  //text sends /text.  Ctrl-C stops an answer."""


def command(
    request: Request,
    model_option: ModelOption,
    load: LoadConfig,
    cache: CacheConfig,
    sampling: SamplingConfig,
    output: Output,
    model: ModelArgument = None,
) -> None:
    """Talk with a model.

    With -p, -f or a piped message: one answer, and the program ends.  Otherwise each line that
    you type is a message; /help lists what else can be typed.
    """
    with Screen(output) as screen:
        message = prompt_text(request, screen)
        if message is not None and not message.strip():
            raise ConfigError("the message is empty: give one with -p, -f or on standard input")
        if message is None and output.json:
            raise ConfigError("--json needs one message: give it with -p, -f or a pipe")
        with screen.loaded(
            model_option.pick(model),
            offline=model_option.offline,
            load=load,
            cache=cache,
            sampling=sampling,
        ) as opened:
            chat = opened.chat(request.system_text())
            if message is None:
                _Talk(screen, opened, chat, request).run()
            else:
                generation = chat.send(message, max_tokens=request.max_tokens, stop=request.stops())
                screen.answer(generation, opened.path)


class _Talk:
    """The loop at the keyboard.  An error ends an answer, never the loop."""

    def __init__(self, screen: Screen, model: Model, chat: Chat, request: Request) -> None:
        self._screen, self._model, self._chat = screen, model, chat
        self._limit, self._stop = request.max_tokens, request.stops()
        self._refused: Path | None = None  # the file that /save would not replace at first
        self._commands: dict[str, Callable[[str], bool | None]] = {
            "help": lambda _: self._screen.say(HELP),
            "clear": self._clear,
            "undo": self._undo,
            "retry": self._retry,
            "system": self._system,
            "save": self._save,
            "stats": self._stats,
            "exit": lambda _: True,
        }

    def run(self) -> None:
        """Reads lines until /exit, Ctrl-D, or Ctrl-C twice at an empty prompt."""
        self._screen.note(
            f"{self._model.path.name} ({self._model.architecture}, {self._model.n_ctx:,} tokens of "
            "context).  /help lists the commands."
        )
        warned = False
        while True:
            try:
                line = self._read()
            except EOFError:
                self._screen.say("")
                return
            except KeyboardInterrupt:
                self._screen.say("")
                if warned:
                    return
                warned = True
                self._screen.say("Ctrl-C once more, Ctrl-D or /exit leaves.")
                continue
            warned = False
            try:
                if self._handle(line):
                    return
            except PykvError as error:
                self._screen.trouble(str(error))
            except OSError as error:
                self._screen.trouble(f"{error.filename}: {error.strerror}")

    def _read(self) -> str:
        line = self._screen.ask("> ")
        while line.endswith("\\"):
            line = line[:-1] + "\n" + self._screen.ask("| ")
        return line

    def _handle(self, line: str) -> bool:
        """Does what a line says; True: leave."""
        if not line.strip():
            return False
        if line.startswith("//"):
            line = line[1:]
        elif line.startswith("/"):
            name, _, rest = line[1:].partition(" ")
            return bool(self._commands.get(name, self._unknown(name))(rest.strip()))
        self._answer(lambda: self._chat.send(line, max_tokens=self._limit, stop=self._stop))
        return False

    def _unknown(self, name: str) -> Callable[[str], None]:
        close = difflib.get_close_matches(name, self._commands, 1)
        hint = f"did you mean /{close[0]}?" if close else "/help lists the commands"
        return lambda _: self._screen.say(f"/{name} is no command: {hint}; //{name} sends it.")

    def _answer(self, start: Callable[[], Generation]) -> None:
        """Streams an answer.  Ctrl-C stops it, a second one at once."""
        generation: Generation | None = None
        presses = 0

        def stop(signum: int, frame: FrameType | None) -> None:
            nonlocal presses
            presses += 1
            if generation is None or presses > 1:
                raise KeyboardInterrupt
            generation.cancel()

        before = signal.signal(signal.SIGINT, stop)
        try:
            generation = start()
            for piece in generation:
                self._screen.text(piece)
        except KeyboardInterrupt:
            if generation is not None:
                generation.close()
            self._screen.line()
            self._screen.say("(stopped)")
            return
        finally:
            signal.signal(signal.SIGINT, before)
        if not generation.text.endswith("\n"):
            self._screen.line()
        stats = generation.stats
        if stats.finish == "cancelled":
            self._screen.say("(stopped)")
        elif stats.finish == "context":
            self._screen.say(
                f"The context of {self._model.n_ctx:,} tokens is full: the answer was cut here.  "
                "/undo or /clear makes room, -c gives more."
            )
        if self._screen.output.verbose:
            self._screen.summary(stats)

    def _clear(self, rest: str) -> None:
        self._chat.clear()
        self._screen.say("The conversation is forgotten.")

    def _undo(self, rest: str) -> None:
        undone = self._chat.undo()
        self._screen.say("Taken back." if undone else "There is nothing to take back.")

    def _retry(self, rest: str) -> None:
        if any(m["role"] == "user" for m in self._chat.messages):
            self._answer(lambda: self._chat.retry(max_tokens=self._limit, stop=self._stop))
        else:
            self._screen.say("There is no message to answer again.")

    def _system(self, text: str) -> None:
        self._chat.set_system(text or None)
        self._screen.say("The system message is set." if text else "The system message is gone.")

    def _save(self, name: str) -> None:
        if not name:
            self._screen.say("/save needs the name of a file.")
            return
        path = Path(name).expanduser()
        exists = path.exists()
        if exists and path != self._refused:
            self._refused = path
            self._screen.say(f"{path} exists: the same /save once more replaces it.")
            return
        self._refused = None
        messages = self._chat.messages
        if path.suffix == ".json":
            text = json.dumps(messages, ensure_ascii=False, indent=2) + "\n"
        else:
            text = "\n".join(f"{m['role']}:\n{m['content']}\n" for m in messages)
        path.write_text(text, encoding="utf-8", errors="replace")
        count = f"{len(messages)} message{'' if len(messages) == 1 else 's'}"
        self._screen.say(f"{count} written to {path}{', which was replaced' if exists else ''}.")

    def _stats(self, rest: str) -> None:
        if self._chat.stats is None:
            self._screen.say("There was no answer yet.")
        else:
            self._screen.stats(self._chat.stats)
