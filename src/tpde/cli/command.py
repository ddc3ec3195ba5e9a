"""What all commands are made as."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand


class Command(TyperCommand):
    """A command none of whose arguments is empty, as is one of a variable that is not set.

    They name files and folders, and `Path` would make the current folder of it.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments.

        Raises
        ------
        typer.BadParameter
            If one is empty.
        """
        if ctx.resilient_parsing:  # the shell completes a line
            return super().parse_args(ctx, args)
        found = self.make_parser(ctx).parse_args(args=[*args])[0]
        params: Any = self.params
        for it in params:
            if it.param_type_name == "argument" and found.get(it.name) == "":
                raise typer.BadParameter("the name is empty", ctx=ctx, param=it)
        return super().parse_args(ctx, args)
