"""Links between files of the repository, as links between pages of the site: a page may lie
elsewhere there. And what pages load.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping

CODE = re.compile(r"^(?P<fence> *```).*?^ *```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
FOREIGN = re.compile(
    r"""<(?:script|img|iframe|embed|source|video|audio)\b[^>]*?\ssrc=["']?(?:https?:)?//[^>\s]+"""
    r"""|<link\b(?![^>]*\srel=["']?canonical)[^>]*?\shref=["']?(?:https?:)?//[^>\s]+"""
    r"""|(?:url\(|@import\s*)["']?(?:https?:)?//[^\s)]+""",
    re.IGNORECASE,
)


def moved(text: str, *, source: str, here: str, homes: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return Markdown with its links led to pages of the site, and those links for which there is
    no page.

    `source`: the path of the file in the repository, `here`: of its page on the site, `homes`:
    pages of files that aren't in docs/.
    """
    lost: list[str] = []

    def lead(link: re.Match[str]) -> str:
        path, mark, anchor = link["target"].partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return link[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        site = file.removeprefix("docs/") if file.startswith("docs/") else homes.get(file)
        if site is None:
            lost.append(path)
            return link[0]
        return f"]({posixpath.relpath(site, posixpath.dirname(here) or '.')}{mark}{anchor})"

    parts, at = [], 0
    for code in CODE.finditer(text):
        parts += [LINK.sub(lead, text[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, LINK.sub(lead, text[at:])]), lost


def foreign(text: str) -> list[str]:
    """Return what a page, or a sheet of styles, loads from elsewhere as it is shown; links to
    follow are none of it.
    """
    return FOREIGN.findall(text)
