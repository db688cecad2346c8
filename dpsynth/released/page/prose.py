"""The card's Markdown as sections of a page, so that both cards say the same in the same words.

The Markdown may hold untrusted names: no HTML, link, image or autolink is ever made of it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markupsafe import Markup, escape

_OFF = ["html_block", "html_inline", "link", "image", "autolink", "reference", "entity"]
_INDENT = "\u2003"


@dataclass(frozen=True)
class Section:
    """One `##` section: its heading, an id for links, and its body as safe HTML."""

    title: str
    id: str
    body: Markup


def sections(markdown: str, captions: Mapping[str, Sequence[str]]) -> list[Section]:
    """The `##` sections of a Markdown text, in order; what stands before the first is left out.

    `captions`: of the tables of a section in turn, by its title; other tables are captioned by
    the title itself.
    """
    reader = MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer)
    reader.enable("table").disable(_OFF)
    found: list[tuple[str, list[Token]]] = []
    tokens = reader.parse(markdown)
    for number, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            found.append((tokens[number + 1].content, []))
        elif found:
            found[-1][1].append(token)
    return [_section(reader, title, body[2:], captions) for title, body in found]


def _section(
    reader: MarkdownIt, title: str, tokens: list[Token], captions: Mapping[str, Sequence[str]]
) -> Section:
    said = list(captions.get(title, ()))
    for token in tokens:
        if token.type == "table_open":
            token.meta["caption"] = said.pop(0) if said else title
        if token.type == "inline" and token.content.startswith("- ") and token.children:
            # A round of the row above: in Markdown a dash, here an indent.
            token.children[0].content = _INDENT + token.children[0].content.removeprefix("- ")
    html = reader.renderer.render(tokens, reader.options, {})
    # The renderer escapes every text, and makes no element but those of the rules left on.
    return Section(title, slug(title), Markup(html))  # noqa: S704


def slug(title: str) -> str:
    """An id for a heading.

    >>> slug("Epsilon by mechanism")
    'epsilon-by-mechanism'
    """
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"


class _Renderer(RendererHTML):
    """markdown-it's, with captions, scopes and a frame that scrolls for tables.

    Rules are found by their names, and called with tokens, index, options and environment.
    """

    def table_open(self, tokens: Sequence[Token], idx: int, *_: Any) -> str:
        """A table in its frame, named by its caption."""
        caption = escape(tokens[idx].meta["caption"])
        frame = f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}">'
        return f"{frame}<table><caption>{caption}</caption>\n"

    def table_close(self, *_: Any) -> str:
        """The end of both."""
        return "</table></div>\n"

    def th_open(self, *_: Any) -> str:
        """A column's heading."""
        return '<th scope="col">'
