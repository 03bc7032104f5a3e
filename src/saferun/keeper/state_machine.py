"""An object that is driven by a table of states and events.

This module uses only the standard library, since the keeper uses it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

State = str
Event = str | type  # a message is an event by its type
# (state, event) -> (action, next state); an action is a method of the object, or None.
Table = Mapping[tuple[State, Event], tuple[Callable[..., None] | None, State]]


def rows(
    states: Iterable[State],
    events: Iterable[Event],
    action: Callable[..., None] | None,
    following: State = "",
) -> Table:
    """Return the rows of a table with the same result for each event in each state.

    Args:
        states: the states in which the events may come.
        events: the events.
        action: the action for each of them.
        following: the next state; "" for no change.
    """
    return {(state, event): (action, following or state) for state in states for event in events}


class StateMachine:
    """An object that follows a table.

    Args:
        table: for every allowed event in a state, the action and the next state.
        state: the first state.
    """

    def __init__(self, table: Table, state: State) -> None:
        self._table = table
        self.state = state

    def step(self, event: Event, *details: object) -> None:
        """Go to the next state, then call the action with `details`.

        Raises:
            RuntimeError: the table does not allow the event in this state, which is a bug.
        """
        found = self._table.get((self.state, event))
        if found is None:
            name = event if isinstance(event, str) else event.__name__
            raise RuntimeError(f"{type(self).__name__}: no event `{name}` in state `{self.state}`")
        action, self.state = found
        if action:
            action(self, *details)
