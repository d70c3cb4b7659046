"""A drawing program's SVG file -> SVG to set inside an HTML page, beside others, in the page's colours and font."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from xml.etree import ElementTree


def inline_svg(document: str, alt: str, colours: Mapping[str, str]) -> str:
    """The drawing without namespaces, metadata or global style, with ids no other picture has, a size that shrinks
    with the page and, in style attributes, `colours` replaced by what the page decides. Text is left as it is."""
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
            plain.pop("id", None)  # groups are not referred to
        element.attrib.clear()
        element.attrib.update({key: _attribute(key, value, prefix, colours) for key, value in plain.items()})
    width = float(root.attrib["viewBox"].split()[2])
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    style = f"--width:{width:.0f}px;width:var(--width);max-width:100%;height:auto;stroke-linejoin:round"
    root.attrib.update({"role": "img", "aria-label": alt, "style": style})
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    """A tag or attribute without its namespace."""
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
        for drawn, wanted in colours.items():
            value = value.replace(drawn, wanted)
    return value
