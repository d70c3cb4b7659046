"""Convert an SVG file to SVG that can be embedded in an HTML page, in the colours and font of the page."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from xml.etree import ElementTree


def inline_svg(document: str, alt: str, colours: Mapping[str, str]) -> str:
    """Return SVG to embed in a page.

    Namespaces, metadata and global style are removed, ids get a unique prefix, the size shrinks with the page, and
    `colours` are replaced in style attributes. Text is unchanged.
    """
    root = ElementTree.fromstring(document)
    prefix = f"p{zlib.crc32((alt + document).encode()):08x}-"
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        plain = {_local(key): value for key, value in element.attrib.items()}
        if element.tag == "g":
            plain.pop("id", None)  # nothing refers to groups
        element.attrib.clear()
        element.attrib.update({key: _attribute(key, value, prefix, colours) for key, value in plain.items()})
    width = float(root.attrib["viewBox"].split()[2])
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    style = f"--width:{width:.0f}px;width:var(--width);max-width:100%;height:auto;stroke-linejoin:round"
    root.attrib.update({"role": "img", "aria-label": alt, "style": style})
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    """Return a tag or attribute name without its namespace."""
    return name.rpartition("}")[2]


def _attribute(key: str, value: str, prefix: str, colours: Mapping[str, str]) -> str:
    if key == "id":
        return prefix + value
    if key == "href":
        return value.replace("#", f"#{prefix}", 1)
    if key == "clip-path":
        return value.replace("url(#", f"url(#{prefix}", 1)
    if key == "style":
        value = re.sub(r"(font-family:|font: [^;']*?px) [^;]*", r"\1 var(--sans, sans-serif)", value)
        for old, new in colours.items():
            value = value.replace(old, new)
    return value
