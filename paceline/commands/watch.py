"""`paceline watch`, and the option `--watch` of commands that start a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline import options
from paceline.cluster import secret
from paceline.observe.watch.address import WatchAddress
from paceline.observe.watch.process import WatchedJob


def watch_run(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN", help="A run: its folder, or its name in runs; default: the newest."
        ),
    ] = None,
    *,
    listen: Annotated[
        str,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Address of the page; default: a free port of loopback.",
        ),
    ] = "0",
    secret_file: options.SecretFile = None,
) -> None:
    """Serve a page that shows a run while it trains, on any machine that can read its folder."""
    from paceline.observe.choosing import choose_run
    from paceline.observe.watch.command import serve_run as serve

    address = WatchAddress.parse_address(listen, "--listen")
    key = secret.make_secret() if secret_file is None else secret.read_secret(secret_file)
    raise typer.Exit(serve(choose_run(folder), address, key, _print_message))


def make_watched_job(asked: str, key: bytes, *, elsewhere: bool = False) -> WatchedJob:
    """Make the server of a page that shows a job, to use as a context manager.

    Args:
        asked: Address of the page, [HOST:]PORT.
        key: Secret that readers need.
        elsewhere: Whether the job has workers on other hosts.
    """
    return WatchedJob(
        WatchAddress.parse_address(asked, "--watch"), key, elsewhere=elsewhere, say=_print_message
    )


def _print_message(text: str) -> None:
    typer.echo(f"paceline: {text}", err=True)
