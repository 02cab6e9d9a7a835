"""The sections of a page by name, drawn from the data of one run, or of several to compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from paceline.errors import UsageError
from paceline.observe.page.markup import Markup, element
from paceline.observe.page.subjects import (
    checkpoint_section,
    comparison_sections,
    event_section,
    goodput_section,
    lateness_section,
    loss_section,
    memory_section,
    overview_section,
    pipeline_section,
    setup_section,
    time_section,
    traffic_section,
)

Data = Mapping[str, Any]

# Sections of a page on one run: title, and the function that draws it.
RUN_SECTIONS: Final[Mapping[str, tuple[str, Callable[[Data], Markup | None]]]] = {
    "overview": ("", overview_section.draw_overview),
    "loss": ("Loss", loss_section.draw_loss),
    "throughput": ("Samples a second", time_section.draw_throughput),
    "events": ("Events", event_section.draw_events),
    "time": ("Where the time of a step went", time_section.draw_step_time),
    "goodput": ("Goodput", goodput_section.draw_goodput),
    "late": ("Who was late", lateness_section.draw_lateness),
    "pipelines": ("Pipelines", pipeline_section.draw_pipelines),
    "traffic": ("Traffic", traffic_section.draw_traffic),
    "memory": ("Memory", memory_section.draw_memory),
    "checkpoints": ("Checkpoints", checkpoint_section.draw_checkpoints),
    "setup": ("How it was set up", setup_section.draw_setup),
}
# Sections of a page that compares runs.
COMPARISON_SECTIONS: Final[Mapping[str, tuple[str, Callable[[Sequence[Data]], Markup | None]]]] = {
    "overview": ("", comparison_sections.draw_runs),
    "loss": ("Loss", comparison_sections.draw_losses),
    "time": ("Where the time of a step went", comparison_sections.draw_times),
    "traffic": ("Bytes of a step", comparison_sections.draw_traffics),
    "differences": ("What differs in their settings", comparison_sections.draw_differences),
}


def sections(datas: Sequence[Data]) -> dict[str, str]:
    """Return the sections of the page as HTML, by their ids, in order.

    Sections that have nothing to show are left out.

    Raises:
        UsageError: A field of a summary is not of this version.
    """
    drawn: dict[str, str] = {}
    for name, title in section_titles(datas).items():
        content = _draw_section(datas, name)
        if content is not None:
            drawn[name] = element(
                "section", {"id": name}, element("h2", None, title) if title else None, content
            )
    return drawn


def section_titles(datas: Sequence[Data]) -> dict[str, str]:
    """Return the titles of all sections that the page may have. The first one has none."""
    return {
        name: title
        for name, (title, _) in (RUN_SECTIONS if len(datas) == 1 else COMPARISON_SECTIONS).items()
    }


def _draw_section(datas: Sequence[Data], name: str) -> Markup | None:
    """Draw a section; None if it has nothing to show."""
    try:
        return (
            RUN_SECTIONS[name][1](datas[0])
            if len(datas) == 1
            else COMPARISON_SECTIONS[name][1](datas)
        )
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        names = ", ".join(str(data["name"]) for data in datas)
        raise UsageError(
            f"the summary of {names} has a field that this version of paceline can't draw "
            f"({error!r}, in the section "
            f"{name}): make the page with the version of paceline that made the run"
        ) from error
