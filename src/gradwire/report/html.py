"""Makes the elements of a page. The standard library's writer escapes all text, such as names of tensors.

>>> as_html(tag("p", "a < b", tag("b", "!"), class_="lead"))
'<p class="lead">a &lt; b<b>!</b></p>'
"""

from xml.etree import ElementTree

Element = ElementTree.Element
Node = Element | str


def tag(name: str, /, *children: Node, **attributes: object) -> Element:
    """Make an element. Attribute names lose a trailing underscore; others become hyphens. None omits an attribute."""
    named = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    element = Element(name, {key: _clean(str(value)) for key, value in named.items()})
    for child in children:
        if not isinstance(child, str):
            element.append(child)
        elif len(element):
            element[-1].tail = (element[-1].tail or "") + _clean(child)
        else:
            element.text = (element.text or "") + _clean(child)
    return element


def as_html(element: Element) -> str:
    return ElementTree.tostring(element, encoding="unicode", method="html")


def _clean(text: str) -> str:
    """Return the text with control characters and lone surrogates replaced."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def short(value: float) -> str:
    """Write a number with three significant digits.

    >>> short(0.17234), short(61.25), short(1234.5), short(0.0), short(1e9)
    ('0.172', '61.2', '1234', '0', '1e+09')
    """
    if 1000 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.3g}"


def milliseconds(us: float) -> str:
    """Write a time in milliseconds.

    >>> milliseconds(61_250.0), milliseconds(12.0)
    ('61.2 ms', '0.012 ms')
    """
    return f"{short(us / 1e3)} ms"


def size(nbytes: float) -> str:
    """Write a number of bytes with a unit.

    >>> size(24_300_000), size(5120), size(12)
    ('24.3 MB', '5.12 kB', '12 bytes')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{short(nbytes / factor)} {unit}"
    return f"{short(nbytes)} bytes"


def counted(number: int, what: str) -> str:
    """Write a number of things.

    >>> counted(1, "rank"), counted(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {what}{'s' * (number != 1)}"
