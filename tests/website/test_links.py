"""Links of the repository as links of the site."""

from __future__ import annotations

import pytest

from website.links import foreign, moved

HOMES = {"CONTRIBUTING.md": "contributing.md", "examples/train.py": "examples/train-py.md"}


def test_links_lead_to_pages_of_the_site() -> None:
    text = (
        "[a](../CONTRIBUTING.md#style) [b](cuts.md) ![c](pictures/a.png) [d](../examples/train.py) "
        "[e](https://x.y/z) [f](#here)"
    )
    found, lost = moved(text, source="docs/limits.md", here="limits.md", homes=HOMES)
    assert found == (
        "[a](contributing.md#style) [b](cuts.md) ![c](pictures/a.png) "
        "[d](examples/train-py.md) [e](https://x.y/z) [f](#here)"
    )
    assert lost == []


def test_pages_may_lie_elsewhere_on_the_site() -> None:
    assert (
        moved("[a](docs/cuts.md)", source="CONTRIBUTING.md", here="contributing.md", homes=HOMES)[0]
        == "[a](cuts.md)"
    )
    assert (
        moved("[a](../cuts.md#x)", source="docs/how-to/a.md", here="how-to/a.md", homes=HOMES)[0]
        == "[a](../cuts.md#x)"
    )
    assert (
        moved("[a](train.py)", source="examples/README.md", here="examples/index.md", homes=HOMES)[
            0
        ]
        == "[a](train-py.md)"
    )


def test_code_stays_as_it_is() -> None:
    text = "`x[0](../LICENSE)`\n\n```python\ny[0](../LICENSE)\n```\n"
    assert moved(text, source="docs/a.md", here="a.md", homes=HOMES) == (text, [])


def test_files_without_a_page_are_told() -> None:
    assert moved("[a](../LICENSE)", source="docs/a.md", here="a.md", homes=HOMES)[1] == [
        "../LICENSE"
    ]


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://unpkg.com/shim"></script>',
        "<script async src=//cdn.example/x.js>",
        '<link rel="stylesheet" href="https://fonts.example/css">',
        '<img alt="a" src="http://badges.example/a.svg">',
        "a { background: url('https://x.example/a.png') }",
        '@import "https://x.example/a.css";',
    ],
)
def test_what_is_loaded_from_elsewhere_is_found(text: str) -> None:
    assert len(foreign(f"<p>{text}</p>")) == 1


def test_links_to_follow_load_nothing() -> None:
    text = (
        '<a href="https://x.y/z">z</a><link rel="canonical" href="https://x.y/"><script '
        'src="../a.js"></script><img src="a.svg">'
    )
    assert foreign(text) == []
