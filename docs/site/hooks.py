"""Generate the pages that exist only on the site: one for each command and each public name.

The home page is README.md, and cli.md and reference.md are split at their headings. Each page is also written
as Markdown, next to its HTML.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section

DOCS = Path(__file__).parent.parent
ROOT = DOCS.parent
# Page of this site -> file of the repository.
TOP = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
}
# Files that the home page links.
FILES = ("LICENSE", "CITATION.cff")
# Search in pages opened as files needs this script, which the theme would otherwise fetch from the web.
SHIM = "iframe-worker.js"
LINK = re.compile(r"\]\((?!https?://)([^)#]*)(#[^)]*)?\)")
# Browsers break lines after hyphens, also in the name of an option.
SHORT_OPTION = re.compile(r"<code>(--?[\w-]{1,24})</code>")
SPLIT = {"cli.md": ("cli", "Command line"), "reference.md": ("api", "Python")}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name, source in TOP.items():
        text = LINK.sub(_link_of_top, (ROOT / source).read_text())
        files.append(File.generated(config, name, content=text))
    for name, (directory, _) in SPLIT.items():
        files.remove(files.get_file_from_path(name))
        for page, text in split(name, directory):
            files.append(File.generated(config, page, content=text))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """List the pages of commands and public names below Reference."""
    reference = next(item for item in nav.items if item.title == "Reference")
    for directory, title in SPLIT.values():
        pages = [file.page for file in files if file.src_uri.startswith(f"{directory}/") and file.page]
        section = Section(title, sorted(pages, key=lambda page: page.file.src_uri != f"{directory}/index.md"))
        section.parent = reference
        for page in pages:
            page.parent = section
        reference.children.append(section)
    return nav


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Redirect links into split pages to the page of their heading."""
    depth = page.file.src_uri.count("/")

    def redirect(match: re.Match[str]) -> str:
        target, anchor = match[1], (match[2] or "")[1:]
        name = target.rpartition("/")[2]
        above = {f"../{source}": f"{page}{anchor and '#'}{anchor}" for page, source in TOP.items()}
        if target in above:
            return f"]({above[target]})"
        if name not in SPLIT and not (target == "" and depth and anchor):
            return match[0]
        directory = SPLIT[name][0] if name in SPLIT else page.file.src_uri.partition("/")[0]
        known = {file.src_uri for file in files}
        own = f"{directory}/{anchor}.md"
        found = own if own in known else f"{directory}/index.md"
        if target == "" and found.endswith("index.md"):
            return match[0]
        return f"]({'../' * depth}{found})"

    return LINK.sub(redirect, markdown)


def on_post_page(output: str, page: Any, config: MkDocsConfig) -> str:
    """Write the Markdown of a page next to its HTML."""
    target = Path(config.site_dir, page.file.dest_uri).with_suffix(".md")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page.markdown or "")
    shim = "../" * page.file.dest_uri.count("/") + SHIM
    output = SHORT_OPTION.sub(r'<code style="white-space: nowrap">\1</code>', output)
    return output.replace("https://unpkg.com/iframe-worker/shim", shim)


def on_post_build(config: MkDocsConfig) -> None:
    """Add llms.txt for language models, linked files, and the script that search needs."""
    index = (DOCS / "llms.txt").read_text()
    for name, (directory, _) in SPLIT.items():
        index = index.replace(f"]({name})", f"]({directory}/index.md)")
    Path(config.site_dir, "llms.txt").write_text(index)
    for name in FILES:
        Path(config.site_dir, name).write_text((ROOT / name).read_text())
    Path(config.site_dir, SHIM).write_text((Path(__file__).parent / SHIM).read_text())


def split(name: str, directory: str) -> Iterator[tuple[str, str]]:
    """Yield a page for each heading of the second level, and one for the text above the first."""
    anchor = _anchors()
    parts = re.split(r"^(?=## )", (DOCS / name).read_text(), flags=re.MULTILINE)
    text = [LINK.sub(_link_up, part) for part in parts]
    yield f"{directory}/index.md", text[0]
    for part, original in zip(text[1:], parts[1:], strict=True):
        page = f"{directory}/{anchor(original.splitlines()[0])}.md"
        yield page, re.sub(r"^##", "#", part, flags=re.MULTILINE)


def _anchors() -> Callable[[str], str]:
    """Return a function that maps headings to their anchors; repeated headings get a number."""
    seen: dict[str, int] = {}

    def anchor(heading: str) -> str:
        name = re.sub(r"[^\w -]", "", heading.lstrip("# ").lower()).replace(" ", "-")
        seen[name] = seen.get(name, -1) + 1
        return f"{name}-{seen[name]}" if seen[name] else name

    return anchor


def _link_up(match: re.Match[str]) -> str:
    """Adapt a link of a page in docs/ to a page one directory below."""
    target, anchor = match[1], match[2] or ""
    return f"](../{target}{anchor})" if target else match[0]


def _link_of_top(match: re.Match[str]) -> str:
    """Adapt a link of a file above docs/ to the page of this site."""
    target, anchor = match[1], match[2] or ""
    pages = {source: page for page, source in TOP.items()}
    if target in pages:
        return f"]({pages[target]}{anchor})"
    return f"]({target.removeprefix('docs/')}{anchor})"
