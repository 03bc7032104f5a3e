"""Pure: the nodes of a profile's YAML, converted to the types of profile/values.py."""

from __future__ import annotations

from typing import Any

import yaml

from saferun.profile.values import MisfitError, Text, hidden, shown

MAX_NODES = 20_000


class _Loader(yaml.SafeLoader):
    """A loader of texts from `hidden`.

    It stops at MAX_NODES: a list of 130,000 items would take 6 s.
    """

    seen = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.seen += 1
        if self.seen > MAX_NODES:
            what = f"more than {MAX_NODES:,} entries"
            raise yaml.composer.ComposerError(None, None, what, parent and parent.start_mark)
        return super().compose_node(parent, index)

    def compose_scalar_node(self, anchor: Any) -> Any:
        node = super().compose_scalar_node(anchor)
        node.value = shown(node.value)
        return node


def compose(text: str) -> Any:
    """Return the root node of a text; None for an empty text.

    Raises:
        yaml.YAMLError, RecursionError, ValueError: the text is not YAML, or too large.
    """
    return yaml.compose(hidden(text), Loader=_Loader)


def kind(node: Any) -> str:
    """Return the type of a node as a noun, for messages."""
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    nouns = {"bool": "a boolean", "int": "a number", "float": "a number", "null": "nothing"}
    return nouns.get(node.tag.rsplit(":", 1)[-1], "the text")


def texts(node: Any) -> Text | tuple[Text, ...]:
    """Return a node in the form that profile/values.py reads.

    Raises:
        MisfitError: the node is a mapping, or a list of anything but scalars.
    """
    if isinstance(node, yaml.ScalarNode):
        return _text(node)
    if isinstance(node, yaml.SequenceNode):
        return tuple(_text(item) for item in node.value)
    raise MisfitError


def _text(node: Any) -> Text:
    if not isinstance(node, yaml.ScalarNode):
        raise MisfitError
    return Text(node.value, quoted=node.style is not None)


def scalar(node: Any) -> str | bool | int | None:
    """Return a scalar by YAML's own types, for the head of a profile and for conditions."""
    tag, text = node.tag.rsplit(":", 1)[-1], str(node.value)
    if tag == "int":
        try:
            return int(text.replace("_", ""), 0)
        except ValueError:
            return text
    if tag == "bool":
        return text.lower() in ("yes", "true", "on")
    return None if tag == "null" else text
