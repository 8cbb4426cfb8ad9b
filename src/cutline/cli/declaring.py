"""How commands are declared: FLOW is the first argument and may be left out; modules load when they are needed.

``cutline --help`` is read by people who wait for it, so it imports no command: ``LazyCommands`` shows the names and
texts of a table, and loads the one command that runs. Helps are plain text, without ``rich_markup_mode``: to draw
frames takes as long as all the rest.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

_FLOW = "flow"
_FLOW_OPTION = "flow_option"
#: Earlier versions had the flow's name here; scripts may still say it so.
_HiddenFlow = Annotated[str | None, typer.Option("--flow", hidden=True)]

_COMPLETION = ("--install-completion", "--show-completion")

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A command that is loaded when it runs."""

    #: "module:attribute", a function or the Typer of a group.
    target: str
    #: The first line of its docstring; a test compares the two.
    help: str

    def load(self) -> Any:
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)


class FlowCommand(TyperCommand):
    """A command whose first argument is FLOW: with one word less than the command takes, FLOW is the one left out."""

    def make_parser(self, ctx: Any) -> Any:
        parser = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_args(args: list[str]) -> Any:
            values, rest, order = parse(args)
            if not ctx.resilient_parsing:  # a line that is being completed: its last word is still missing
                self._assign(ctx, values)
            return values, rest, order

        parser.parse_args = parse_args  # type: ignore[method-assign]
        return parser

    def _assign(self, ctx: Any, values: dict[str, Any]) -> None:
        words = [one for one in self.params if isinstance(one, TyperArgument)]
        if not words or words[0].name != _FLOW:
            return
        given = [values[str(one.name)] for one in words if values.get(str(one.name)) is not None]
        flow = values.pop(_FLOW_OPTION, None)
        if flow is not None and len(given) == len(words):
            ctx.fail("FLOW is given twice, as an argument and with --flow")
        if flow is not None or len(given) <= sum(one.required for one in words[1:]):
            given = [flow, *given]
        for number, one in enumerate(words):
            values[str(one.name)] = given[number] if number < len(given) else None


def flow_command(app: typer.Typer, name: str | None = None) -> Callable[[Function], Function]:
    """Add a command to ``app``; the function stays as it is."""

    def add(function: Function) -> Function:
        app.command(name, cls=FlowCommand)(_with_flow_option(function))
        return function

    return add


def _with_flow_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the hidden ``--flow`` beside its argument FLOW; ``FlowCommand`` makes one of the two."""
    signature = inspect.signature(function, eval_str=True)
    flow = signature.parameters.get(_FLOW)
    if flow is None or not any(isinstance(one, typer.models.ArgumentInfo) for one in flow.annotation.__metadata__):
        return function

    @functools.wraps(function)
    def command(**arguments: Any) -> Any:
        del arguments[_FLOW_OPTION]
        return function(**arguments)

    option = inspect.Parameter(_FLOW_OPTION, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_HiddenFlow)
    parameters = [*signature.parameters.values(), option]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


class QuickGroup(TyperGroup):
    """A group of commands that looks at its own options only if the line has some."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._has_own_options = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Typer converts the values of options that are not given too, and what it imports for that takes long."""
        self._has_own_options = not args or args[0].startswith("-")
        alone = next((one for one in args if one in _COMPLETION), None)
        if self._has_own_options and alone is not None and len(args) > 1 and not ctx.resilient_parsing:
            ctx.fail(f"{alone} takes no argument: it is for the shell that runs it")  # Typer would install it
        try:
            return super().parse_args(ctx, args)
        finally:
            self._has_own_options = True

    def get_params(self, ctx: Any) -> Any:
        return super().get_params(ctx) if self._has_own_options else []


class LazyCommands(QuickGroup):
    """The top level of the command line."""

    #: Set by the subclass, in the order of the help.
    declared: ClassVar[Mapping[str, Declared]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._is_listing = False
        # Also what a mistyped name is compared with.
        self.commands = {name: TyperCommand(name, help=one.help) for name, one in self.declared.items()}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if self._is_listing or cmd_name not in self.declared:
            return self.commands.get(cmd_name)
        return loaded(cmd_name, self.declared[cmd_name].load())

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with self._listing():
            super().format_help(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The first sentence of each, whole."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, f"{one.help.split('. ')[0].rstrip('.')}.") for name, one in self.declared.items()]
            )

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        with self._listing():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _listing(self) -> Iterator[None]:
        self._is_listing = True
        try:
            yield
        finally:
            self._is_listing = False


def loaded(name: str, what: Any) -> Any:
    """The command of a function, or of the Typer of a group."""
    if not isinstance(what, typer.Typer):
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        flow_command(single, name)(what)
        what = single
    command = typer.main.get_command(what)
    command.name = name
    return command
